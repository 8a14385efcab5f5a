# SPDX-License-Identifier: Apache-2.0
"""The ops in plain torch, as fused as torch has them. They refuse nothing.

Norms are computed in float32 (float64 for float64 inputs), products in the dtype of their inputs; torch keeps the sums
in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from omni_neuron_kernels import reference_attention, reference_convolution, reference_fp8, reference_projection
from omni_neuron_kernels.dispatch import Implementation
from omni_neuron_kernels.reference_projection import widened


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, epsilon: float) -> torch.Tensor:
    """See `ops.rms_norm`."""
    wide = widened(x)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * widened(weight)).to(x.dtype)


def adaln_modulate(
    hidden: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    branch: torch.Tensor | None,
    gate: torch.Tensor | None,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.adaln_modulate`."""
    updated = hidden
    if branch is not None and gate is not None:
        updated = torch.addcmul(widened(hidden), widened(branch), widened(gate)[:, None]).to(hidden.dtype)
    wide, size = widened(updated), (hidden.shape[-1],)
    scale, shift = scale.to(wide.dtype), shift.to(wide.dtype)
    if hidden.shape[0] == 1 or (scale.stride(0) == 0 and shift.stride(0) == 0):
        # One gain and one bias for all rows: torch's layer norm applies them in the same pass.
        modulated = F.layer_norm(wide, size, 1 + scale[0], shift[0], epsilon)
    else:
        modulated = torch.addcmul(shift[:, None], F.layer_norm(wide, size, eps=epsilon), 1 + scale[:, None])
    return modulated.to(hidden.dtype), updated


def mlp(
    x: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor,
    down_weight: torch.Tensor,
    down_bias: torch.Tensor,
) -> torch.Tensor:
    """See `ops.mlp`."""
    inner = F.gelu(F.linear(x, up_weight.t(), up_bias.to(x.dtype)), approximate="tanh")
    return F.linear(inner, down_weight.t(), down_bias.to(x.dtype))


def gated_mlp(
    x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, down_weight: torch.Tensor, *, activation: str
) -> torch.Tensor:
    """See `ops.gated_mlp`."""
    gate = F.linear(x, gate_weight.t())
    gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return F.linear(gate * F.linear(x, up_weight.t()), down_weight.t())


def output_projection(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """See `ops.output_projection`."""
    return F.linear(x, weight.t(), bias.to(x.dtype))


def _never(*tensors: Any, **options: Any) -> None:
    return None


REFERENCE = (
    {
        function.__name__: Implementation(function, _never, priority=0)
        for function in (
            rms_norm,
            adaln_modulate,
            reference_attention.flash_attention,
            reference_attention.ring_attention,
            mlp,
            gated_mlp,
            output_projection,
            reference_convolution.causal_conv3d,
            reference_fp8.adaln_modulate_fp8,
            reference_fp8.quantize_mx,
            reference_fp8.row_quantize,
            reference_projection.qkv_partial,
            reference_projection.qkv_projection,
        )
    }
    | {
        "ring_in_graph": Implementation(
            reference_attention.ring_in_graph, reference_attention.several_ranks, priority=0
        )
    }
    | {
        function.__name__: Implementation(function, reference_fp8.native_refusal, priority=0)
        for function in (
            reference_fp8.fp8_mlp,
            reference_fp8.fp8_output_projection,
            reference_fp8.fp8_qkv_partial,
            reference_fp8.fp8_qkv_projection,
        )
    }
)
