# SPDX-License-Identifier: Apache-2.0
"""Index patterns and masked choices: GpSimd's iota and affine_select, VectorE's range_select and select_reduce."""

from __future__ import annotations

from typing import Any

import numpy as np

from omni_neuron_nkisim import costs
from omni_neuron_nkisim.checks import (
    Array,
    check_op,
    here,
    member,
    not_both_psum,
    op_token,
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
from omni_neuron_nkisim.dtypes import DTYPES, FLOAT, PACKED
from omni_neuron_nkisim.errors import fail
from omni_neuron_nkisim.isa.reductions import accumulate_rows
from omni_neuron_nkisim.memory import SBUF
from omni_neuron_nkisim.operators import OPS, Op
from omni_neuron_nkisim.registers import VirtualRegister, register_value
from omni_neuron_nkisim.tensors import NkiTensor

FP32_MIN = -3.4028235e38
_FLOATS = tuple(name for name, dtype in DTYPES.items() if dtype.kind == FLOAT)
_SELECT_TRUE = tuple(
    name for name, dtype in DTYPES.items() if dtype.kind != PACKED and name not in ("tfloat32", "int32", "uint32")
)
_PREDICATES = ("int8", "uint8", "int16", "uint16")
_RANGE_COMPARISONS = ("equal", "less", "less_equal", "greater", "greater_equal")


def _check_pattern(what: str, pattern: Any, offset: Any, channel_multiplier: Any, free: int) -> None:
    pairs = [tuple(pair) for pair in pattern]
    if not 1 <= len(pairs) <= 4 or not all(len(pair) == 2 for pair in pairs):
        fail(what, "pattern", pattern, "has one to four pairs [step, num]")
    if int(np.prod([num for _, num in pairs], dtype=np.int64)) != free:
        fail(what, "pattern", pattern, f"has to cover F={free} elements per partition")
    for argument, value in (("offset", offset), ("channel_multiplier", channel_multiplier)):
        if isinstance(value, VirtualRegister) and argument == "offset" and what == "iota":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not -(2**31) <= value < 2**31:
            fail(what, argument, repr(value), "has to be a 32-bit int")


def _affine(what: str, pattern: Any, offset: Any, channel_multiplier: int, partitions: int) -> Array:
    """The int32 values of a pattern, `[P, F]`."""
    start = register_value(offset, what) if isinstance(offset, VirtualRegister) else offset
    values = np.array([start], np.int64)
    for step, num in pattern:
        values = (values[:, None] + step * np.arange(num, dtype=np.int64)).reshape(-1)
    rows = channel_multiplier * np.arange(partitions, dtype=np.int64)
    return (rows[:, None] + values).astype(np.int32)


def iota(dst: NkiTensor, pattern: Any, offset: Any = 0, channel_multiplier: int = 0, name: str | None = None) -> None:
    """`dst[p, i, j, …] = offset + p·channel_multiplier + i·s0 + j·s1 + …` in int32, cast; pattern `[[s0, n0], …]`."""
    core, what = here("iota"), "iota"
    tile(what, "dst", dst, (SBUF,))
    _check_pattern(what, pattern, offset, channel_multiplier, dst.free)
    core.count(what, costs.GPSIMD, writes=(dst,), cycles=costs.one_input_cycles(dst.free))
    if core.executes:
        write(core, dst, _affine(what, pattern, offset, channel_multiplier, dst.partitions))


def affine_select(
    dst: NkiTensor,
    pattern: Any,
    channel_multiplier: int,
    on_true_tile: NkiTensor,
    on_false_value: float,
    cmp_op: Op = OPS["equal"],
    offset: int = 0,
    name: str | None = None,
) -> None:
    """`dst = on_true_tile` where `cmp_op(affine value, 0)`, else `on_false_value`; the affine value is iota's."""
    core, what = here("affine_select"), "affine_select"
    tile(what, "on_true_tile", on_true_tile, (SBUF,))
    tile(what, "dst", dst, (SBUF,))
    same_shape(what, on_true_tile=on_true_tile, dst=dst)
    _check_pattern(what, pattern, offset, channel_multiplier, dst.free)
    if isinstance(on_false_value, bool) or not isinstance(on_false_value, int | float):
        fail(what, "on_false_value", repr(on_false_value), "has to be a number")
    if not op_token(what, "cmp_op", cmp_op).comparison:
        fail(what, "cmp_op", cmp_op, "has to be a comparison such as nl.greater_equal")
    core.count(
        what, costs.GPSIMD, reads=(on_true_tile,), writes=(dst,), cycles=costs.one_input_cycles(dst.free)
    )  # fmt: skip
    if core.executes:
        assert cmp_op.alu is not None
        keep = cmp_op.alu(_affine(what, pattern, offset, channel_multiplier, dst.partitions), 0) != 0
        write(core, dst, np.where(keep, read(core, on_true_tile), np.float32(on_false_value)))


def range_select(
    dst: NkiTensor,
    on_true_tile: NkiTensor,
    comp_op0: Op,
    comp_op1: Op,
    bound0: NkiTensor,
    bound1: NkiTensor,
    reduce_cmd: ReduceCmd = ReduceCmd.reset_reduce,
    reduce_res: NkiTensor | None = None,
    reduce_op: Op = OPS["maximum"],
    range_start: int = 0,
    on_false_value: float = FP32_MIN,
    name: str | None = None,
) -> None:
    """Keep column c where `range_start + c` is within both bounds, else −3.4028235e38; optional row maximum."""
    core, what = here("range_select"), "range_select"
    tile(what, "on_true_tile", on_true_tile, dtypes=_FLOATS)
    tile(what, "dst", dst)
    same_shape(what, on_true_tile=on_true_tile, dst=dst)
    for argument, op in (("comp_op0", comp_op0), ("comp_op1", comp_op1)):
        check_op(what, argument, op, _RANGE_COMPARISONS)
    for argument, bound in (("bound0", bound0), ("bound1", bound1)):
        if not isinstance(bound, NkiTensor):
            fail(what, argument, repr(bound), "has to be a [P, 1] float32 tile")
        per_partition(what, argument, bound, dst.partitions)
    if np.float32(on_false_value) != np.float32(FP32_MIN):
        fail(what, "on_false_value", on_false_value, f"has to be {FP32_MIN}")
    _check_maximum(what, reduce_op, reduce_cmd)
    if isinstance(range_start, bool) or not isinstance(range_start, int) or range_start + dst.free > 2**24:
        fail(what, "range_start", repr(range_start), "has to be an int whose columns stay below 2^24")
    if reduce_res is not None:
        row_result(what, "reduce_res", reduce_res, dst.partitions)
    core.count(
        what, costs.VECTOR,
        reads=(on_true_tile, bound0, bound1), writes=(dst, *tensors_of(reduce_res)),
        cycles=costs.one_input_cycles(dst.free),
    )  # fmt: skip
    if not core.executes:
        return
    columns = np.arange(range_start, range_start + dst.free, dtype=np.float32)[None, :]
    assert comp_op0.alu is not None and comp_op1.alu is not None
    keep = (comp_op0.alu(columns, read(core, bound0)) != 0) & (comp_op1.alu(columns, read(core, bound1)) != 0)
    values = np.where(keep, read(core, on_true_tile), np.float32(FP32_MIN))
    _finish(core, dst, reduce_res, reduce_cmd, reduce_op, values)


def select_reduce(
    dst: NkiTensor,
    predicate: NkiTensor,
    on_true: NkiTensor,
    on_false: Any,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: ReduceCmd = ReduceCmd.idle,
    reduce_op: Op = OPS["maximum"],
    reverse_pred: bool = False,
    name: str | None = None,
) -> None:
    """`dst = on_true` where the predicate is not zero, else `on_false` (a number or `[P, 1]`); optional row maximum."""
    core, what = here("select_reduce"), "select_reduce"
    tile(what, "predicate", predicate, dtypes=_PREDICATES)
    tile(what, "on_true", on_true, dtypes=_SELECT_TRUE)
    tile(what, "dst", dst)
    same_shape(what, predicate=predicate, on_true=on_true, dst=dst)
    not_both_psum(what, on_true=on_true, predicate=predicate)
    other = per_partition(what, "on_false", on_false, dst.partitions)
    _check_maximum(what, reduce_op, reduce_cmd)
    if reduce_res is not None:
        row_result(what, "reduce_res", reduce_res, dst.partitions)
    core.count(
        what, costs.VECTOR,
        reads=(predicate, on_true, *tensors_of(other)), writes=(dst, *tensors_of(reduce_res)),
        cycles=costs.one_input_cycles(2 * dst.free),
    )  # fmt: skip
    if core.executes:
        keep = (read_exact(core, predicate) != 0) != reverse_pred
        values = np.where(keep, read(core, on_true), read_operand(core, other))
        _finish(core, dst, reduce_res, reduce_cmd, reduce_op, values)


def _check_maximum(what: str, op: Op, command: ReduceCmd) -> None:
    check_op(what, "reduce_op", op, ("maximum",))
    member(what, "reduce_cmd", command, ReduceCmd)
    if command is ReduceCmd.load_reduce:
        fail(what, "reduce_cmd", command, "has to be idle, reset, reduce or reset_reduce")


def _finish(
    core: Core, dst: NkiTensor, reduce_res: NkiTensor | None, command: ReduceCmd, op: Op, values: Array
) -> None:
    result = accumulate_rows(core, command, op, values).copy()
    write(core, dst, values)
    if reduce_res is not None:
        write(core, reduce_res, result)
