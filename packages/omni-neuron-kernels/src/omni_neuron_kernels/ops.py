# SPDX-License-Identifier: Apache-2.0
"""The public functions: arguments are checked here, whoever computes."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from omni_neuron_kernels import reference
from omni_neuron_kernels.op_support import expect_modulation, expect_shape, run_op

GateActivation = Literal["gelu_tanh", "silu"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, epsilon: float = 1e-6) -> torch.Tensor:
    """x / sqrt(mean(x²) + ε) · weight over the last dim, in float32.

    Args:
        x: `[…, F]`.
        weight: `[F]`.
        epsilon: added to the mean square.

    Returns:
        Shape and dtype of `x`.

    Raises:
        ValueError: `weight` does not fit.
    """
    expect_shape("weight", weight, (x.shape[-1],))
    return run_op(reference.rms_norm, x, weight, epsilon=epsilon)


def adaln_modulate(
    hidden: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    branch: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    epsilon: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """LayerNorm(updated) · (1 + scale) + shift with updated = hidden + gate · branch, in float32.

    Args:
        hidden: `[B, S, F]`, the residual stream.
        scale: `[B, F]`.
        shift: `[B, F]`.
        branch: `[B, S, F]`, what an attention or MLP adds to the stream; None adds nothing.
        gate: `[B, F]`, with `branch`.
        epsilon: added to the variance.

    Returns:
        The modulated and the updated stream, both of `hidden`'s shape and dtype. The norm reads the updated stream as
        rounded to that dtype. Without `branch` the second one is `hidden` itself.

    Raises:
        ValueError: shapes that do not fit, or one of `branch` and `gate` without the other.
    """
    expect_modulation(hidden, scale, shift, branch, gate)
    return run_op(reference.adaln_modulate, hidden, scale, shift, branch=branch, gate=gate, epsilon=epsilon)


def mlp(
    x: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor,
    down_weight: torch.Tensor,
    down_bias: torch.Tensor,
) -> torch.Tensor:
    """gelu_tanh(x · up_weight + up_bias) · down_weight + down_bias, sums in float32.

    Args:
        x: `[…, H]`.
        up_weight: `[H, I]`, the transpose of `nn.Linear`'s.
        up_bias: `[I]`.
        down_weight: `[I, O]`.
        down_bias: `[O]`; with tensor parallelism a rank passes its share.

    Returns:
        `[…, O]` in x's dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    if up_weight.dim() != 2 or down_weight.dim() != 2 or up_weight.shape[0] != x.shape[-1]:
        raise ValueError(f"x {tuple(x.shape)} and up_weight {tuple(up_weight.shape)} are not […, H] and [H, I]")
    expect_shape("down_weight", down_weight, (up_weight.shape[1], down_weight.shape[1]))
    expect_shape("up_bias", up_bias, (up_weight.shape[1],))
    expect_shape("down_bias", down_bias, (down_weight.shape[1],))
    return run_op(reference.mlp, x, up_weight, up_bias, down_weight, down_bias)


def gated_mlp(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    *,
    activation: GateActivation = "silu",
) -> torch.Tensor:
    """(act(x · gate_weight) ⊙ (x · up_weight)) · down_weight, sums in float32, without biases.

    Args:
        x: `[…, H]`.
        gate_weight: `[H, I]`, the transpose of `nn.Linear`'s.
        up_weight: `[H, I]`.
        down_weight: `[I, O]`.
        activation: "silu" or "gelu_tanh".

    Returns:
        `[…, O]` in x's dtype.

    Raises:
        ValueError: shapes that do not fit, or another activation.
    """
    if activation not in get_args(GateActivation):
        raise ValueError(f"activation = {activation!r}; valid are {', '.join(get_args(GateActivation))}")
    if up_weight.dim() != 2 or down_weight.dim() != 2 or up_weight.shape[0] != x.shape[-1]:
        raise ValueError(f"x {tuple(x.shape)} and up_weight {tuple(up_weight.shape)} are not […, H] and [H, I]")
    expect_shape("gate_weight", gate_weight, tuple(up_weight.shape))
    expect_shape("down_weight", down_weight, (up_weight.shape[1], down_weight.shape[1]))
    return run_op(reference.gated_mlp, x, gate_weight, up_weight, down_weight, activation=activation)


def output_projection(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x · weight + bias, sums in float32.

    Args:
        x: `[…, H]`, such as attention outputs with all heads of this rank side by side.
        weight: `[H, O]`, the transpose of `nn.Linear`'s.
        bias: `[O]`; with tensor parallelism a rank passes its share.

    Returns:
        `[…, O]` in x's dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    if weight.dim() != 2 or weight.shape[0] != x.shape[-1]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} are not […, H] and [H, O]")
    expect_shape("bias", bias, (weight.shape[1],))
    return run_op(reference.output_projection, x, weight, bias)
