# SPDX-License-Identifier: Apache-2.0
"""Reductions and statistics along the free dims, on VectorE."""

from __future__ import annotations

from typing import Any

import numpy as np

from omni_neuron_nkisim import costs
from omni_neuron_nkisim.checks import (
    Array,
    alu_op,
    arithmetic,
    bits_match,
    check_op,
    here,
    member,
    per_partition,
    read,
    read_exact,
    read_operand,
    row_result,
    same_shape,
    tensors_of,
    tile,
    write,
)
from omni_neuron_nkisim.constants import reduce_cmd as ReduceCmd
from omni_neuron_nkisim.context import Core
from omni_neuron_nkisim.errors import fail
from omni_neuron_nkisim.operators import BITWISE, OPS, Op
from omni_neuron_nkisim.tensors import NkiTensor

_REDUCTIONS = tuple(name for name, op in OPS.items() if op.reduces)
_IDENTITIES = {"add": 0.0, "multiply": 1.0, "maximum": -np.inf, "minimum": np.inf}
_BN_LONGEST = 512


def tensor_reduce(
    dst: NkiTensor,
    op: Op,
    data: NkiTensor,
    axis: int | tuple[int, ...],
    negate: bool = False,
    keepdims: bool = False,
    name: str | None = None,
) -> None:
    """`dst = op over axis of data`, times −1 with `negate`.

    `axis` is the last dim, or neighbouring dims up to it; never dim 0. `abs_max` and `abs_min` reduce nothing here.
    """
    core, what = here("tensor_reduce"), "tensor_reduce"
    tile(what, "data", data)
    tile(what, "dst", dst)
    check_op(what, "op", op, _REDUCTIONS)
    bits_match(what, op, data=data, dst=dst)
    axes = sorted(a % data.ndim if -data.ndim <= a < data.ndim else a for a in np.atleast_1d(axis).tolist())
    if axes != list(range(data.ndim - len(axes), data.ndim)) or axes[0] < 1:
        fail(what, "axis", axis, f"has to be trailing free dims of the {data.ndim}, the last one included, never dim 0")
    if negate and op.kind == BITWISE:
        fail(what, "negate", negate, f"goes with arithmetic operators, not {op}")
    kept = int(np.prod(data.shape[1 : axes[0]], dtype=np.int64))
    if (dst.partitions, dst.free) != (data.partitions, kept):
        fail(what, "dst", f"of shape {dst.shape}", f"has to be [{data.partitions}, {kept}]")
    core.count(what, costs.VECTOR, reads=(data,), writes=(dst,), cycles=costs.one_input_cycles(data.free))
    if not core.executes:
        return
    if op.kind == BITWISE:
        bits = op.reduce(read_exact(core, data).reshape(data.partitions, kept, -1))
        dst.write_raw(core.core, bits.reshape(dst.shape))
        return
    values = op.reduce(read(core, data).reshape(data.partitions, kept, -1))[..., 0]
    write(core, dst, -values if negate else values)


def accumulate_rows(core: Core, command: ReduceCmd, op: Op, values: Array, start: Any = None) -> Array:
    """Run VectorE's accumulator over the rows of `values` `[P, F]` and return it `[P, 1]`.

    Idle may disturb it, so it is NaN afterwards; so are the partitions that a reset does not cover.
    """
    accumulator, rows = core.vector_accumulator, values.shape[0]
    if command is ReduceCmd.idle:
        accumulator[:] = np.nan
        return accumulator[:rows]
    if command is not ReduceCmd.reduce:
        accumulator[:] = np.nan
        accumulator[:rows] = _IDENTITIES[op.name] if command is not ReduceCmd.load_reduce else start
    if command is not ReduceCmd.reset:
        assert op.alu is not None
        accumulator[:rows] = op.alu(accumulator[:rows], op.reduce(values))
    return accumulator[:rows]


def tensor_scalar_reduce(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Op,
    operand0: Any,
    reduce_op: Op,
    reduce_res: NkiTensor | None = None,
    reverse0: bool = False,
    reduce_cmd: ReduceCmd = ReduceCmd.reset_reduce,
    reduce_init: Any = None,
    reduce_res_negate: bool = False,
    name: str | None = None,
) -> None:
    """`dst = data op0 operand0`; the accumulator is reduced over all of dst's free dims and read into `reduce_res`.

    The row maximum of magnitudes is `op0=nl.abs, operand0=0.0, reduce_op=nl.maximum`. `reduce_init` goes with
    load_reduce, always and only; `reverse0` is not supported by the hardware interface yet; `reduce_res=None` needs
    NKI 0.6.
    """
    core, what = here("tensor_scalar_reduce"), "tensor_scalar_reduce"
    tile(what, "data", data)
    tile(what, "dst", dst)
    same_shape(what, data=data, dst=dst)
    arithmetic(what, "op0", alu_op(core, what, "op0", op0, first=True))
    check_op(what, "reduce_op", reduce_op, tuple(_IDENTITIES))
    member(what, "reduce_cmd", reduce_cmd, ReduceCmd)
    if reverse0:
        fail(what, "reverse0", reverse0, "is not supported")
    if (reduce_cmd is ReduceCmd.load_reduce) != (reduce_init is not None):
        fail(what, "reduce_init", repr(reduce_init), f"goes with load_reduce, always and only ({reduce_cmd})")
    if op0.unary and (isinstance(operand0, NkiTensor) or operand0 not in (None, 0)):
        fail(what, "operand0", repr(operand0), f"{op0} takes none: pass 0.0")
    scalar = 0.0 if op0.unary else per_partition(what, "operand0", operand0, data.partitions)
    start = None if reduce_init is None else per_partition(what, "reduce_init", reduce_init, data.partitions)
    if reduce_res is not None:
        row_result(what, "reduce_res", reduce_res, data.partitions)
    elif core.settings.version() < (0, 6):
        fail(what, "reduce_res", None, f"is optional from NKI 0.6 on, this is {core.settings.nki_version}")
    core.count(
        what, costs.VECTOR,
        reads=(data, *tensors_of(scalar, start)), writes=(dst, *tensors_of(reduce_res)),
        cycles=costs.one_input_cycles(data.free),
    )  # fmt: skip
    if not core.executes:
        return
    values = read(core, data)
    assert op0.alu is not None
    values = op0.alu(values) if op0.unary else op0.alu(values, read_operand(core, scalar))
    result = accumulate_rows(
        core, reduce_cmd, reduce_op, values, None if start is None else read_operand(core, start)
    ).copy()
    write(core, dst, values)
    if reduce_res is not None:
        write(core, reduce_res, -result if reduce_res_negate else result)


def bn_stats(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> None:
    """Per partition `count, mean, count · variance` of the even, then of the odd elements: `[P, 6]`; F ≤ 512."""
    core, what = here("bn_stats"), "bn_stats"
    tile(what, "data", data)
    tile(what, "dst", dst)
    if data.free > _BN_LONGEST:
        fail(what, "data's F", data.free, f"at most {_BN_LONGEST} (nl.tile_size.bn_stats_fmax)")
    if (dst.partitions, dst.free) != (data.partitions, 6):
        fail(what, "dst", f"of shape {dst.shape}", f"has to be [{data.partitions}, 6]")
    core.count(what, costs.VECTOR, reads=(data,), writes=(dst,), cycles=costs.one_input_cycles(data.free))
    if core.executes:
        values = read(core, data)
        result = np.zeros((data.partitions, 6), np.float32)
        for half in range(2):
            part = values[:, half::2]
            if part.size:
                mean = part.mean(axis=1, dtype=np.float32)
                squares = np.square(part - mean[:, None]).sum(axis=1, dtype=np.float32)
                result[:, 3 * half : 3 * half + 3] = np.stack([np.full_like(mean, part.shape[1]), mean, squares], 1)
        write(core, dst, result)


def bn_aggr(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> None:
    """Mean and population variance `[P, 2]` from triples of `bn_stats` that lie side by side."""
    core, what = here("bn_aggr"), "bn_aggr"
    tile(what, "data", data)
    tile(what, "dst", dst)
    if data.free % 3:
        fail(what, "data's F", data.free, "has to be a multiple of 3")
    if (dst.partitions, dst.free) != (data.partitions, 2):
        fail(what, "dst", f"of shape {dst.shape}", f"has to be [{data.partitions}, 2]")
    core.count(what, costs.VECTOR, reads=(data,), writes=(dst,), cycles=costs.one_input_cycles(data.free))
    if core.executes:
        count, mean, squares = np.moveaxis(read(core, data).reshape(data.partitions, -1, 3), 2, 0)
        total = count.sum(axis=1, keepdims=True)
        center = (count * mean).sum(axis=1, keepdims=True) / total
        variance = (squares + count * np.square(mean - center)).sum(axis=1, keepdims=True) / total
        write(core, dst, np.concatenate([center, variance], axis=1))
