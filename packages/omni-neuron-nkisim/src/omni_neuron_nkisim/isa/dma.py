# SPDX-License-Identifier: Apache-2.0
"""DMA: copies, gathers and scatters between HBM and SBUF, sums, transposes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_neuron_nkisim import costs
from omni_neuron_nkisim.checks import check_op, here, member, need_generation, tensor
from omni_neuron_nkisim.constants import dge_mode as DgeMode
from omni_neuron_nkisim.constants import engine as Engine
from omni_neuron_nkisim.constants import oob_mode as OobMode
from omni_neuron_nkisim.context import Core
from omni_neuron_nkisim.dtypes import cast, to_float32
from omni_neuron_nkisim.errors import fail
from omni_neuron_nkisim.memory import HBM, PSUM, SBUF
from omni_neuron_nkisim.operators import Op
from omni_neuron_nkisim.tensors import MAX_DIMS, NkiTensor

_TRANSPOSED_AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}
_MOST_SOURCES = 16


def _operand(what: str, argument: str, value: object) -> NkiTensor:
    view = tensor(what, argument, value)
    if view.buffer == PSUM:
        fail(what, argument, "in psum", "DMA reaches HBM and SBUF only, since NKI 0.3")
    if view.on_chip and view.ndim > MAX_DIMS:
        fail(what, argument, f"of shape {view.shape}", f"at most {MAX_DIMS} dims, partitions included")
    return view


def count_hbm(core: Core, reads: Sequence[NkiTensor], writes: Sequence[NkiTensor], share: float = 1.0) -> None:
    """Add the HBM traffic of a transfer to a core's counters; `share` of it where several cores count the same one."""
    for views, counter in ((reads, "hbm_read_bytes"), (writes, "hbm_written_bytes")):
        moved = sum(view.size * view.element.itemsize for view in views if view.buffer in HBM)
        setattr(core.stats, counter, getattr(core.stats, counter) + int(moved * share))


def _count(core: Core, what: str, reads: list[NkiTensor], dst: NkiTensor, slowdown: float = 1.0) -> None:
    parts = [costs.dma_loads(core.target, dst, src) for src in reads]
    loads = [sum(engine) * slowdown for engine in zip(*parts, strict=True)]
    core.count(what, costs.DMA, reads=reads, writes=(dst,), dma_loads=loads, latency_ns=costs.DMA_LATENCY_NS)
    count_hbm(core, reads, (dst,))


def _check_queue(core: Core, what: str, priority: int | None, mode: DgeMode, oob: OobMode, indirect: bool) -> None:
    member(what, "dge_mode", mode, DgeMode)
    member(what, "oob_mode", oob, OobMode)
    if priority is not None:
        need_generation(core, what, 4, "priority", priority)
        if priority not in range(4):
            fail(what, "priority", priority, "has to be 0 to 3")
    if oob is OobMode.skip and not indirect:
        fail(what, "oob_mode", oob, "goes with indirect access only")


def dma_copy(
    dst: NkiTensor,
    src: NkiTensor,
    priority: int | None = None,
    oob_mode: OobMode = OobMode.error,
    dge_mode: DgeMode = DgeMode.unknown,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> None:
    """`dst = cast(src)` between HBM and SBUF, element by element in row-major order of the two views.

    A view made with `ap(vector_offset=…)` gathers or scatters rows of an HBM tensor; out of bounds is an error, or with
    `oob_mode.skip` that access is dropped. No cast for packed types and with hwdge.
    """
    core, what = here("dma_copy"), "dma_copy"
    _operand(what, "src", src)
    _operand(what, "dst", dst)
    indirect = src.is_indirect() or dst.is_indirect()
    _check_queue(core, what, priority, dge_mode, oob_mode, indirect)
    if src.size != dst.size:
        fail(what, "dst", f"of {dst.size} elements", f"has to have src's {src.size}")
    if src.dtype != dst.dtype and (src.packed or dst.packed or dge_mode is DgeMode.hwdge):
        fail(what, "dst.dtype", dst.dtype, f"packed types and hwdge do not cast ({src.dtype}); use .view")
    if indirect and dge_mode in (DgeMode.hwdge, DgeMode.none):
        fail(what, "dge_mode", dge_mode, "vector_offset needs swdge or unknown")
    if src.is_indirect() and dst.is_indirect():
        fail(what, "dst", "an indirect view", "src is one already; one side only")
    member(what, "engine", engine, Engine)
    if engine is not Engine.unknown and (dge_mode is not DgeMode.hwdge or engine not in (Engine.sync, Engine.scalar)):
        fail(what, "engine", engine, f"has to be sync or scalar, with hwdge ({dge_mode})")
    _count(core, what, [src], dst)
    if not core.executes:
        return
    if oob_mode is OobMode.skip:
        _copy_inside(core, dst, src)
        return
    raw = src.read_raw(core.core)
    dst.write_raw(core.core, _converted(raw, src, dst).reshape(dst.shape))


def _converted(raw: NDArray, src: NkiTensor, dst: NkiTensor) -> NDArray:
    # A copy, so that source and destination may overlap.
    return (
        np.array(raw) if src.dtype == dst.dtype else cast(to_float32(raw, src.element, src.name), dst.element, dst.name)
    )


def _copy_inside(core: Core, dst: NkiTensor, src: NkiTensor) -> None:
    """An indirect copy that drops what lies outside."""
    elements, valid = (src if src.is_indirect() else dst).gathered_elements(core.core)
    valid = valid.reshape(-1)
    if src.is_indirect():
        numbers = np.where(valid, elements.reshape(-1), 0)
        flat = NkiTensor(src.storage, src.element, (src.storage.nbytes // src.element.itemsize,), (1,))
        taken = _converted(flat.read_raw(core.core)[numbers], src, dst)
        kept = np.array(dst.read_raw(core.core)).reshape(-1)
        dst.write_raw(core.core, np.where(valid, taken, kept).reshape(dst.shape))
    else:
        values = _converted(src.read_raw(core.core).reshape(-1), src, dst)
        dst.write_elements(core.core, elements.reshape(-1)[valid], values[valid])


def dma_compute(
    dst: NkiTensor,
    srcs: Sequence[NkiTensor],
    reduce_op: Op,
    scales: Any = None,
    unique_indices: bool = True,
    oob_mode: OobMode = OobMode.error,
    name: str | None = None,
) -> None:
    """`dst = Σ srcs` in float32, with static addresses; the indirect forms are not simulated."""
    core, what = here("dma_compute"), "dma_compute"
    check_op(what, "reduce_op", reduce_op, ("add",))
    sources = list(srcs)
    if not 1 <= len(sources) <= _MOST_SOURCES:
        fail(what, "srcs", f"{len(sources)} tensors", f"1 to {_MOST_SOURCES}")
    if scales is not None and any(scale != 1.0 for scale in scales):
        fail(what, "scales", scales, "have to be 1.0")
    for argument, view in (("dst", dst), *(("srcs", source) for source in sources)):
        _operand(what, argument, view)
        if view.is_indirect():
            fail(what, argument, "an indirect view", "is not simulated here; gather with dma_copy")
        if view.size != dst.size:
            fail(what, argument, f"of {view.size} elements", f"has to have dst's {dst.size}")
    _check_queue(core, what, None, DgeMode.unknown, oob_mode, False)
    _count(core, what, sources, dst, 2.0 if core.target.generation < 4 else 1.0)
    if core.executes:
        total = np.zeros(dst.shape, np.float32)
        for source in sources:
            total = total + to_float32(source.read_raw(core.core), source.element, source.name).reshape(dst.shape)
        dst.write_raw(core.core, cast(total, dst.element, dst.name))


def dma_transpose(
    dst: NkiTensor,
    src: NkiTensor,
    axes: tuple[int, ...] | None = None,
    priority: int | None = None,
    dge_mode: DgeMode = DgeMode.unknown,
    oob_mode: OobMode = OobMode.error,
    name: str | None = None,
) -> None:
    """`dst = transpose(src, axes)` into SBUF, bit for bit: [1, 0], [2, 1, 0] or [3, 1, 2, 0]; types of 2 or 4 bytes.

    hwdge, which is the default where its rules hold, needs 2 bytes, a last dim of at most 128, and 16 rows (2-D) or
    1, 2, 4, 8 or 16 with `shape[0] · shape[-2]` a multiple of 16; asked for by name, its rules are checked. The
    indirect form is not simulated.
    """
    core, what = here("dma_transpose"), "dma_transpose"
    _operand(what, "src", src)
    _operand(what, "dst", dst)
    if dst.buffer != SBUF:
        fail(what, "dst", f"in {dst.buffer}", "has to be in sbuf")
    if src.is_indirect() or dst.is_indirect():
        fail(what, "src", "an indirect view", "is not simulated here")
    _check_queue(core, what, priority, dge_mode, oob_mode, False)
    expected = _TRANSPOSED_AXES.get(src.ndim)
    if expected is None or (axes is not None and tuple(axes) != expected):
        fail(what, "axes", axes, f"has to be {expected or '2, 3 or 4 dims'} for {src.ndim} dims")
    if dst.shape != tuple(src.shape[axis] for axis in expected):
        fail(what, "dst", f"of shape {dst.shape}", f"has to be {tuple(src.shape[axis] for axis in expected)}")
    if dst.dtype != src.dtype:
        fail(what, "dst.dtype", dst.dtype, f"has to be src's {src.dtype}")
    if src.element.itemsize not in (2, 4):
        fail(what, "src.dtype", src.dtype, "has to be of 2 or 4 bytes")
    if dge_mode in (DgeMode.hwdge, DgeMode.swdge) and src.element.itemsize != 2:
        fail(what, "src.dtype", src.dtype, f"has to be of 2 bytes with {dge_mode}")
    if dge_mode is DgeMode.hwdge:
        _check_hwdge_transpose(what, src)
    _count(core, what, [src], dst, 1 / costs.transpose_rate(src))
    if core.executes:
        dst.write_raw(core.core, np.array(src.read_raw(core.core)).transpose(expected))


def _check_hwdge_transpose(what: str, src: NkiTensor) -> None:
    if src.shape[-1] > 128:
        fail(what, "src's last dim", src.shape[-1], "at most 128 with hwdge")
    if src.ndim == 2 and src.shape[0] != 16:
        fail(what, "src's rows", src.shape[0], "has to be 16 with hwdge")
    if src.ndim > 2 and (src.shape[0] not in (1, 2, 4, 8, 16) or src.shape[0] * src.shape[-2] % 16):
        fail(what, "src", f"of shape {src.shape}", "hwdge needs 1, 2, 4, 8 or 16 rows and rows · shape[-2] % 16 == 0")
