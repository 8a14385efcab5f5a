# SPDX-License-Identifier: Apache-2.0
"""Public functions of FP8 (ROW_MX): tokens with a float32 scale per row, weights with one per output column.

The matmuls are trn3's MX matmul. Elsewhere torch multiplies dequantised numbers, unless `native=True` forbids that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch

from omni_neuron_kernels import reference_fp8
from omni_neuron_kernels.dispatch import explain
from omni_neuron_kernels.op_support import expect_modulation, expect_shape, run_op
from omni_neuron_kernels.ops_projection import check_qkv
from omni_neuron_kernels.reference_fp8 import MX_GROUP, MXForm, NativeFp8Error, RowForm, ScaleRule, scale_rule
from omni_neuron_kernels.reference_projection import AllReduce

PACKED = 4  # neighbours of a column in one packed value
PACKED_ROWS = 128  # to a multiple of which the contraction is padded


def row_quantize(x: torch.Tensor, *, form: RowForm = "e4m3fn") -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 with a scale per row: its largest magnitude over the largest finite value of the form, 240 or 448.

    Args:
        x: `[…, F]`.
        form: "e4m3" is the legacy type, whose largest value is 240; "e4m3fn" is OCP's, with 448, which needs trn3.

    Returns:
        `[…, F]` float8_e4m3fn (values of both forms have the same bits), and float32 scales `[…, 1]`, at least 2⁻⁸⁰.

    Raises:
        ValueError: another form.
    """
    _one_of("form", form, RowForm)
    return run_op(reference_fp8.row_quantize, x, form=form)


def quantize_mx(
    x: torch.Tensor, *, form: MXForm = "e4m3fn", rule: ScaleRule | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 with a power of two for each 32 neighbours, as `nisa.quantize_mx` computes it; saturating.

    Args:
        x: `[…, F]` bfloat16 or float16, F a multiple of 32.
        form: "e4m3fn" or "e5m2".
        rule: "ocp" is 2^(floor(log2 amax) − Emax), Emax 8 or 15, as in NKI before 0.5; "doubled" twice that, as since.
            None takes the rule of this NKI version (`scale_rule`).

    Returns:
        `[…, F]` of the form's dtype, and the powers plus 127 `[…, F / 32]` uint8: 0 where all are zero, 255 where
        one is not finite.

    Raises:
        ValueError: dtype, F, form or rule is another one.
    """
    _one_of("form", form, MXForm)
    chosen = scale_rule() if rule is None else rule
    _one_of("rule", chosen, ScaleRule)
    if x.dtype not in (torch.bfloat16, torch.float16) or x.shape[-1] % MX_GROUP:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}; valid are bfloat16 and float16 […, a multiple of 32]")
    return run_op(reference_fp8.quantize_mx, x, form=form, rule=chosen)


def pack_fp8_weight(weight: torch.Tensor) -> torch.Tensor:
    """A weight as the FP8 projections take it: rows 4p to 4p + 3 of a column side by side, as the MX matmul reads them.

    Args:
        weight: `[H, O]` float8_e4m3fn, the transpose of `nn.Linear`'s.

    Returns:
        `[H' / 4, O, 4]` float8_e4m3fn; H' is H padded with zeros to a multiple of 128.

    Raises:
        ValueError: another dtype or rank.
    """
    if weight.dtype != torch.float8_e4m3fn or weight.dim() != 2:
        raise ValueError(f"weight is {weight.dtype} {tuple(weight.shape)}; valid is float8_e4m3fn [H, O]")
    plain = torch.nn.functional.pad(weight.view(torch.uint8), (0, 0, 0, -weight.shape[0] % PACKED_ROWS))
    packed = plain.unflatten(0, (-1, PACKED)).transpose(1, 2).contiguous()
    return packed.view(torch.float8_e4m3fn)


def adaln_modulate_fp8(
    hidden: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    *,
    branch: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    form: RowForm = "e4m3fn",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`adaln_modulate`, and `row_quantize` of its result before that is rounded to `hidden`'s dtype.

    Args:
        hidden: as `adaln_modulate`'s, and so are `scale`, `shift`, `branch`, `gate` and `epsilon`.
        scale: `[B, F]`.
        shift: `[B, F]`.
        branch: `[B, S, F]` or None.
        gate: `[B, F]` or None.
        epsilon: added to the variance.
        form: as `row_quantize`'s.

    Returns:
        The modulated stream as float8_e4m3fn `[B, S, F]`, its scales float32 `[B, S, 1]`, and the updated stream.

    Raises:
        ValueError: shapes that do not fit, another form, or one of `branch` and `gate` without the other.
    """
    _one_of("form", form, RowForm)
    expect_modulation(hidden, scale, shift, branch, gate)
    return run_op(
        reference_fp8.adaln_modulate_fp8, hidden, scale, shift, branch=branch, gate=gate, epsilon=epsilon, form=form
    )


def fp8_qkv_projection(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    query_gain: torch.Tensor | None = None,
    key_gain: torch.Tensor | None = None,
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None,
    epsilon: float = 1e-6,
    ranks: int = 1,
    all_reduce: AllReduce | None = None,
    replica_groups: Sequence[Sequence[int]] | None = None,
    native: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`qkv_projection` of row-quantised tokens with an FP8 weight.

    Args:
        x: `[B, S, H]` float8_e4m3fn.
        x_scale: `[B, S, 1]` float32, as `row_quantize` and `adaln_modulate_fp8` return it.
        weight: what `pack_fp8_weight` makes of `[H, (N_q + 2 N_k) D]`.
        weight_scale: float32 `[(N_q + 2 N_k) D]`, one per column.
        bias: as `qkv_projection`'s, and so are the options not named here.
        heads: (N_q, N_k).
        head_dim: D.
        dtype: of the results.
        query_gain: `[N_q D]` or None.
        key_gain: `[N_k D]` or None.
        rotation: two tables `[S, D / 2]` or None.
        epsilon: added to the mean square.
        ranks: over how many ranks the heads are split.
        all_reduce: sums a tensor over them.
        replica_groups: groups of ranks.
        native: refuse to dequantise.

    Returns:
        As `qkv_projection`, in `dtype`.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NativeFp8Error: `native`, and no provider has FP8 matmuls for these arguments.
    """
    options = check_qkv(x, heads, head_dim, query_gain, key_gain, rotation, epsilon, ranks, all_reduce, replica_groups)
    _check_fp8(x, x_scale)
    columns = (heads[0] + 2 * heads[1]) * head_dim
    _check_weight("weight", weight, weight_scale, x.shape[-1], columns)
    if bias is not None:
        expect_shape("bias", bias, (columns,))
    return _run(
        reference_fp8.fp8_qkv_projection, x, x_scale, weight, weight_scale, bias, dtype=dtype, native=native, **options
    )


def fp8_output_projection(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    native: bool = False,
) -> torch.Tensor:
    """x · (weight · weight_scale) + bias, x MX-quantised on the way; the torch path does not quantise it.

    Args:
        x: `[…, H]`; a kernel takes bfloat16.
        weight: what `pack_fp8_weight` makes of `[H, O]`.
        weight_scale: float32 `[O]`.
        bias: `[O]` or None; with tensor parallelism a rank passes its share.
        native: refuse to dequantise.

    Returns:
        `[…, O]` in x's dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NativeFp8Error: `native`, and no provider has FP8 matmuls for these arguments.
    """
    _check_weight("weight", weight, weight_scale, x.shape[-1], None)
    if bias is not None:
        expect_shape("bias", bias, (weight.shape[1],))
    return _run(reference_fp8.fp8_output_projection, x, weight, weight_scale, bias, native=native)


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
    dtype: torch.dtype = torch.bfloat16,
    native: bool = False,
) -> torch.Tensor:
    """gelu_tanh(x · up + up_bias) · down + down_bias with FP8 weights.

    The hidden activations are MX-quantised on the way; the torch path does not quantise them.

    Args:
        x: `[…, H]` float8_e4m3fn.
        x_scale: `[…, 1]` float32.
        up_weight: what `pack_fp8_weight` makes of `[H, I]`; a kernel takes an I that 128 divides.
        up_scale: float32 `[I]`.
        up_bias: `[I]`.
        down_weight: what `pack_fp8_weight` makes of `[I, O]`.
        down_scale: float32 `[O]`.
        down_bias: `[O]`; with tensor parallelism a rank passes its share.
        dtype: of the result.
        native: refuse to dequantise.

    Returns:
        `[…, O]` in `dtype`.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NativeFp8Error: `native`, and no provider has FP8 matmuls for these arguments.
    """
    _check_fp8(x, x_scale)
    _check_weight("up_weight", up_weight, up_scale, x.shape[-1], None)
    inner = up_weight.shape[1]
    _check_weight("down_weight", down_weight, down_scale, inner, None)
    expect_shape("up_bias", up_bias, (inner,))
    expect_shape("down_bias", down_bias, (down_weight.shape[1],))
    tensors = (x, x_scale, up_weight, up_scale, up_bias, down_weight, down_scale, down_bias)
    return _run(reference_fp8.fp8_mlp, *tensors, dtype=dtype, native=native)


def _run(reference_function: Callable[..., Any], *tensors: Any, native: bool, **options: Any) -> Any:
    op = reference_function.__name__
    if native and not torch.compiler.is_compiling():
        choice = explain(op, *tensors, **options)
        if choice.provider == "torch":
            reasons = "; ".join(f"{name}: {reason}" for name, reason in choice.refusals.items())
            raise NativeFp8Error(f"{op} with native=True has no provider here ({reasons})")
    return run_op(reference_function, *tensors, native=native, **options)


def _check_fp8(x: torch.Tensor, x_scale: torch.Tensor) -> None:
    if x.dtype != torch.float8_e4m3fn:
        raise ValueError(f"x is {x.dtype}; valid is float8_e4m3fn, as row_quantize returns it")
    expect_shape("x_scale", x_scale, (*x.shape[:-1], 1))


def _check_weight(name: str, weight: torch.Tensor, scale: torch.Tensor, rows: int, columns: int | None) -> None:
    wanted = (-(-rows // PACKED_ROWS) * PACKED_ROWS // PACKED, columns or weight.shape[1], PACKED)
    if weight.dtype != torch.float8_e4m3fn or tuple(weight.shape) != wanted:
        raise ValueError(
            f"{name} is {weight.dtype} {tuple(weight.shape)}; of {rows} rows pack_fp8_weight makes {wanted}"
        )
    expect_shape(f"{name}'s scale", scale, (wanted[1],))


def _one_of(name: str, value: Any, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name} = {value!r}; valid are {', '.join(get_args(choices))}")
