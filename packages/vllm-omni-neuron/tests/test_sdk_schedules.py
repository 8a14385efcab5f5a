# SPDX-License-Identifier: Apache-2.0
"""Timesteps of flow matching; those of whole pipelines are compared in the model packages."""

from __future__ import annotations

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from vllm_omni_neuron.sdk import flow_match_timesteps


@pytest.mark.parametrize("dynamic", [False, True])
def test_timesteps_are_those_of_diffusers(dynamic: bool) -> None:
    ours, theirs = (FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=dynamic) for _ in range(2))
    mu = 0.5 + (1.15 - 0.5) * (1000 - 256) / (4096 - 256) if dynamic else None
    theirs.set_timesteps(sigmas=torch.linspace(1.0, 1 / 9, 9).tolist(), mu=mu)
    assert flow_match_timesteps(ours, 9, tokens=1000) is ours
    torch.testing.assert_close(ours.timesteps, theirs.timesteps)
    assert ours.begin_index == 0


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="UniPCMultistepScheduler: valid is FlowMatchEulerDiscreteScheduler"):
        flow_match_timesteps(UniPCMultistepScheduler(), 9)
    with pytest.raises(ValueError, match="use_dynamic_shifting: tokens"):
        flow_match_timesteps(FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), 9)
