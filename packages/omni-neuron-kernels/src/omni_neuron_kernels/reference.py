# SPDX-License-Identifier: Apache-2.0
"""The ops in plain torch, in float32 (float64 for float64 inputs). They refuse nothing."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from omni_neuron_kernels import reference_attention, reference_convolution, reference_fp8, reference_projection
from omni_neuron_kernels.dispatch import Implementation


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, epsilon: float) -> torch.Tensor:
    """See `ops.rms_norm`."""
    wide = _wide(x)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * _wide(weight)).to(x.dtype)


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
        updated = (_wide(hidden) + _wide(gate)[:, None] * _wide(branch)).to(hidden.dtype)
    normal = F.layer_norm(_wide(updated), (hidden.shape[-1],), eps=epsilon)
    return (normal * (1 + _wide(scale))[:, None] + _wide(shift)[:, None]).to(hidden.dtype), updated


def mlp(
    x: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor,
    down_weight: torch.Tensor,
    down_bias: torch.Tensor,
) -> torch.Tensor:
    """See `ops.mlp`."""
    inner = F.gelu(_wide(x) @ _wide(up_weight) + _wide(up_bias), approximate="tanh")
    return (inner @ _wide(down_weight) + _wide(down_bias)).to(x.dtype)


def gated_mlp(
    x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, down_weight: torch.Tensor, *, activation: str
) -> torch.Tensor:
    """See `ops.gated_mlp`."""
    gate = _wide(x) @ _wide(gate_weight)
    gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return ((gate * (_wide(x) @ _wide(up_weight))) @ _wide(down_weight)).to(x.dtype)


def output_projection(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """See `ops.output_projection`."""
    return (_wide(x) @ _wide(weight) + _wide(bias)).to(x.dtype)


def _never(*tensors: Any, **options: Any) -> None:
    return None


REFERENCE = {
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
        reference_projection.qkv_projection,
    )
} | {
    function.__name__: Implementation(function, reference_fp8.native_refusal, priority=0)
    for function in (
        reference_fp8.fp8_mlp,
        reference_fp8.fp8_output_projection,
        reference_fp8.fp8_qkv_projection,
    )
}
