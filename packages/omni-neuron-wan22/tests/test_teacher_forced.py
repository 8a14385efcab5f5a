# SPDX-License-Identifier: Apache-2.0
"""Every step of diffusers' denoising run, predicted by our experts from diffusers' latents, on two layouts.

Errors cannot hide in, or come from, an earlier step: each step starts from what diffusers has. So a fault of the late,
low-noise steps alone is seen as such. In bfloat16 the pass rule is that of omni-neuron-testkit.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from diffusers import WanPipeline
from teacher_forced import TeacherStep, diffusers_in_low_precision, ours, record

from omni_neuron_parallel import Topology
from omni_neuron_testkit import RunReport, compare_steps
from omni_neuron_wan22 import NeuronFlowUniPCMultistepScheduler

STEPS = 20


class Teacher(NamedTuple):
    checkpoint: Path
    steps: list[TeacherStep]
    low_precision: list[torch.Tensor]
    file: Path

    def report(self, predictions: list[torch.Tensor], dtype: torch.dtype) -> RunReport:
        low_precision = None if dtype == torch.float32 else self.low_precision
        reference, timesteps = [step.prediction for step in self.steps], [step.timestep for step in self.steps]
        return compare_steps(reference, low_precision, predictions, timesteps)


@pytest.fixture(scope="module")
def text_to_video(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Teacher:
    pipeline = WanPipeline.from_pretrained(tiny, dtype=torch.float32)
    return teach(tiny, pipeline, tmp_path_factory.mktemp("teacher") / "steps.pt")


def teach(checkpoint: Path, pipeline: WanPipeline, file: Path, **arguments: object) -> Teacher:
    # Pinned: diffusers' own UniPC has other timesteps.
    pipeline.scheduler = NeuronFlowUniPCMultistepScheduler(shift=5.0)
    with torch.no_grad():
        steps = record(
            pipeline,
            prompt="A red circle, moving right.",
            negative_prompt="blurry, dark",
            height=64,
            width=80,
            num_frames=9,
            num_inference_steps=STEPS,
            max_sequence_length=64,
            generator=torch.Generator().manual_seed(7),
            **arguments,
        )
        low_precision = diffusers_in_low_precision(checkpoint, steps)
    torch.save([tuple(step) for step in steps], file)
    return Teacher(checkpoint, steps, low_precision, file)


def test_the_teacher_shows_first_middle_and_last_steps(text_to_video: Teacher) -> None:
    steps = text_to_video.steps
    assert [step.expert for step in steps] == ["transformer"] * 9 + ["transformer_2"] * 11
    assert steps[0].timestep > 990 and steps[-1].timestep < 250


@pytest.mark.parametrize(
    ("pool", "topology"),
    [("four_ranks", Topology(tp=2, cp=2)), ("two_ranks", Topology(cfg=2))],
    ids=["tp2-cp2", "cfg2"],
)
def test_every_step(request: pytest.FixtureRequest, text_to_video: Teacher, pool: str, topology: Topology) -> None:
    dtypes = [torch.float32, torch.bfloat16]
    arguments = (topology, str(text_to_video.checkpoint), str(text_to_video.file), dtypes)
    ranks = request.getfixturevalue(pool).run(ours, *arguments)
    for index, dtype in enumerate(dtypes):
        predictions = ranks[0][index]
        for other in ranks[1:]:
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(predictions, other[index], strict=True))
        report = text_to_video.report(predictions, dtype)
        assert len(report.steps) == STEPS
        assert report.passed, report.problems
        assert report.trend.label == "stable"
