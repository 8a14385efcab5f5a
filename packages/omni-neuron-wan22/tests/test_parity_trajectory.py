# SPDX-License-Identifier: Apache-2.0
"""Which expert takes a step, with which guidance. The conformance kit compares whole runs with diffusers' pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from wan22_reference import run_trajectory

from omni_neuron_wan22 import make_scheduler

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
