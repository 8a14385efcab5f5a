# SPDX-License-Identifier: Apache-2.0
"""What all public functions do: check shapes, then ask the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from omni_neuron_kernels import dispatch
from omni_neuron_kernels.graph_ops import traced


def run_op(reference_function: Callable[..., Any], *tensors: Any, **options: Any) -> Any:
    """Run the op that `reference_function` is the torch reference of, and is named after."""
    # torch.compile sees neither into NKI kernels nor into the choice of a provider: it gets a node of the graph.
    if torch.compiler.is_compiling():
        return traced(reference_function, *tensors, **options)
    return dispatch.run(reference_function.__name__, *tensors, **options)


def expect_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the argument `name` has this shape."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; valid is {shape}")


def expect_modulation(
    hidden: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    branch: torch.Tensor | None,
    gate: torch.Tensor | None,
) -> None:
    """Raise ValueError unless these fit together as `adaln_modulate` has them."""
    if hidden.dim() != 3:
        raise ValueError(f"hidden has shape {tuple(hidden.shape)}; valid is [B, S, F]")
    vector = (hidden.shape[0], hidden.shape[2])
    expect_shape("scale", scale, vector)
    expect_shape("shift", shift, vector)
    if (branch is None) != (gate is None):
        raise ValueError("branch and gate go together; one of them is None")
    if branch is not None and gate is not None:
        expect_shape("branch", branch, tuple(hidden.shape))
        expect_shape("gate", gate, vector)
