# SPDX-License-Identifier: Apache-2.0
"""Every step of diffusers' denoising run, predicted by our experts from diffusers' latents, on two layouts.

Errors cannot hide in, or come from, an earlier step: each step starts from what diffusers has. So a fault of the late,
low-noise steps alone is seen as such. In bfloat16 the pass rule is that of omni-neuron-testkit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline
from PIL import Image
from teacher_forced import CAPTURED, TeacherStep, capture, diffusers_in_low_precision, ours, record

from omni_neuron_parallel import Topology
from omni_neuron_testkit import RunReport, compare_runs, compare_steps
from omni_neuron_wan22 import NeuronFlowUniPCMultistepScheduler, TinyWan, make_tiny_checkpoint

# 3 latent frames of 3×5 tokens: 45, which neither CP 2 nor SP 2 divides.
STEPS, HEIGHT, WIDTH = 20, 48, 80
HIGH_NOISE_STEPS = {"t2v": 9, "i2v": 8}


class Teacher(NamedTuple):
    checkpoint: Path
    steps: list[TeacherStep]
    low_precision: list[torch.Tensor]
    file: Path

    def report(self, predictions: list[torch.Tensor], dtype: torch.dtype) -> RunReport:
        low_precision = None if dtype == torch.float32 else self.low_precision
        reference, timesteps = [step.prediction for step in self.steps], [step.timestep for step in self.steps]
        return compare_steps(reference, low_precision, predictions, timesteps)


Teachers = Callable[[str], Teacher]


@pytest.fixture(scope="module")
def teachers(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Teachers:
    """Diffusers' run by task."""
    folder = tmp_path_factory.mktemp("teachers")

    @functools.cache
    def of(task: str) -> Teacher:
        if task == "t2v":
            return teach(tiny, WanPipeline, folder / "t2v.pt")
        values = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
        checkpoint = make_tiny_checkpoint(folder / "i2v", TinyWan(task="i2v", vae_base_dim=8))
        return teach(checkpoint, WanImageToVideoPipeline, folder / "i2v.pt", image=Image.fromarray(values))

    return of


def teach(checkpoint: Path, pipeline_class: type, file: Path, **arguments: object) -> Teacher:
    pipeline = pipeline_class.from_pretrained(checkpoint, dtype=torch.float32)
    # Pinned: diffusers' own UniPC has other timesteps.
    pipeline.scheduler = NeuronFlowUniPCMultistepScheduler(shift=5.0)
    with torch.no_grad():
        steps = record(
            pipeline,
            prompt="A red circle, moving right.",
            negative_prompt="blurry, dark",
            height=HEIGHT,
            width=WIDTH,
            num_frames=9,
            num_inference_steps=STEPS,
            max_sequence_length=64,
            generator=torch.Generator().manual_seed(7),
            **arguments,
        )
        low_precision = diffusers_in_low_precision(checkpoint, steps)
    torch.save([tuple(step) for step in steps], file)
    return Teacher(checkpoint, steps, low_precision, file)


@pytest.mark.parametrize("task", ["t2v", "i2v"])
def test_the_teacher_shows_first_middle_and_last_steps(teachers: Teachers, task: str) -> None:
    steps, high = teachers(task).steps, HIGH_NOISE_STEPS[task]
    assert [step.expert for step in steps] == ["transformer"] * high + ["transformer_2"] * (STEPS - high)
    assert steps[0].timestep > 990 and steps[-1].timestep < 250
    assert steps[0].inputs["hidden_states"].shape[1] == {"t2v": 16, "i2v": 36}[task]


@pytest.mark.parametrize("task", ["t2v", "i2v"])
@pytest.mark.parametrize(
    ("pool", "topology"),
    [("four_ranks", Topology(tp=2, cp=2)), ("two_ranks", Topology(cfg=2))],
    ids=["tp2-cp2", "cfg2"],
)
def test_every_step(
    request: pytest.FixtureRequest, teachers: Teachers, task: str, pool: str, topology: Topology
) -> None:
    teacher, dtypes = teachers(task), [torch.float32, torch.bfloat16]
    ranks = request.getfixturevalue(pool).run(ours, topology, str(teacher.checkpoint), str(teacher.file), dtypes)
    for index, dtype in enumerate(dtypes):
        predictions = ranks[0][index]
        for other in ranks[1:]:
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(predictions, other[index], strict=True))
        report = teacher.report(predictions, dtype)
        assert len(report.steps) == STEPS
        assert report.passed, report.problems
        assert report.trend.label == "stable"


@pytest.mark.parametrize(
    ("pool", "topology", "sequence_parallel"),
    [("four_ranks", Topology(tp=2, cp=2), True), ("four_ranks", Topology(tp=2, cfg=2), False)],
    ids=["tp2-sp-cp2", "tp2-cfg2"],
)
def test_captured_parts_make_the_tensors_of_one_process(
    request: pytest.FixtureRequest,
    teachers: Teachers,
    tmp_path: Path,
    pool: str,
    topology: Topology,
    sequence_parallel: bool,
) -> None:
    teacher = teachers("t2v")
    arguments = str(teacher.checkpoint), str(teacher.file)
    request.getfixturevalue(pool).run(capture, topology, *arguments, str(tmp_path / "ranks"), sequence_parallel)
    capture(Topology(), *arguments, str(tmp_path / "one"), False)
    report = compare_runs(tmp_path / "one", None, tmp_path / "ranks")
    assert report.passed, report.problems
    modules = len(CAPTURED) + 1  # the first pattern means two
    assert [len(step.comparisons) for step in report.steps] == [2 * modules] * 2  # of both branches
