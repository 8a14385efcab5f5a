# SPDX-License-Identifier: Apache-2.0
"""The solvers against vLLM-Omni's own, and the expert split that shift implies."""

from __future__ import annotations

import pytest
import torch
from vllm_omni.diffusion.models.schedulers import FlowUniPCMultistepScheduler
from vllm_omni.diffusion.models.wan2_2.scheduling_wan_euler import WanEulerScheduler

from omni_neuron_wan22 import FlowEulerScheduler, NeuronFlowUniPCMultistepScheduler, make_scheduler


def velocity(sample: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
    """A smooth stand-in for the model."""
    return torch.sin(sample * (1 + 1e-3 * float(timestep))) - 0.3 * sample


@pytest.mark.parametrize("steps", [1, 2, 3, 20, 40])
@pytest.mark.parametrize("shift", [1.0, 5.0, 12.0])
def test_unipc_follows_vllm_omni(steps: int, shift: float) -> None:
    reference = FlowUniPCMultistepScheduler(num_train_timesteps=1000, shift=1.0, prediction_type="flow_prediction")
    reference.set_timesteps(steps, shift=shift)
    ours = NeuronFlowUniPCMultistepScheduler(shift=shift)
    ours.set_timesteps(steps)
    assert torch.equal(ours.timesteps, reference.timesteps)
    assert torch.equal(ours.sigmas, reference.sigmas)
    sample = expected = torch.randn(1, 4, 2, 3, 5, generator=torch.Generator().manual_seed(0))
    for timestep in ours.timesteps:
        expected = reference.step(velocity(expected, timestep), timestep, expected, return_dict=False)[0]
        sample = ours.step(velocity(sample, timestep), timestep, sample).prev_sample
        # The reference computes its coefficients in float32, ours are float64.
        torch.testing.assert_close(sample, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("shift", [1.0, 5.0])
def test_euler_follows_vllm_omni(shift: float) -> None:
    reference = WanEulerScheduler(num_train_timesteps=1000, shift=shift)
    reference.set_timesteps(15)
    ours = FlowEulerScheduler(shift=shift)
    ours.set_timesteps(15)
    torch.testing.assert_close(ours.timesteps, reference.timesteps)
    sample = expected = torch.randn(1, 4, 2, 3, 5, generator=torch.Generator().manual_seed(0))
    for timestep in reference.timesteps:
        expected = reference.step(velocity(expected, timestep), timestep, expected, return_dict=False)[0]
        sample = ours.step(velocity(sample, timestep), timestep, sample).prev_sample
    torch.testing.assert_close(sample, expected)


@pytest.mark.parametrize(
    ("boundary", "shift", "high_noise_steps"), [(0.875, 12.0, 26), (0.875, 5.0, 17), (0.9, 5.0, 15)]
)
def test_shift_decides_how_many_steps_the_high_noise_expert_takes(
    boundary: float, shift: float, high_noise_steps: int
) -> None:
    scheduler = make_scheduler("unipc", shift)
    scheduler.set_timesteps(40)
    assert int((scheduler.timesteps >= 1000 * boundary).sum()) == high_noise_steps


def test_a_new_trajectory_forgets_the_old_one() -> None:
    scheduler = make_scheduler("unipc", 5.0)
    sample = torch.randn(1, 4, generator=torch.Generator().manual_seed(0))

    def run() -> torch.Tensor:
        scheduler.set_timesteps(6)
        current = sample
        for timestep in scheduler.timesteps:
            current = scheduler.step(velocity(current, timestep), timestep, current).prev_sample
        return current

    first = run()
    scheduler.set_timesteps(3, shift=12.0)
    scheduler.step(sample, None, sample)
    assert torch.equal(run(), first)


def test_errors_name_the_setting_and_the_valid_values() -> None:
    with pytest.raises(ValueError, match=r"sample_solver = 'ddim'.*unipc, euler"):
        make_scheduler("ddim", 5.0)
    with pytest.raises(ValueError, match="num_inference_steps = 0"):
        make_scheduler("unipc", 5.0).set_timesteps(0)
    with pytest.raises(ValueError, match="flow_shift = -1"):
        make_scheduler("euler", -1.0).set_timesteps(4)
    scheduler = make_scheduler("euler", 1.0)
    scheduler.set_timesteps(1)
    scheduler.step(torch.ones(1), None, torch.ones(1))
    with pytest.raises(RuntimeError, match="trajectory of 1 steps is over"):
        scheduler.step(torch.ones(1), None, torch.ones(1))
