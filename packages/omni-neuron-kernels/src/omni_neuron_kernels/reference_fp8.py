# SPDX-License-Identifier: Apache-2.0
"""FP8 in plain torch: quantisation bit for bit as the kernels do it, products of dequantised numbers.

Torch has no legacy E4M3. Its finite values, up to 240, are encoded as E4M3FN encodes them, so that dtype holds both.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

import torch
import torch.nn.functional as F

from omni_neuron_kernels.reference_projection import AllReduce, finish_qkv, partial_qkv
from omni_neuron_runtime import neuron_packages

RowForm = Literal["e4m3", "e4m3fn"]
MXForm = Literal["e4m3fn", "e5m2"]
ScaleRule = Literal["ocp", "doubled"]

ROW_LARGEST: dict[str, float] = {"e4m3": 240.0, "e4m3fn": 448.0}
SMALLEST_SCALE = 2.0**-80
MX_DTYPES = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_LARGEST_EXPONENT = {"e4m3fn": 8, "e5m2": 15}
MX_GROUP = 32
_DOUBLED_SINCE = (0, 5)


class NativeFp8Error(RuntimeError):
    """FP8 matmuls were asked for where there are none."""


# Not traced: torch before 2.10 cannot look for packages in a graph.
@torch.compiler.assume_constant_result
def scale_rule() -> ScaleRule:
    """The scale rule of `quantize_mx` of the NKI version that is imported, or else installed; without any, the latest.

    "ocp" until NKI 0.4: 2^(floor(log2 amax) − Emax), as the OCP MX specification. "doubled" from 0.5 on: twice that.
    """
    version = getattr(sys.modules.get("nki"), "__version__", None) or neuron_packages()["nki"]
    numbers = [part for part in (version or "").split(".")[:2] if part.isdigit()]
    return "ocp" if len(numbers) == 2 and (int(numbers[0]), int(numbers[1])) < _DOUBLED_SINCE else "doubled"


def row_quantize(x: torch.Tensor, *, form: RowForm) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops_fp8.row_quantize`."""
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) * (1.0 / ROW_LARGEST[form])).clamp_min(SMALLEST_SCALE)
    return (wide * (1.0 / scale)).to(torch.float8_e4m3fn), scale


def quantize_mx(x: torch.Tensor, *, form: MXForm, rule: ScaleRule) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops_fp8.quantize_mx`."""
    groups = x.double().unflatten(-1, (-1, MX_GROUP))
    largest = groups.abs().amax(-1)
    # frexp's mantissa is in [0.5, 1), so its exponent is floor(log2) + 1, exactly.
    exponent = torch.frexp(largest).exponent - 1 - _LARGEST_EXPONENT[form] + (1 if rule == "doubled" else 0)
    exponent = torch.where(largest == 0, -127, exponent.clamp(-127, 127))
    top = torch.finfo(MX_DTYPES[form]).max
    scaled = torch.ldexp(groups, -exponent[..., None]).clamp(-top, top)
    scales = torch.where(largest.isfinite(), exponent + 127, 255).to(torch.uint8)
    return scaled.float().to(MX_DTYPES[form]).flatten(-2), scales


def unpack_weight(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What `pack_fp8_weight` packed, times its scale, as float32 `[H, O]`, H as it was padded."""
    plain = weight.view(torch.uint8).permute(0, 2, 1).reshape(-1, weight.shape[1])
    return plain.view(torch.float8_e4m3fn).float() * scale


def adaln_modulate_fp8(
    hidden: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    branch: torch.Tensor | None,
    gate: torch.Tensor | None,
    epsilon: float,
    form: RowForm,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `ops_fp8.adaln_modulate_fp8`."""
    updated = hidden
    if branch is not None and gate is not None:
        updated = (hidden.float() + gate.float()[:, None] * branch.float()).to(hidden.dtype)
    normal = F.layer_norm(updated.float(), (hidden.shape[-1],), eps=epsilon)
    modulated = normal * (1 + scale.float())[:, None] + shift.float()[:, None]
    return (*row_quantize(modulated, form=form), updated)


def fp8_qkv_projection(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    native: bool,
    heads: tuple[int, int],
    head_dim: int,
    query_gain: torch.Tensor | None,
    key_gain: torch.Tensor | None,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    epsilon: float,
    ranks: int,
    all_reduce: AllReduce | None,
    replica_groups: tuple[tuple[int, ...], ...] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `ops_fp8.fp8_qkv_projection`."""
    _dequantised_only("fp8_qkv_projection", native)
    projected = _product(x.float() * x_scale, weight, weight_scale, bias).to(dtype)
    return finish_qkv(
        projected, heads, head_dim, query_gain, key_gain, rotation, epsilon=epsilon, ranks=ranks, all_reduce=all_reduce
    )


def fp8_qkv_partial(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    native: bool,
    heads: tuple[int, int],
    head_dim: int,
    query_gain: torch.Tensor | None,
    key_gain: torch.Tensor | None,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `reference_projection.qkv_partial`, of row-quantised tokens with an FP8 weight."""
    _dequantised_only("fp8_qkv_projection", native)
    projected = _product(x.float() * x_scale, weight, weight_scale, bias).to(dtype)
    return partial_qkv(projected, heads, head_dim, query_gain, key_gain, rotation)


def fp8_output_projection(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None, *, native: bool
) -> torch.Tensor:
    """See `ops_fp8.fp8_output_projection`; here x is not quantised."""
    _dequantised_only("fp8_output_projection", native)
    return _product(x.float(), weight, weight_scale, bias).to(x.dtype)


def fp8_mlp(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    up_weight: torch.Tensor,
    up_scale: torch.Tensor,
    up_bias: torch.Tensor,
    down_weight: torch.Tensor,
    down_scale: torch.Tensor,
    down_bias: torch.Tensor,
    *,
    dtype: torch.dtype,
    native: bool,
) -> torch.Tensor:
    """See `ops_fp8.fp8_mlp`; here the hidden activations are not quantised."""
    _dequantised_only("fp8_mlp", native)
    inner = F.gelu(_product(x.float() * x_scale, up_weight, up_scale, up_bias), approximate="tanh")
    return _product(inner, down_weight, down_scale, down_bias).to(dtype)


def native_refusal(*tensors: Any, native: bool = False, **options: Any) -> str | None:
    """Why torch does not run an FP8 op whose native form is asked for."""
    return "it dequantises, and native=True asks for FP8 matmuls" if native else None


def _dequantised_only(op: str, native: bool) -> None:
    reason = native_refusal(native=native)
    if reason:
        raise NativeFp8Error(f"{op} in a traced graph is the torch reference: {reason}")


def _product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = x @ unpack_weight(weight, scale)[: x.shape[-1]]
    return product if bias is None else product + bias.float()
