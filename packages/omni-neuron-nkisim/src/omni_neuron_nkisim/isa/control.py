# SPDX-License-Identifier: Apache-2.0
"""Registers, and what the two cores of an LNC 2 do to each other."""

from __future__ import annotations

from typing import Any

import numpy as np

from omni_neuron_nkisim import costs
from omni_neuron_nkisim.checks import here, member, same_shape, tensor, tile
from omni_neuron_nkisim.configuration import current_settings
from omni_neuron_nkisim.constants import dma_engine as DmaEngine
from omni_neuron_nkisim.constants import engine as Engine
from omni_neuron_nkisim.constants import nc_version
from omni_neuron_nkisim.context import Core
from omni_neuron_nkisim.errors import NkiValidationError, fail
from omni_neuron_nkisim.memory import PSUM, SBUF, SHARED_HBM
from omni_neuron_nkisim.registers import VirtualRegister, register_value, set_register
from omni_neuron_nkisim.tensors import NkiTensor

_GPSIMD_DMA_BYTES = {4: 1024, 2: 512, 1: 256}


def get_nc_version() -> nc_version:
    """The generation of the target."""
    return nc_version(current_settings().resolved_target().generation)


def _register(what: str, argument: str, value: object) -> VirtualRegister:
    if not isinstance(value, VirtualRegister):
        fail(what, argument, repr(value), "has to be a register (nisa.register_alloc)")
    return value


def _single(what: str, argument: str, value: object) -> NkiTensor:
    view = tensor(what, argument, value)
    if view.size != 1 or view.buffer == PSUM:
        fail(what, argument, repr(view), "has to be one element in HBM or SBUF")
    return view


def register_alloc(x: int | None = None) -> VirtualRegister:
    """A new register, holding `x` if given."""
    core, what = here("register_alloc"), "register_alloc"
    core.count(what, costs.SYNC)
    register = VirtualRegister()
    if x is not None:
        register_move(register, x)
    return register


def register_move(dst: VirtualRegister, src: VirtualRegister | int) -> None:
    """`dst = src`, a register or a constant (the migration text asks for a register; the interface takes both)."""
    core, what = here("register_move"), "register_move"
    _register(what, "dst", dst)
    if not isinstance(src, VirtualRegister) and (isinstance(src, bool) or not isinstance(src, int)):
        fail(what, "src", repr(src), "has to be a register or an int")
    core.count(what, costs.SYNC)
    set_register(dst, register_value(src, what) if isinstance(src, VirtualRegister) else src, what)


def register_load(dst: VirtualRegister, src: NkiTensor) -> None:
    """`dst` = the one element of `src`; 0 where nothing is executed, since nobody knows."""
    core, what = here("register_load"), "register_load"
    _register(what, "dst", dst)
    _single(what, "src", src)
    core.count(what, costs.SYNC, reads=(src,))
    value = int(src.read_raw(core.core).reshape(-1)[0]) if core.executes else 0
    set_register(dst, value, what)


def register_store(dst: NkiTensor, src: VirtualRegister) -> None:
    """The one element of `dst` = `src`; an integer type wraps."""
    core, what = here("register_store"), "register_store"
    _single(what, "dst", dst)
    value = register_value(_register(what, "src", src), what)
    core.count(what, costs.SYNC, writes=(dst,))
    if core.executes:
        dst.write_raw(core.core, np.array([value], np.int64).astype(dst.element.storage).reshape(dst.shape))


def _both_cores(core: Core, what: str) -> list[tuple[int, int]]:
    if core.launch.lnc != 2:
        fail(what, "lnc", core.launch.lnc, "needs a launch on two cores, kernel[2]")
    return [(core.rank, 0), (core.rank, 1)]


def core_barrier(
    data: NkiTensor, cores: tuple[int, ...], engine: Engine = Engine.gpsimd, name: str | None = None
) -> None:
    """Both cores wait for each other; what either wrote to `data`, and to that only, is then visible to both."""
    core, what = here("core_barrier"), "core_barrier"
    places = _both_cores(core, what)
    tensor(what, "data", data)
    member(what, "engine", engine, Engine)
    if data.buffer != SHARED_HBM:
        fail(what, "data", f"in {data.buffer}", "has to be in shared_hbm")
    if tuple(cores) != (0, 1):
        fail(what, "cores", cores, "has to be (0, 1)")
    call = core.next_call(what)

    def join(arrived: dict[tuple[int, int], Any]) -> None:
        views: list[NkiTensor] = list(arrived.values())
        if views[0].storage is not views[1].storage:
            raise NkiValidationError(f"core_barrier: the cores name different tensors: {views[0]!r} and {views[1]!r}")
        views[0].storage.synchronise(f"core_barrier {call} of rank {core.rank}")
        partners = [core.launch.cores[place] for place in places]
        on = engine.name if engine.name in costs.ENGINES else costs.SYNC
        start = max(partner.ready(on, (), (data,)) for partner in partners)
        for partner in partners:
            partner.count(what, on, reads=(data,), writes=(data,), not_before=start)

    core.launch.meet(core, (what, core.rank, call), places, f"core_barrier {call}", data, join)


def sendrecv(
    src: NkiTensor,
    dst: NkiTensor,
    send_to_rank: int,
    recv_from_rank: int,
    pipe_id: int,
    dma_engine: DmaEngine = DmaEngine.dma,
    name: str | None = None,
) -> None:
    """Send `src` into the other core's `dst` and receive its `src` into mine, both in SBUF, of one shape and dtype."""
    core, what = here("sendrecv"), "sendrecv"
    places = _both_cores(core, what)
    tile(what, "src", src, (SBUF,), start_rule=False)
    tile(what, "dst", dst, (SBUF,), (src.dtype,), start_rule=False)
    same_shape(what, src=src, dst=dst)
    member(what, "dma_engine", dma_engine, DmaEngine)
    other = 1 - core.core
    for argument, value in (("send_to_rank", send_to_rank), ("recv_from_rank", recv_from_rank)):
        if value != other:
            fail(what, argument, value, f"has to be {other}, the other core, on core {core.core}")
    row = src.free * src.element.itemsize
    limit = _GPSIMD_DMA_BYTES[src.element.itemsize]
    if dma_engine is DmaEngine.gpsimd_dma and row > limit:
        fail(what, "src", f"{row} bytes per partition", f"at most {limit} for {src.dtype} with gpsimd_dma")
    call = core.next_call((what, pipe_id))

    def exchange(arrived: dict[tuple[int, int], Any]) -> None:
        (first_src, first_dst), (second_src, second_dst) = (arrived[place] for place in places)
        if (first_src.shape, first_src.dtype) != (second_src.shape, second_src.dtype):
            raise NkiValidationError(f"sendrecv: the cores send {first_src!r} and {second_src!r}; both have one shape")
        partners = [core.launch.cores[place] for place in places]
        start = max(
            partner.ready(costs.DMA, (arrived[place][0],), (arrived[place][1],))
            for partner, place in zip(partners, places, strict=True)
        )
        for partner, place in zip(partners, places, strict=True):
            sent, received = arrived[place]
            partner.count(
                what, costs.DMA, reads=(sent,), writes=(received,),
                dma_loads=costs.dma_loads(core.target, received, sent), latency_ns=costs.DMA_LATENCY_NS,
                not_before=start,
            )  # fmt: skip
        if core.executes:
            first, second = (view.read_raw(n).copy() for n, view in enumerate((first_src, second_src)))
            first_dst.write_raw(0, second)
            second_dst.write_raw(1, first)

    core.launch.meet(
        core, (what, core.rank, pipe_id, call), places, f"sendrecv {call} of pipe {pipe_id}", (src, dst), exchange
    )
