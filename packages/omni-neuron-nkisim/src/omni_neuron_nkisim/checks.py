# SPDX-License-Identifier: Apache-2.0
"""Checks of operands that many instructions share, and how they read and write them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_neuron_nkisim import costs
from omni_neuron_nkisim.constants import engine as Engine
from omni_neuron_nkisim.context import Core, current_core
from omni_neuron_nkisim.dtypes import DTYPES, INTEGER, cast, to_float32
from omni_neuron_nkisim.errors import fail
from omni_neuron_nkisim.memory import PSUM, SBUF
from omni_neuron_nkisim.operators import ARITHMETIC, BITWISE, Op
from omni_neuron_nkisim.registers import VirtualRegister
from omni_neuron_nkisim.target import PARTITIONS
from omni_neuron_nkisim.tensors import MAX_DIMS, NkiTensor

Array = NDArray[Any]
# Elements per partition of an instruction, and what its pattern holds of each free dim: an unsigned count and a signed
# stride of 16 bits (architecture guide of trainium/inferentia2).
_MOST_ELEMENTS = {SBUF: 64 * 1024, PSUM: 4 * 1024}
_MOST_COUNT, _MOST_STRIDE = 2**16 - 1, 2**15 - 1
INTEGERS = tuple(name for name, dtype in DTYPES.items() if dtype.kind == INTEGER and name != "bool_")


def tensor(instruction: str, argument: str, value: object) -> NkiTensor:
    """`value`, if it is a tensor."""
    if not isinstance(value, NkiTensor):
        fail(instruction, argument, repr(value), "has to be an NkiTensor")
    return value


def tile(
    instruction: str,
    argument: str,
    value: object,
    regions: tuple[str, ...] = (SBUF, PSUM),
    dtypes: tuple[str, ...] | None = None,
    start_rule: bool = True,
    size_rule: bool = True,
) -> NkiTensor:
    """`value`, if it is a tile that a compute engine can address.

    With `size_rule`, of at most 64K elements per partition in SBUF and 4K in PSUM, in counts and strides of 16 bits.

    A view of 65 to 128 partitions begins at partition 0, one of 33 to 64 at 0 or 64, a smaller one at 0, 32, 64 or 96
    (architecture guides); counted from the tile's first partition, unless the tile has an address.
    """
    view = tensor(instruction, argument, value)
    if view.buffer not in regions:
        fail(instruction, argument, f"in {view.buffer}", f"has to be in {' or '.join(regions)}")
    if view.ndim > MAX_DIMS:
        fail(instruction, argument, f"of shape {view.shape}", f"at most {MAX_DIMS} dims, partitions included")
    if view.gather is not None:
        fail(instruction, argument, "an indirect view", "only DMA takes vector_offset")
    if view.partitions > PARTITIONS:
        fail(instruction, argument, f"{view.partitions} partitions wide", f"at most {PARTITIONS}")
    if dtypes is not None and view.dtype not in dtypes:
        fail(instruction, f"{argument}.dtype", view.dtype, f"has to be {' or '.join(dtypes)}")
    if start_rule:
        start, step = view.start_partition, 32 if view.partitions <= 32 else 64 if view.partitions <= 64 else 128
        if start % step:
            fail(instruction, f"{argument}'s first partition", start,
                 f"{view.partitions} partitions begin at a multiple of {step}")  # fmt: skip
    if size_rule:
        _check_size(instruction, argument, view)
    return view


def _check_size(instruction: str, argument: str, view: NkiTensor) -> None:
    most = _MOST_ELEMENTS[view.buffer]
    if view.free > most:
        fail(instruction, argument, f"of {view.free} elements per partition",
             f"at most {most} in {view.buffer} per instruction")  # fmt: skip
    for dim in range(1, view.ndim):
        count, stride = view.shape[dim], view.strides[dim]
        if count > _MOST_COUNT or (count > 1 and stride > _MOST_STRIDE):
            fail(instruction, argument, f"of {count} elements at stride {stride} in dim {dim}",
                 f"at most {_MOST_COUNT} at a stride of at most {_MOST_STRIDE}")  # fmt: skip


def same_shape(instruction: str, **views: NkiTensor) -> None:
    """All views have the same P and the same F; their dims need not agree."""
    (first_name, first), *others = views.items()
    for name, view in others:
        if (view.partitions, view.free) != (first.partitions, first.free):
            fail(
                instruction, name, f"[P={view.partitions}, F={view.free}]",
                f"has to match {first_name} [P={first.partitions}, F={first.free}]; nothing is broadcast",
            )  # fmt: skip


def not_both_psum(instruction: str, **views: NkiTensor) -> None:
    """VectorE reads at most one operand from PSUM."""
    if all(view.buffer == PSUM for view in views.values()):
        fail(instruction, " and ".join(views), "both in psum", "at most one of them may be")


def per_partition(
    instruction: str, argument: str, value: object, partitions: int, dtypes: tuple[str, ...] | None = ("float32",)
) -> NkiTensor | float:
    """A Python number, or a tile `[P, 1]` of one of `dtypes`."""
    if isinstance(value, bool | VirtualRegister):
        fail(instruction, argument, repr(value), "has to be a number or a [P, 1] tile")
    if isinstance(value, int | float):
        return float(value)
    view = tile(instruction, argument, value, dtypes=dtypes)
    if view.partitions != partitions or view.free != 1:
        fail(instruction, argument, f"of shape {view.shape}", f"has to be [{partitions}, 1]")
    return view


def row_result(instruction: str, argument: str, value: object, partitions: int) -> NkiTensor:
    """A destination tile `[P, 1]`."""
    view = tile(instruction, argument, value)
    if view.partitions != partitions or view.free != 1:
        fail(instruction, argument, f"of shape {view.shape}", f"has to be [{partitions}, 1]")
    return view


def member(instruction: str, argument: str, value: object, enumeration: type) -> None:
    """Enum arguments are members; ints and strings are rejected since NKI 0.3."""
    if not isinstance(value, enumeration):
        fail(instruction, argument, repr(value), f"has to be a member of nisa.{enumeration.__name__}")


def op_token(instruction: str, argument: str, value: object) -> Op:
    """An operator token."""
    if not isinstance(value, Op):
        fail(instruction, argument, repr(value), "has to be an nki.language operator such as nl.add")
    return value


def alu_op(core: Core, instruction: str, argument: str, value: object, first: bool = False) -> Op:
    """A token that an ALU of this target computes.

    The unary ones, `abs_max` and `abs_min` are `first` operators only: op0 of tensor_scalar and tensor_scalar_reduce.
    """
    op = op_token(instruction, argument, value)
    if op.kind is None or ((op.unary or op.gen4) and not first):
        fail(instruction, argument, op, "is no ALU operator of this argument")
    if op.gen4:
        need_generation(core, instruction, 4, argument, op)
    return op


def check_op(instruction: str, argument: str, value: object, allowed: tuple[str, ...]) -> Op:
    """A token out of `allowed`."""
    op = op_token(instruction, argument, value)
    if op.name not in allowed:
        fail(instruction, argument, op, f"has to be one of {', '.join('nl.' + name for name in allowed)}")
    return op


def need_generation(
    core: Core, instruction: str, generation: int, argument: str = "target", value: object = None
) -> None:
    """Refuse what only a later chip has."""
    if core.target.generation < generation:
        fail(instruction, argument, core.target.name if value is None else value,
             f"needs gen{generation} (trn{generation - 1}); the target is {core.target.name}")  # fmt: skip


def pick_engine(core: Core, instruction: str, given: Engine, default: str, allowed: tuple[str, ...]) -> str:
    """The engine that an instruction runs on."""
    member(instruction, "engine", given, Engine)
    name = default if given is Engine.unknown else given.name
    if name not in allowed:
        fail(instruction, "engine", given, f"has to be {' or '.join(allowed)} on {core.target.name}")
    return name


def gpsimd_off_psum(instruction: str, engine: str, **views: NkiTensor) -> None:
    """GpSimd never touches PSUM."""
    for name, view in views.items() if engine == costs.GPSIMD else ():
        if view.buffer == PSUM:
            fail(instruction, name, "in psum", "GpSimd cannot access PSUM")


def bits_match(instruction: str, op: Op, **views: NkiTensor) -> None:
    """Bitwise operators read and write one integer dtype and never cast."""
    if op.kind == BITWISE:
        for name, view in views.items():
            first = next(iter(views.values()))
            if view.dtype not in INTEGERS or view.dtype != first.dtype:
                fail(instruction, f"{name}.dtype", view.dtype, f"{op} needs one integer dtype for all operands")


def arithmetic(instruction: str, argument: str, op: Op) -> None:
    """Refuse bitwise operators."""
    if op.kind != ARITHMETIC:
        fail(instruction, argument, op, "has to be an arithmetic operator")


def read(core: Core, view: NkiTensor) -> NDArray[np.float32]:
    """A tile as `[P, F]` float32."""
    raw = view.read_raw(core.core)
    return to_float32(raw, view.element, view.name).reshape(view.partitions, view.free)


def read_exact(core: Core, view: NkiTensor) -> Array:
    """A tile as `[P, F]` of its own dtype, copied."""
    return np.array(view.read_raw(core.core)).reshape(view.partitions, view.free)


def read_operand(core: Core, value: NkiTensor | float) -> Any:
    """A number or `[P, 1]` float32."""
    return read(core, value) if isinstance(value, NkiTensor) else np.float32(value)


def write(core: Core, view: NkiTensor, values: Array, psum_writer: int = 2) -> None:
    """Cast `[P, F]` values once and write them."""
    view.write_raw(core.core, cast(values, view.element, view.name).reshape(view.shape), psum_writer)


def tensors_of(*values: object) -> list[NkiTensor]:
    """The tensors among some operands."""
    return [value for value in values if isinstance(value, NkiTensor)]


def here(instruction: str) -> Core:
    """The core that runs `instruction`."""
    return current_core(f"nisa.{instruction}")
