# SPDX-License-Identifier: Apache-2.0
"""Weights that leave their modules for a while and come back bit for bit."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from omni_neuron_parallel import tensor_digest
from vllm_omni_neuron.offload import weights_on_host


class Model(nn.Module):
    """Ordinary, low-precision, transposed, tied, aliased and empty tensors, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.linear = nn.Linear(6, 5)
        self.tied = nn.Linear(6, 5)
        self.tied.weight = self.linear.weight
        self.low = nn.Parameter(torch.randn(3, 4, generator=generator).bfloat16())
        self.transposed = nn.Parameter(torch.randn(7, 3, generator=generator).t())
        joint = torch.randn(4, 8, generator=generator)
        self.left, self.right = nn.Parameter(joint[:, :3]), nn.Parameter(joint[:, 3:])
        self.register_buffer("steps", torch.arange(9))
        self.register_buffer("nothing", torch.empty(0))
        self.requires_grad_(False)

    def state(self) -> dict[str, tuple[Any, ...]]:
        return {
            name: (id(t), tensor_digest(t), t.shape, t.stride(), t.storage_offset(), t.dtype, t.device)
            for name, t in self.state_dict(keep_vars=True).items()
        }


# linear 30 + 5, tied bias 5, low 12 · 2, transposed 21, left and right 32, steps 9 · 8.
MODEL_BYTES = 4 * (30 + 5 + 5) + 2 * 12 + 4 * 21 + 4 * 32 + 8 * 9


def test_weights_are_gone_within_and_the_same_after() -> None:
    model, other = Model(), nn.Linear(2, 2)
    before = model.state()
    with weights_on_host([model, model.linear, other]) as nbytes:
        assert nbytes == MODEL_BYTES + 4 * 6
        for tensor in (*model.state_dict(keep_vars=True).values(), *other.parameters()):
            assert tensor.shape == (0,)
            assert tensor.untyped_storage().nbytes() == 0
    assert model.state() == before
    assert model.tied.weight is model.linear.weight
    # What lay in one storage does again.
    assert model.left.untyped_storage().data_ptr() == model.right.untyped_storage().data_ptr()
    assert torch.equal(other(torch.zeros(2)), other.bias)


def test_weights_come_back_when_the_block_raises() -> None:
    model = Model()
    before = model.state()
    with pytest.raises(KeyError), weights_on_host([model]):
        raise KeyError("decoding failed")
    assert model.state() == before


def test_in_inference_mode_weights_stay_ordinary_tensors() -> None:
    model = Model()
    before = model.state()
    with torch.inference_mode(), weights_on_host([model]):
        pass
    assert model.state() == before
    assert not any(tensor.is_inference() for tensor in model.state_dict(keep_vars=True).values())
    model.linear.weight.add_(1)


def test_weights_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = Model()
        before = model.state()
        with weights_on_host([model]):
            assert model.low.untyped_storage().nbytes() == 0
    assert model.state() == before


def test_on_the_cpu_nothing_is_copied() -> None:
    model = Model()
    places = [tensor.data_ptr() for tensor in model.parameters()]
    with weights_on_host([model]):
        pass
    assert [tensor.data_ptr() for tensor in model.parameters()] == places


def test_nothing_holds_on_to_the_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a copy in place of the move to the host, as on a device, the first storages die within the block."""
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *where: to(tensor, *where).clone())
    model = Model()
    before = model.state()
    storages = [weakref.ref(tensor.untyped_storage()) for tensor in model.parameters()]
    assert not any(storage() is None for storage in storages)
    with weights_on_host([model]):
        assert all(storage() is None for storage in storages)
    assert model.state() == before
    assert model.left.untyped_storage().data_ptr() == model.right.untyped_storage().data_ptr()


def test_a_compiled_module_is_not_compiled_again() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def run_as_is(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 5).requires_grad_(False)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return 2 * self.linear(value)

    torch._dynamo.reset()
    model, value = Doubled(), torch.ones(6)
    model.compile(backend=run_as_is, fullgraph=True, dynamic=False)
    before = model(value)
    with weights_on_host([model]):
        pass
    assert torch.equal(model(value), before)
    assert len(graphs) == 1
