# SPDX-License-Identifier: Apache-2.0
"""ScalarE's activation, and `exponential` of VectorE on trn3."""

from __future__ import annotations

from typing import Any

import numpy as np

from omni_neuron_nkisim import costs
from omni_neuron_nkisim.checks import (
    check_op,
    here,
    member,
    need_generation,
    op_token,
    per_partition,
    read,
    read_operand,
    row_result,
    same_shape,
    tensors_of,
    tile,
    write,
)
from omni_neuron_nkisim.constants import reduce_cmd as ReduceCmd
from omni_neuron_nkisim.context import Core
from omni_neuron_nkisim.dtypes import DTYPES, PACKED
from omni_neuron_nkisim.errors import fail
from omni_neuron_nkisim.operators import Op
from omni_neuron_nkisim.tensors import NkiTensor

_UNPACKED = tuple(name for name, dtype in DTYPES.items() if dtype.kind != PACKED)
_READ_REGISTERS_CYCLES = 64.0
_EXPONENTIAL_DST = (
    "float8_e4m3", "float8_e5m2", "float16", "bfloat16", "float32", "tfloat32",
    "int8", "int16", "int32", "uint8", "uint16",
)  # fmt: skip
_EXPONENTIAL_SRC = (*(name for name in _EXPONENTIAL_DST if name != "tfloat32"), "uint32")
_FLOATS = ("float16", "bfloat16", "float32", "tfloat32")


def activation(
    dst: NkiTensor,
    op: Op,
    data: NkiTensor,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Op | None = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: ReduceCmd = ReduceCmd.idle,
    name: str | None = None,
) -> None:
    """`y = op(data · scale + bias)`, `dst = y`; the row sums of y may go into 128 float32 registers.

    `reduce_cmd`: reset clears the registers, reduce adds the row sums, reset_reduce does both, idle neither;
    `reduce_res` `[P, 1]` then receives them. They survive from call to call. `scale` is a number or `[P, 1]` float32,
    `bias` a number or `[P, 1]` of any dtype but tfloat32.
    """
    core, what = here("activation"), "activation"
    _activation(core, what, dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd)


def activation_reduce(
    dst: NkiTensor,
    op: Op,
    data: NkiTensor,
    reduce_op: Op,
    reduce_res: NkiTensor | None,
    bias: Any = None,
    scale: Any = 1.0,
    name: str | None = None,
) -> None:
    """`activation` with reset_reduce; without `reduce_res` the sums stay in the registers."""
    core, what = here("activation_reduce"), "activation_reduce"
    _activation(core, what, dst, op, data, bias, scale, reduce_op, reduce_res, ReduceCmd.reset_reduce)


def _activation(
    core: Core,
    what: str,
    dst: NkiTensor,
    op: Op,
    data: NkiTensor,
    bias: Any,
    scale: Any,
    reduction: Op | None,
    reduce_res: NkiTensor | None,
    command: ReduceCmd,
) -> None:
    tile(what, "data", data, dtypes=_UNPACKED)
    tile(what, "dst", dst, dtypes=_UNPACKED)
    same_shape(what, data=data, dst=dst)
    if op_token(what, "op", op).activation is None:
        fail(what, "op", op, "is no activation function")
    partitions = data.partitions
    scale = per_partition(what, "scale", scale, partitions)
    any_but_tf32 = tuple(name for name in _UNPACKED if name != "tfloat32")
    bias = per_partition(what, "bias", 0.0 if bias is None else bias, partitions, any_but_tf32)
    member(what, "reduce_cmd", command, ReduceCmd)
    if command is ReduceCmd.load_reduce:
        fail(what, "reduce_cmd", command, "has to be idle, reset, reduce or reset_reduce")
    reduces = command in (ReduceCmd.reduce, ReduceCmd.reset_reduce)
    if reduction is not None or reduces:
        check_op(what, "reduce_op", reduction, ("add",))
    if reduce_res is not None:
        row_result(what, "reduce_res", reduce_res, partitions)
    core.count(
        what, costs.SCALAR,
        reads=(data, *tensors_of(scale, bias)), writes=(dst, *tensors_of(reduce_res)),
        cycles=costs.one_input_cycles(data.free) + (0 if reduce_res is None else _READ_REGISTERS_CYCLES),
    )  # fmt: skip
    if not core.executes:
        return
    assert op.activation is not None
    values = op.activation(read(core, data) * read_operand(core, scale) + read_operand(core, bias)).astype(np.float32)
    registers = core.scalar_accumulator
    if command in (ReduceCmd.reset, ReduceCmd.reset_reduce):
        registers[:] = 0
    if reduces:
        registers[:partitions] += values.sum(axis=1, keepdims=True, dtype=np.float32)
    write(core, dst, values)
    if reduce_res is not None:
        write(core, reduce_res, registers[:partitions])


def exponential(
    dst: NkiTensor,
    src: NkiTensor,
    max_value: Any = 0.0,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: ReduceCmd = ReduceCmd.idle,
    reduce_init: Any = 0.0,
    name: str | None = None,
) -> None:
    """`dst = exp(src − max_value)` on VectorE, trn3 only, at four times the rate of `activation`.

    The accumulator starts from 0 (reset_reduce), `reduce_init` (load_reduce) or what it holds (reduce) and adds the row
    sums; idle leaves it unknown, which is NaN here.
    """
    core, what = here("exponential"), "exponential"
    need_generation(core, what, 4)
    tile(what, "src", src, dtypes=_EXPONENTIAL_SRC)
    tile(what, "dst", dst, dtypes=_EXPONENTIAL_DST)
    same_shape(what, src=src, dst=dst)
    for argument, view in (("src", src), ("dst", dst)):
        if view.ndim > 4:
            fail(what, argument, f"of shape {view.shape}", "has at most 4 dims")
    shift = per_partition(what, "max_value", max_value, src.partitions)
    member(what, "reduce_cmd", reduce_cmd, ReduceCmd)
    if reduce_cmd is ReduceCmd.reset:
        fail(what, "reduce_cmd", reduce_cmd, "has to be idle, reduce, reset_reduce or load_reduce")
    start = per_partition(what, "reduce_init", reduce_init, src.partitions)
    if reduce_cmd is not ReduceCmd.load_reduce and (isinstance(start, NkiTensor) or start != 0.0):
        fail(what, "reduce_init", repr(reduce_init), "goes with load_reduce only")
    if reduce_res is not None:
        row_result(what, "reduce_res", reduce_res, src.partitions)
        if reduce_res.dtype not in _FLOATS:
            fail(what, "reduce_res.dtype", reduce_res.dtype, "has to be a float type")
    core.count(
        what, costs.VECTOR,
        reads=(src, *tensors_of(shift, start)), writes=(dst, *tensors_of(reduce_res)),
        cycles=costs.one_input_cycles(src.free / 4),
    )  # fmt: skip
    if not core.executes:
        return
    values = np.exp(read(core, src) - read_operand(core, shift))
    accumulator = core.vector_accumulator
    rows = src.partitions
    if reduce_cmd is ReduceCmd.idle:
        accumulator[:] = np.nan
    elif reduce_cmd is not ReduceCmd.reduce:
        accumulator[:] = np.nan
        accumulator[:rows] = read_operand(core, start)
    accumulator[:rows] += values.sum(axis=1, keepdims=True, dtype=np.float32)
    write(core, dst, values)
    if reduce_res is not None:
        write(core, reduce_res, accumulator[:rows])
