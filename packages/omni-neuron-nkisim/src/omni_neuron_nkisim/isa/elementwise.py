# SPDX-License-Identifier: Apache-2.0
"""Elementwise instructions of VectorE, GpSimd and ScalarE that are no activations."""

from __future__ import annotations

from typing import Any

import numpy as np

from omni_neuron_nkisim import costs
from omni_neuron_nkisim.checks import (
    Array,
    alu_op,
    arithmetic,
    bits_match,
    gpsimd_off_psum,
    here,
    not_both_psum,
    per_partition,
    pick_engine,
    read,
    read_exact,
    read_operand,
    same_shape,
    tensors_of,
    tile,
    write,
)
from omni_neuron_nkisim.constants import engine as Engine
from omni_neuron_nkisim.context import Core
from omni_neuron_nkisim.dtypes import INTEGER, PACKED
from omni_neuron_nkisim.errors import fail
from omni_neuron_nkisim.memory import PSUM
from omni_neuron_nkisim.operators import BITWISE, Op
from omni_neuron_nkisim.tensors import NkiTensor

_EXACT = ("int32", "uint32")
_ALU_ENGINES = (costs.VECTOR, costs.GPSIMD)


def tensor_tensor(
    dst: NkiTensor,
    data1: NkiTensor,
    data2: NkiTensor,
    op: Op,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> None:
    """`dst = data1 op data2` of equal P and F, in float32.

    If all three are int32 or uint32, GpSimd computes in integers (exactly, wrapping), and is chosen unless `engine` is
    vector or an operand is in PSUM. `power` is GpSimd's alone.
    """
    core, what = here("tensor_tensor"), "tensor_tensor"
    views = {"dst": dst, "data1": data1, "data2": data2}
    for argument, view in views.items():
        tile(what, argument, view)
    same_shape(what, **views)
    not_both_psum(what, data1=data1, data2=data2)
    alu_op(core, what, "op", op)
    bits_match(what, op, **views)
    in_psum = any(view.buffer == PSUM for view in views.values())
    integers = op.kind != BITWISE and op.name != "power" and all(view.dtype in _EXACT for view in views.values())
    gpsimd = op.name == "power" or (integers and not in_psum)
    on = pick_engine(core, what, engine, costs.GPSIMD if gpsimd else costs.VECTOR, _ALU_ENGINES)
    if op.kind == BITWISE and on != costs.VECTOR:
        fail(what, "engine", engine, f"{op} runs on vector only")
    if op.name == "power" and on != costs.GPSIMD:
        fail(what, "engine", engine, "nl.power runs on gpsimd only")
    gpsimd_off_psum(what, on, **views)
    cycles = costs.two_input_cycles(core.target, on, dst, data1, data2)
    core.count(what, on, reads=(data1, data2), writes=(dst,), cycles=cycles)
    if not core.executes:
        return
    assert op.alu is not None
    if op.kind == BITWISE:
        dst.write_raw(core.core, op.alu(read_exact(core, data1), read_exact(core, data2)).reshape(dst.shape))
    elif integers and on == costs.GPSIMD:
        exact = op.alu(read_exact(core, data1).astype(np.int64), read_exact(core, data2).astype(np.int64))
        dst.write_raw(core.core, exact.astype(np.int64).astype(dst.element.storage).reshape(dst.shape))
    else:
        write(core, dst, op.alu(read(core, data1), read(core, data2)))


def _scalar_step(op: Op, values: Array, operand: Any, reverse: bool) -> Array:
    assert op.alu is not None
    if op.unary:
        return op.alu(values)
    return op.alu(operand, values) if reverse else op.alu(values, operand)


def _operand(
    core: Core, what: str, argument: str, op: Op, value: Any, data: NkiTensor
) -> NkiTensor | float | int | None:
    """The scalar operand of `op`: nothing for a unary one, a number or `[P, 1]` (float32 for arithmetic) else."""
    if op.unary:
        if value is not None and (isinstance(value, NkiTensor) or value != 0):
            fail(what, argument, repr(value), f"{op} takes none: pass None or 0")
        return None
    if op.kind == BITWISE:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        return per_partition(what, argument, value, data.partitions, (data.dtype,))
    return per_partition(what, argument, value, data.partitions)


def tensor_scalar(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Op,
    operand0: Any,
    reverse0: bool = False,
    op1: Op | None = None,
    operand1: Any = None,
    reverse1: bool = False,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> None:
    """`dst = (data op0 operand0) op1 operand1`; `reverseN` puts the operand first.

    Operands are numbers or `[P, 1]`, float32 for arithmetic. Both operators are arithmetic or both bitwise. `rsqrt` is
    GpSimd's; ScalarE takes (multiply, add), (multiply) and (add), which is documented for trn2 and kept on trn3.
    """
    core, what = here("tensor_scalar"), "tensor_scalar"
    tile(what, "data", data)
    tile(what, "dst", dst)
    same_shape(what, data=data, dst=dst)
    ops = [alu_op(core, what, "op0", op0, first=True)]
    if op1 is not None:
        ops.append(alu_op(core, what, "op1", op1))
        if op1.kind != op0.kind:
            fail(what, "op1", op1, f"has to be of op0's kind ({op0} is {op0.kind})")
    elif operand1 is not None:
        fail(what, "operand1", repr(operand1), "is given without op1")
    operands = [_operand(core, what, "operand0", op0, operand0, data)]
    if op1 is not None:
        operands.append(_operand(core, what, "operand1", op1, operand1, data))
    bits_match(what, op0, data=data, dst=dst)
    names = tuple(op.name for op in ops)
    needs_gpsimd = "rsqrt" in names
    allowed: tuple[str, ...] = (costs.GPSIMD,) if needs_gpsimd else (costs.VECTOR, costs.GPSIMD)
    if op0.kind == BITWISE:
        allowed = (costs.VECTOR,)
    elif names in (("multiply", "add"), ("multiply",), ("add",)):
        allowed = (*allowed, costs.SCALAR)
    on = pick_engine(core, what, engine, costs.GPSIMD if needs_gpsimd else costs.VECTOR, allowed)
    tiles = {f"operand{n}": value for n, value in enumerate(operands) if isinstance(value, NkiTensor)}
    gpsimd_off_psum(what, on, dst=dst, data=data, **tiles)
    cycles = costs.copy_cycles(core.target, on, dst, data) * (4 if needs_gpsimd else 1)
    core.count(what, on, reads=(data, *tensors_of(*operands)), writes=(dst,), cycles=cycles)
    if not core.executes:
        return
    if op0.kind == BITWISE:
        bits = read_exact(core, data)
        for op, operand, reverse in zip(ops, operands, (reverse0, reverse1), strict=False):
            value = read_exact(core, operand) if isinstance(operand, NkiTensor) else operand
            bits = _scalar_step(op, bits, value, reverse).astype(bits.dtype)
        dst.write_raw(core.core, bits.reshape(dst.shape))
        return
    values: Array = read(core, data)
    for op, operand, reverse in zip(ops, operands, (reverse0, reverse1), strict=False):
        values = _scalar_step(op, values, None if operand is None else read_operand(core, operand), reverse)
    write(core, dst, values)


def scalar_tensor_tensor(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Op,
    operand0: Any,
    op1: Op,
    operand1: NkiTensor,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> None:
    """`dst = (data op0 operand0) op1 operand1` with a scalar and a tile, arithmetic only."""
    core, what = here("scalar_tensor_tensor"), "scalar_tensor_tensor"
    views = {"data": data, "dst": dst, "operand1": operand1}
    for argument, view in views.items():
        tile(what, argument, view)
    same_shape(what, **views)
    not_both_psum(what, data=data, operand1=operand1)
    arithmetic(what, "op0", alu_op(core, what, "op0", op0))
    arithmetic(what, "op1", alu_op(core, what, "op1", op1))
    scalar = _operand(core, what, "operand0", op0, operand0, data)
    core.count(
        what, costs.VECTOR,
        reads=(data, operand1, *tensors_of(scalar)), writes=(dst,),
        cycles=costs.two_input_cycles(core.target, costs.VECTOR, dst, data, operand1),
    )  # fmt: skip
    if core.executes:
        operand = None if scalar is None else read_operand(core, scalar)
        values = _scalar_step(op0, read(core, data), operand, reverse0)
        write(core, dst, _scalar_step(op1, values, read(core, operand1), reverse1))


def reciprocal(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> None:
    """`dst = 1 / data` on VectorE, over the whole range."""
    core, what = here("reciprocal"), "reciprocal"
    tile(what, "data", data)
    tile(what, "dst", dst)
    same_shape(what, data=data, dst=dst)
    core.count(what, costs.VECTOR, reads=(data,), writes=(dst,), cycles=costs.one_input_cycles(8 * dst.free))
    if core.executes:
        write(core, dst, np.float32(1) / read(core, data))


def tensor_copy(dst: NkiTensor, src: NkiTensor, engine: Engine = Engine.unknown, name: str | None = None) -> None:
    """`dst = cast(src)`: bit for bit where the dtypes are equal, else through float32."""
    core, what = here("tensor_copy"), "tensor_copy"
    tile(what, "src", src)
    tile(what, "dst", dst)
    same_shape(what, src=src, dst=dst)
    if src.dtype != dst.dtype and (src.packed or dst.packed):
        fail(what, "dst.dtype", dst.dtype, f"packed types are copied as they are ({src.dtype})")
    on = pick_engine(core, what, engine, costs.VECTOR, (costs.VECTOR, costs.SCALAR, costs.GPSIMD))
    gpsimd_off_psum(what, on, dst=dst, src=src)
    core.count(what, on, reads=(src,), writes=(dst,), cycles=costs.copy_cycles(core.target, on, dst, src))
    if core.executes:
        if src.dtype == dst.dtype:
            dst.write_raw(core.core, read_exact(core, src).reshape(dst.shape))
        else:
            write(core, dst, read(core, src))


def tensor_copy_predicated(
    dst: NkiTensor, src: Any, predicate: NkiTensor, reverse_pred: bool = False, name: str | None = None
) -> None:
    """`dst = src` where `predicate` is not zero (or is, with `reverse_pred`); elsewhere `dst` stays."""
    core, what = here("tensor_copy_predicated"), "tensor_copy_predicated"
    tile(what, "dst", dst)
    tile(what, "predicate", predicate, dtypes=("uint8", "uint16", "uint32"))
    same_shape(what, dst=dst, predicate=predicate)
    if isinstance(src, NkiTensor):
        tile(what, "src", src, dtypes=(dst.dtype,))
        same_shape(what, dst=dst, src=src)
        not_both_psum(what, src=src, predicate=predicate)
    elif not isinstance(src, int | float):
        fail(what, "src", repr(src), "has to be a tile or a number")
    core.count(
        what, costs.VECTOR,
        reads=(predicate, dst, *tensors_of(src)), writes=(dst,),
        cycles=costs.one_input_cycles(2 * dst.free),
    )  # fmt: skip
    if core.executes:
        chosen = (read_exact(core, predicate) != 0) != reverse_pred
        given = read_exact(core, src) if isinstance(src, NkiTensor) else np.array(src).astype(dst.element.storage)
        dst.write_raw(core.core, np.where(chosen, given, read_exact(core, dst)).reshape(dst.shape))


def memset(dst: NkiTensor, value: int | float, engine: Engine = Engine.unknown, name: str | None = None) -> None:
    """Fill `dst`; `value` is an int for integer types, a float for floats, 0 for packed types."""
    core, what = here("memset"), "memset"
    tile(what, "dst", dst)
    kind = dst.element.kind
    if kind == PACKED:
        if value != 0:
            fail(what, "value", value, f"packed type {dst.dtype} takes 0 only")
    elif kind == INTEGER and (not isinstance(value, int) or (isinstance(value, bool) and dst.dtype != "bool_")):
        fail(what, "value", repr(value), f"has to be an int for {dst.dtype}")
    elif kind != INTEGER and not isinstance(value, float):
        fail(what, "value", repr(value), f"has to be a float for {dst.dtype}")
    on = pick_engine(core, what, engine, costs.VECTOR, _ALU_ENGINES)
    gpsimd_off_psum(what, on, dst=dst)
    core.count(what, on, writes=(dst,), cycles=costs.one_input_cycles(dst.free))
    if core.executes:
        if kind == PACKED:
            dst.write_raw(core.core, np.zeros(dst.shape, dst.element.storage))
        else:
            source = np.int64 if kind == INTEGER else np.float32
            write(core, dst, np.full((dst.partitions, dst.free), value, source))


def tensor_tensor_scan(
    dst: NkiTensor,
    data0: NkiTensor,
    data1: NkiTensor,
    initial: Any,
    op0: Op,
    op1: Op,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> None:
    """`r_i = (data0_i op0 r_{i−1}) op1 data1_i` along the free dims, starting from `initial`; `dst_i = r_i`."""
    core, what = here("tensor_tensor_scan"), "tensor_tensor_scan"
    views = {"data0": data0, "dst": dst, "data1": data1}
    for argument, view in views.items():
        tile(what, argument, view)
    same_shape(what, **views)
    not_both_psum(what, data0=data0, data1=data1)
    for argument, op in (("op0", op0), ("op1", op1)):
        arithmetic(what, argument, alu_op(core, what, argument, op))
    start = per_partition(what, "initial", initial, data0.partitions)
    core.count(
        what, costs.VECTOR,
        reads=(data0, data1, *tensors_of(start)), writes=(dst,),
        cycles=costs.one_input_cycles(2 * dst.free),
    )  # fmt: skip
    if not core.executes:
        return
    first, second = read(core, data0), read(core, data1)
    result = np.empty_like(first)
    state: Array = np.broadcast_to(read_operand(core, start), (data0.partitions, 1)).astype(np.float32)
    for column in range(first.shape[1]):
        at = slice(column, column + 1)
        state = _scalar_step(op0, first[:, at], state, reverse0)
        state = _scalar_step(op1, state, second[:, at], reverse1)
        result[:, at] = state
    write(core, dst, result)


def nc_stream_shuffle(dst: NkiTensor, src: NkiTensor, shuffle_mask: Any, name: str | None = None) -> None:
    """Within each quadrant of 32 partitions `dst[i] = src[mask[i]]`; 255 leaves `dst[i]` as it is."""
    core, what = here("nc_stream_shuffle"), "nc_stream_shuffle"
    tile(what, "src", src)
    tile(what, "dst", dst)
    if dst.dtype != src.dtype or dst.free != src.free:
        fail(what, "dst", f"{dst.dtype}, F={dst.free}", f"has to have src's dtype {src.dtype} and F={src.free}")
    mask = list(shuffle_mask)
    if len(mask) != 32 or not all(isinstance(n, int) and (0 <= n < 32 or n == 255) for n in mask):
        fail(what, "shuffle_mask", mask, "has to be 32 ints below 32, or 255")
    core.count(what, costs.VECTOR, reads=(src, dst), writes=(dst,), cycles=costs.one_input_cycles(dst.free))
    if core.executes:
        source, result = read_exact(core, src), read_exact(core, dst)
        for row in range(dst.partitions):
            chosen = mask[row % 32]
            if chosen != 255:
                at = row - row % 32 + chosen
                if at >= src.partitions:
                    fail(what, "shuffle_mask", mask, f"picks partition {at} of {src.partitions}")
                result[row] = source[at]
        dst.write_raw(core.core, result.reshape(dst.shape))
