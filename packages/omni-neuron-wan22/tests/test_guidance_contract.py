# SPDX-License-Identifier: Apache-2.0
"""The guidance mixin against the class of vLLM-Omni that it precedes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from vllm_omni.diffusion.distributed.cfg_parallel import CFGParallelMixin

from omni_neuron_parallel import NeuronCFGParallelMixin


@pytest.mark.parametrize("method", ["predict_noise_maybe_with_cfg", "predict_noise_with_multi_branch_cfg"])
def test_signatures_are_vllm_omnis(method: str) -> None:
    ours, theirs = (inspect.signature(getattr(mixin, method)) for mixin in (NeuronCFGParallelMixin, CFGParallelMixin))
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.parameters.values()
    ]


class Theirs(CFGParallelMixin):
    def predict_noise(self, value: float) -> torch.Tensor:
        return torch.linspace(0.0, value, 6).view(1, 3, 2)

    def combine_cfg_noise(self, *arguments: Any, kwargs: Any = None) -> Any:
        return super().combine_cfg_noise(*arguments) * (kwargs or 1.0)


class Ours(NeuronCFGParallelMixin, Theirs):
    pass


@pytest.mark.parametrize(
    "options", [{}, {"cfg_normalize": False}, {"output_slice": 2}, {"kwargs": 0.5}, {"do_true_cfg": False}], ids=str
)
def test_one_rank_is_vllm_omnis_own(options: dict[str, Any]) -> None:
    arguments = {"do_true_cfg": True, "true_cfg_scale": 4.0} | options
    branches = {"positive_kwargs": {"value": 1.0}, "negative_kwargs": {"value": 2.0}}
    ours, theirs = (mixin().predict_noise_maybe_with_cfg(**arguments, **branches) for mixin in (Ours, Theirs))
    assert torch.equal(ours, theirs)


def test_gathered_predictions_are_combined_by_vllm_omnis_method() -> None:
    """What every rank does after the gather; in a group of one with its own branch as both."""
    local = Theirs().predict_noise(1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("omni_neuron_parallel.cfg.gather_branches", lambda own, group: [own[0], (2 * own[0][0],)])
        assert torch.equal(Ours().gather_and_combine_cfg_noise(local, 4.0, 0.5), 0.5 * -2 * local)
