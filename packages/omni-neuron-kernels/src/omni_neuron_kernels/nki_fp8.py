# SPDX-License-Identifier: Apache-2.0
"""Launches of the FP8 kernels, and their limits: MX needs trn3."""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
import torch.nn.functional as F

from omni_neuron_kernels import nki_projection
from omni_neuron_kernels.nki_launch import CORES, dtype_limit, kernels_of, vector_row
from omni_neuron_kernels.reference_fp8 import MX_DTYPES, ROW_LARGEST, MXForm, RowForm, ScaleRule, scale_rule
from omni_neuron_runtime import platform_target

ROW_DTYPES = {"e4m3": "float8_e4m3", "e4m3fn": "float8_e4m3fn"}
PACKED_ROWS = 128
# What lies on chip per partition in row_quantize and adaln_modulate_fp8: a dozen rows, most of them float32.
ROW_WIDTH = 5120
SBUF_KIB = 248  # of trn3's 256 per partition
BLOCK = 512  # elements of the contraction in one MX matmul
# Columns of which 1 KiB holds scale and bias while they are loaded: as bfloat16, and one of the two as float32 still.
VECTORS_PER_KIB = 128


def row_quantize(x: torch.Tensor, *, form: RowForm) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops_fp8.row_quantize`."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    data, scale = kernels_of("norms").row_quantize[CORES](rows, ROW_LARGEST[form], ROW_DTYPES[form])
    return data.view(torch.float8_e4m3fn).reshape(x.shape), scale.reshape(*x.shape[:-1], 1)


def row_quantize_limits(x: torch.Tensor, *, form: RowForm = "e4m3fn") -> str | None:
    """Why the kernel cannot take these."""
    return _form_limit(x, form) or dtype_limit(x=x) or _width_limit(x)


def quantize_mx(x: torch.Tensor, *, form: MXForm, rule: ScaleRule) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops_fp8.quantize_mx`."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    data, scales = kernels_of("fp8").quantize_mx[CORES](rows, f"float8_{form}")
    return data.view(MX_DTYPES[form]).reshape(x.shape), scales.reshape(*x.shape[:-1], -1)


def quantize_mx_limits(x: torch.Tensor, *, form: MXForm = "e4m3fn", rule: ScaleRule | None = None) -> str | None:
    """Why the kernel cannot take these."""
    if rule not in (None, scale_rule()):
        return f"rule {rule}; this NKI version's is {scale_rule()}"
    if x.shape[-1] % PACKED_ROWS:
        return f"rows of {x.shape[-1]} elements, a multiple of {PACKED_ROWS}"
    return _mx_limit(x) or _width_limit(x)


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
    gated = () if branch is None or gate is None else (branch.contiguous(), gate.float().contiguous())
    vectors = (scale.float().contiguous(), shift.float().contiguous())
    kernel = kernels_of("norms").quantized_adaln_modulate[CORES]
    results = kernel(hidden.contiguous(), gated, *vectors, epsilon, ROW_LARGEST[form], ROW_DTYPES[form])
    return results[0].view(torch.float8_e4m3fn), results[1], results[2] if gated else hidden


def adaln_limits(
    hidden: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    branch: torch.Tensor | None = None,
    form: RowForm = "e4m3fn",
    **options: Any,
) -> str | None:
    """Why the kernel cannot take these."""
    streams = {"hidden": hidden} if branch is None else {"hidden": hidden, "branch": branch}
    return _form_limit(hidden, form) or dtype_limit(**streams) or _width_limit(hidden)


def fp8_qkv_projection(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    native: bool,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `ops_fp8.fp8_qkv_projection`."""
    tensors = (x, x_scale, weight, weight_scale, bias)
    if not nki_projection.one_launch(x, options):
        return nki_projection.finished(fp8_qkv_partial(*tensors, dtype=dtype, native=native, **options), options)
    norm = nki_projection.norm_arguments(options)
    kernel = kernels_of("qkv").fp8_qkv_projection[CORES]
    results = kernel(*_qkv_arguments(*tensors, options), *norm, str(dtype).removeprefix("torch."))
    return nki_projection.as_heads(_without_pads(results, x), x.shape[0], x.shape[1], options)


def fp8_qkv_partial(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    native: bool,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `reference_fp8.fp8_qkv_partial`."""
    arguments = _qkv_arguments(x, x_scale, weight, weight_scale, bias, options)
    results = kernels_of("qkv").fp8_qkv_partial[CORES](*arguments, str(dtype).removeprefix("torch."))
    return nki_projection.with_sums(_without_pads(results, x), x.shape[0], x.shape[1], options)


def _qkv_arguments(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    options: dict[str, Any],
) -> tuple[Any, ...]:
    heads, head_dim, gains, tables = nki_projection.qkv_arguments(x.shape[0], options)
    return (
        _padded(x),
        _even(x_scale.reshape(-1, 1)),
        weight.flatten(1).contiguous(),
        vector_row(weight_scale),
        nki_projection.bias_row(bias, weight.shape[1], weight),
        heads,
        head_dim,
        gains,
        tuple(_even(table) for table in tables),
    )


def _without_pads(results: Any, x: torch.Tensor) -> list[torch.Tensor]:
    return [part[: x.shape[0] * x.shape[1]] for part in results]


def qkv_limits(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> str | None:
    """Why the kernel cannot take these."""
    return _mx_limit(x) or _result_limit(dtype) or nki_projection.size_limit(4 * weight.shape[0], 1, True, options)


def fp8_output_projection(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None, *, native: bool
) -> torch.Tensor:
    """See `ops_fp8.fp8_output_projection`."""
    columns = weight.shape[1]
    result = kernels_of("fp8").fp8_output_projection[CORES](
        _padded(x),
        weight.flatten(1).contiguous(),
        vector_row(weight_scale),
        nki_projection.bias_row(bias, columns, weight),
    )
    return result[: x.numel() // x.shape[-1]].reshape(*x.shape[:-1], columns)


def output_limits(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None, **options: Any
) -> str | None:
    """Why the kernel cannot take these."""
    if x.dtype != torch.bfloat16:
        return _mx_limit(x) or f"x {x.dtype}; the kernel takes torch.bfloat16"
    # For 1,024 tokens and a block of 512 of their elements: as 16-bit floats, packed, and stripes of the weight.
    blocks, columns = math.ceil(weight.shape[0] * 4 / BLOCK), weight.shape[1]
    needed = max(14.5 * blocks + columns / 256 + 8, columns / VECTORS_PER_KIB)
    return _mx_limit(x) or _sbuf_limit(needed, x.shape[-1], columns)


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
    """See `ops_fp8.fp8_mlp`."""
    columns = down_weight.shape[1]
    result = kernels_of("fp8").fp8_mlp[CORES](
        _padded(x),
        _even(x_scale.reshape(-1, 1)).reshape(1, -1),
        up_weight.flatten(1).contiguous(),
        vector_row(up_scale).reshape(-1, 4),
        vector_row(up_bias).reshape(-1, 4),
        down_weight.flatten(1).contiguous(),
        vector_row(down_scale),
        vector_row(down_bias),
        str(dtype).removeprefix("torch."),
    )
    return result[: x.numel() // x.shape[-1]].reshape(*x.shape[:-1], columns)


def mlp_limits(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    up_weight: torch.Tensor,
    up_scale: torch.Tensor,
    up_bias: torch.Tensor,
    down_weight: torch.Tensor,
    *tensors: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> str | None:
    """Why the kernel cannot take these."""
    inner = up_weight.shape[1]
    if inner % PACKED_ROWS:
        return _mx_limit(x) or f"inner width {inner}, a multiple of {PACKED_ROWS} (pad with zero columns)"
    # For 1,024 tokens and blocks of 512: packed tokens and activations, then two stripes of one weight or the other.
    blocks, inner_blocks = (math.ceil(weight.shape[0] * 4 / BLOCK) for weight in (up_weight, down_weight))
    columns = down_weight.shape[1]
    needed = 4 * blocks + 5 * inner_blocks + max(8 * blocks, 5 * inner_blocks) + columns / 256 + 24
    needed = max(needed, columns / VECTORS_PER_KIB)
    return _mx_limit(x) or _result_limit(dtype) or _sbuf_limit(needed, x.shape[-1], inner, columns)


def _padded(x: torch.Tensor) -> torch.Tensor:
    """Tokens as `[rows, H]`, both padded with zeros: the MX matmul takes an even number of rows and 128 | H."""
    rows = x.reshape(-1, x.shape[-1])
    spare = (0, -x.shape[-1] % PACKED_ROWS, 0, rows.shape[0] % 2)
    if not any(spare):
        return rows.contiguous()
    if x.dtype == torch.float8_e4m3fn:
        return F.pad(rows.view(torch.uint8), spare).view(x.dtype)
    return F.pad(rows, spare)


def _even(rows: torch.Tensor) -> torch.Tensor:
    return F.pad(rows, (0, 0, 0, rows.shape[0] % 2)).contiguous()


def _mx_limit(x: torch.Tensor) -> str | None:
    target = _target(x)
    return None if target == "trn3" else f"platform target {target}; MX instructions need trn3"


def _form_limit(x: torch.Tensor, form: str) -> str | None:
    target = _target(x)
    return None if form == "e4m3" or target == "trn3" else f"platform target {target}; {form} needs trn3, e4m3 does not"


def _target(x: torch.Tensor) -> str:
    if x.device.type == "neuron":
        return platform_target()
    # In the simulator; this is asked only where it has taken nki's place.
    return f"trn{importlib.import_module('nki.isa').get_nc_version().value - 1}"


def _width_limit(x: torch.Tensor) -> str | None:
    return f"rows of {x.shape[-1]} elements, at most {ROW_WIDTH}" if x.shape[-1] > ROW_WIDTH else None


def _result_limit(dtype: torch.dtype) -> str | None:
    return None if dtype == torch.bfloat16 else f"results in {dtype}; kernels compute them in torch.bfloat16"


def _sbuf_limit(kib: float, *widths: int) -> str | None:
    if kib > SBUF_KIB:
        return f"widths {', '.join(map(str, widths))} need {kib:.0f} KiB of SBUF per partition, at most {SBUF_KIB}"
    return None
