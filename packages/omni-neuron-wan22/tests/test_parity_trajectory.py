# SPDX-License-Identifier: Apache-2.0
"""A whole denoising run against diffusers' `WanPipeline`: 20 steps, guidance, both experts, the same scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline
from wan22_reference import NEGATIVE_PROMPT, PROMPT, on_ranks, relative_l2, run_trajectory

from omni_neuron_parallel import RankPool
from omni_neuron_wan22 import NeuronFlowUniPCMultistepScheduler, make_scheduler

SETTINGS = {
    "height": 64,
    "width": 96,
    "num_frames": 9,
    "num_inference_steps": 20,
    "guidance_scale": 4.0,
    "guidance_scale_2": 3.0,
    "seed": 7,
    "max_sequence_length": 64,
}


def run_diffusers(path: Path, dtype: torch.dtype) -> torch.Tensor:
    pipeline = WanPipeline.from_pretrained(path, dtype=dtype)
    # Pinned: diffusers' own UniPC has other timesteps.
    pipeline.scheduler = NeuronFlowUniPCMultistepScheduler(shift=5.0)
    pipeline.set_progress_bar_config(disable=True)
    settings = {name: value for name, value in SETTINGS.items() if name != "seed"}
    generator = torch.Generator().manual_seed(SETTINGS["seed"])
    return pipeline(PROMPT, NEGATIVE_PROMPT, **settings, generator=generator, output_type="latent", return_dict=False)[
        0
    ]


@pytest.fixture(scope="module")
def float32_reference(tiny: Path) -> torch.Tensor:
    return run_diffusers(tiny, torch.float32)


@pytest.mark.parametrize("pool", [1, 2, 4], indirect=True, ids=["tp1", "tp2", "tp4"])
def test_final_latents(tiny: Path, float32_reference: torch.Tensor, pool: RankPool | None) -> None:
    results = on_ranks(pool, run_trajectory, str(tiny), torch.float32, SETTINGS)
    _, single_noise, _ = run_trajectory(str(tiny), torch.float32, SETTINGS | {"num_inference_steps": 1})
    for latents, noise, steps in results:
        assert relative_l2(latents, float32_reference) <= 1e-3
        assert torch.equal(latents, results[0][0])  # every rank the same bits (checked after every step as well)
        assert noise == single_noise  # whatever the layout
        assert steps == {"transformer": 9, "transformer_2": 11}


def test_bfloat16_is_as_near_to_float32_as_diffusers(tiny: Path, float32_reference: torch.Tensor) -> None:
    theirs = relative_l2(run_diffusers(tiny, torch.bfloat16), float32_reference)
    latents, _, _ = run_trajectory(str(tiny), torch.bfloat16, SETTINGS)
    assert relative_l2(latents, float32_reference) <= 1.25 * theirs


def test_same_seed_same_bits_and_another_seed_another_video(tiny: Path) -> None:
    settings = SETTINGS | {"num_inference_steps": 3}
    first, _, _ = run_trajectory(str(tiny), torch.float32, settings)
    again, _, _ = run_trajectory(str(tiny), torch.float32, settings)
    other, _, _ = run_trajectory(str(tiny), torch.float32, settings | {"seed": 8})
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_guidance_of_one_runs_no_negative_branch(tiny: Path) -> None:
    """The result does not depend on the negative prompt, and each step is one forward, not two."""
    import wan22_reference

    from omni_neuron_wan22 import WanTransformer3DModel

    forwards = []
    original = WanTransformer3DModel.forward
    settings = SETTINGS | {"num_inference_steps": 3, "guidance_scale": 1.0, "guidance_scale_2": 1.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WanTransformer3DModel, "forward", lambda *a, **k: forwards.append(1) or original(*a, **k))
        first, _, _ = run_trajectory(str(tiny), torch.float32, settings)
        assert len(forwards) == 3
        patch.setattr(wan22_reference, "NEGATIVE_PROMPT", "something else")
        second, _, _ = run_trajectory(str(tiny), torch.float32, settings)
    assert torch.equal(first, second)


def test_shift_of_one_request_does_not_stick_to_the_next(tiny: Path) -> None:
    def steps(shift: float) -> dict[str, int]:
        settings = SETTINGS | {"num_inference_steps": 40, "height": 16, "width": 16, "num_frames": 5}
        return run_trajectory(str(tiny), torch.float32, settings | {"extra_args": {"flow_shift": shift}})[2]

    assert steps(12.0) == {"transformer": 26, "transformer_2": 14}
    assert steps(5.0) == {"transformer": 17, "transformer_2": 23}


def test_a_step_at_the_boundary_itself_is_the_high_noise_experts(tiny: Path) -> None:
    scheduler = make_scheduler("euler", 5.0)
    scheduler.set_timesteps(40)
    exact = [index for index, value in enumerate(scheduler.timesteps.tolist()) if value / 1000 * 1000 == value]
    step = next(index for index in exact if index > 5)
    settings = SETTINGS | {"num_inference_steps": 40, "height": 16, "width": 16, "num_frames": 5}
    settings |= {"extra_args": {"sample_solver": "euler"}, "boundary_ratio": scheduler.timesteps[step].item() / 1000}
    assert run_trajectory(str(tiny), torch.float32, settings)[2]["transformer"] == step + 1
