# SPDX-License-Identifier: Apache-2.0
"""What `nki.collectives` holds: collectives of whole ranks, issued by the kernel. AWS's own simulator has none.

Cores meet by group and by how often they came to that group before; the last to come moves the data while the others
stand still. At LNC 2 both cores make the call: on shared HBM both pass the same tensors and the data moves once, and
the call orders both cores' traffic on them; in SBUF (and private HBM) core k exchanges with core k of the other
ranks. The prose documentation states neither; this is what the published kernels do. Nothing here was compared with a
device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_neuron_nkisim import costs
from omni_neuron_nkisim.checks import check_op, need_generation, tensor
from omni_neuron_nkisim.context import Core, current_core
from omni_neuron_nkisim.dtypes import INTEGER, cast, to_float32
from omni_neuron_nkisim.errors import NkiValidationError, fail
from omni_neuron_nkisim.isa.dma import count_hbm
from omni_neuron_nkisim.memory import HBM, PSUM, SBUF, SHARED_HBM
from omni_neuron_nkisim.operators import Op
from omni_neuron_nkisim.registers import VirtualRegister, register_value
from omni_neuron_nkisim.tensors import NkiTensor

_REDUCTIONS = ("add", "minimum", "maximum")
_MOST_CHANNELS = 4

Place = tuple[int, int]
Arrays = list[NDArray[Any]]


class ReplicaGroup:
    """Disjoint groups of global rank ids: `ReplicaGroup([[0, 1], [2, 3]])`."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self.groups = tuple(tuple(group) for group in groups)
        ranks = [rank for group in self.groups for rank in group]
        if len(set(ranks)) != len(ranks) or not all(isinstance(rank, int) for rank in ranks):
            fail("ReplicaGroup", "groups", self.groups, "have to be disjoint lists of rank numbers")


@dataclass(frozen=True)
class _Call:
    """One collective call of one core."""

    srcs: list[NkiTensor]
    dsts: list[NkiTensor]


def _group(core: Core, what: str, replica_group: object) -> tuple[int, ...]:
    """The group of this core's rank, in its own order."""
    if not isinstance(replica_group, ReplicaGroup):
        fail(what, "replica_group", repr(replica_group), "has to be an ncc.ReplicaGroup")
    outside = [rank for group in replica_group.groups for rank in group if rank not in range(core.launch.ranks)]
    if outside:
        fail(what, "replica_group", replica_group.groups, f"names ranks {outside} of {core.launch.ranks}")
    for group in replica_group.groups:
        if core.rank in group:
            return group
    return fail(what, "replica_group", replica_group.groups, f"has to hold the calling rank {core.rank}")


def _check_tensors(core: Core, what: str, srcs: object, dsts: object, priority: int | None) -> _Call:
    """Lists of tensors, one dtype, all in HBM or all in SBUF (then one tensor)."""
    lists = []
    for argument, value in (("srcs", srcs), ("dsts", dsts)):
        if not isinstance(value, list | tuple) or not value:
            fail(what, argument, repr(value), "has to be a list of tensors")
        lists.append([tensor(what, argument, view) for view in value])
    call = _Call(*lists)
    if len(call.srcs) != len(call.dsts):
        fail(what, "dsts", f"{len(call.dsts)} tensors", f"has to be as many as srcs, {len(call.srcs)}")
    views = [*call.srcs, *call.dsts]
    if any(view.is_indirect() for view in views):
        fail(what, "srcs and dsts", "an indirect view", "collectives take plain views")
    if any(view.buffer == PSUM for view in views):
        fail(what, "srcs and dsts", "in psum", "collectives reach HBM and SBUF")
    if len({view.buffer for view in views}) > 1:
        fail(what, "srcs and dsts", sorted({str(view.buffer) for view in views}), "all are in one kind of memory")
    for src, dst in zip(call.srcs, call.dsts, strict=True):
        if src.dtype != dst.dtype:
            fail(what, "dsts", dst.dtype, f"has to have src's dtype {src.dtype}")
    if priority is not None:
        need_generation(core, what, 4, "priority", priority)
    return call


def _same_shapes(what: str, call: _Call) -> None:
    for src, dst in zip(call.srcs, call.dsts, strict=True):
        if src.shape != dst.shape:
            fail(what, "dsts", dst.shape, f"has to have src's shape {src.shape}")


def _one_if_sbuf(what: str, call: _Call) -> None:
    if len(call.srcs) > 1 and call.srcs[0].buffer == SBUF:
        fail(what, "srcs", f"{len(call.srcs)} tensors in sbuf", "coalesced collectives are in HBM only")


def _hbm_only(what: str, call: _Call, most: int | None = None) -> None:
    if call.srcs[0].buffer not in HBM:
        fail(what, "srcs", f"in {call.srcs[0].buffer}", "has to be in HBM")
    if most is not None and len(call.srcs) > most:
        fail(what, "srcs", f"{len(call.srcs)} tensors", f"at most {most}")


def _dim(what: str, call: _Call, collective_dim: int) -> int:
    in_sbuf = call.srcs[0].buffer == SBUF and what == "all_gather"
    allowed = (0, 1) if in_sbuf else (0,)
    if collective_dim not in allowed or isinstance(collective_dim, bool):
        fail(what, "collective_dim", collective_dim, f"has to be {' or '.join(map(str, allowed))}")
    if in_sbuf and any(view.ndim != 2 for view in (*call.srcs, *call.dsts)):
        fail(what, "srcs and dsts", [view.shape for view in (*call.srcs, *call.dsts)], "are 2-D in SBUF")
    return collective_dim


def _run(
    core: Core,
    what: str,
    group: tuple[int, ...],
    call: _Call,
    hops: int,
    bytes_per_hop: float,
    move: Callable[[dict[int, Arrays]], dict[int, Arrays]] | None,
) -> None:
    """Meet the other cores of the group, and move data: `move` maps the sources of each rank to its results."""
    lnc = core.launch.lnc
    # With symmetric_ranks only rank 0 is there, and moves nothing.
    places = [(rank, number) for rank in group for number in range(lnc) if (rank, number) in core.launch.cores]
    number = core.next_call(("collective", group))
    shapes = ", ".join(f"{src.dtype}{list(src.shape)} to {list(dst.shape)}" for src, dst in
                       zip(call.srcs, call.dsts, strict=True))  # fmt: skip
    label = f"{what} of {shapes}, call {number} of group {list(group)}"

    def act(arrived: dict[Place, _Call]) -> None:
        shared = call.srcs[0].buffer == SHARED_HBM
        for rank in dict(places) if lnc == 2 and shared else ():
            _check_both_cores(what, rank, arrived[rank, 0], arrived[rank, 1])
            for view in (*arrived[rank, 0].srcs, *arrived[rank, 0].dsts):
                view.storage.synchronise(label)
        _advance_clocks(core, what, places, arrived, hops, bytes_per_hop, 1 / lnc if shared else 1.0)
        if not core.executes or move is None:
            return
        for lane in range(1 if shared else lnc):
            sources = {rank: [_read(view, lane) for view in arrived[rank, lane].srcs] for rank in group}
            for rank, results in move(sources).items():
                for view, result in zip(arrived[rank, lane].dsts, results, strict=True):
                    _write(view, lane, result)

    core.launch.meet(core, ("collective", group, number), places, label, call, act)


def _check_both_cores(what: str, rank: int, first: _Call, second: _Call) -> None:
    for mine, other in zip((*first.srcs, *first.dsts), (*second.srcs, *second.dsts), strict=True):
        if mine.storage is not other.storage or (mine.offset, mine.strides) != (other.offset, other.strides):
            raise NkiValidationError(
                f"{what}: the cores of rank {rank} pass different tensors, {mine!r} and {other!r}; on shared_hbm both "
                "pass the same"
            )


def _advance_clocks(
    core: Core,
    what: str,
    places: list[Place],
    arrived: dict[Place, _Call],
    hops: int,
    bytes_per_hop: float,
    share: float,
) -> None:
    cores = [core.launch.cores[place] for place in places]
    start = max(
        one.ready(costs.COLLECTIVE, arrived[place].srcs, arrived[place].dsts)
        for one, place in zip(cores, places, strict=True)
    )
    per_rank = bytes_per_hop * (1 if share < 1 else core.launch.lnc)
    ns = costs.collective_ns(core.target, core.launch.lnc, hops, per_rank)
    for one, place in zip(cores, places, strict=True):
        call = arrived[place]
        one.count(
            what, costs.COLLECTIVE, reads=call.srcs, writes=call.dsts, ns=ns, latency_ns=0.0, not_before=start
        )  # fmt: skip
        count_hbm(one, call.srcs, call.dsts, share)


def _read(view: NkiTensor, lane: int) -> NDArray[Any]:
    assert view.storage.base is not None
    return np.array(view.strided(view.storage.base, view.runtime_offset(lane)))


def _write(view: NkiTensor, lane: int, values: NDArray[Any]) -> None:
    # Shared HBM was synchronised and its cores stand still, so the base is what both see.
    assert view.storage.base is not None
    view.strided(view.storage.base, view.runtime_offset(lane))[...] = values


def _reduced(op: Op, parts: Arrays, view: NkiTensor) -> NDArray[Any]:
    """Parts combined in group order, in float32 (integers in 64 bits), cast once."""
    assert op.alu is not None
    integers = view.element.kind == INTEGER
    total: NDArray[Any] | None = None
    for part in parts:
        wide = part.astype(np.int64) if integers else to_float32(part, view.element, view.name)
        total = wide if total is None else op.alu(total, wide)
    assert total is not None
    return cast(total, view.element, view.name)


def _bytes(views: list[NkiTensor]) -> int:
    return sum(view.size * view.element.itemsize for view in views)


def all_reduce(
    srcs: Any, dsts: Any, replica_group: ReplicaGroup, op: Op, priority: int | None = None, name: str | None = None
) -> None:
    """Every rank's dst = op over all ranks' srcs, in group order."""
    core, what = current_core("ncc.all_reduce"), "all_reduce"
    call, group = _check_tensors(core, what, srcs, dsts, priority), _group(core, what, replica_group)
    check_op(what, "op", op, _REDUCTIONS)
    _one_if_sbuf(what, call)
    _same_shapes(what, call)

    def move(sources: dict[int, Arrays]) -> dict[int, Arrays]:
        sums = [_reduced(op, [sources[rank][n] for rank in group], view) for n, view in enumerate(call.srcs)]
        return dict.fromkeys(group, sums)

    hops = 2 * (len(group) - 1)
    _run(core, what, group, call, hops, _bytes(call.srcs) / len(group), move)


def all_gather(
    srcs: Any,
    dsts: Any,
    replica_group: ReplicaGroup,
    collective_dim: int,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Every rank's dst = all srcs along `collective_dim` in group order; dim 0, in SBUF 0 or 1 of 2-D tensors."""
    core, what = current_core("ncc.all_gather"), "all_gather"
    call, group = _check_tensors(core, what, srcs, dsts, priority), _group(core, what, replica_group)
    dim = _dim(what, call, collective_dim)
    _one_if_sbuf(what, call)
    for src, dst in zip(call.srcs, call.dsts, strict=True):
        wanted = (*src.shape[:dim], src.shape[dim] * len(group), *src.shape[dim + 1 :])
        if dst.shape != wanted:
            fail(what, "dsts", dst.shape, f"has to be {wanted} for {len(group)} ranks")

    def move(sources: dict[int, Arrays]) -> dict[int, Arrays]:
        gathered = [np.concatenate([sources[rank][n] for rank in group], dim) for n in range(len(call.srcs))]
        return dict.fromkeys(group, gathered)

    _run(core, what, group, call, len(group) - 1, _bytes(call.srcs), move)


def reduce_scatter(
    srcs: Any,
    dsts: Any,
    replica_group: ReplicaGroup,
    collective_dim: int,
    op: Op,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Rank i of the group keeps chunk i, along dim 0, of op over all srcs."""
    core, what = current_core("ncc.reduce_scatter"), "reduce_scatter"
    call, group = _check_tensors(core, what, srcs, dsts, priority), _group(core, what, replica_group)
    check_op(what, "op", op, _REDUCTIONS)
    _dim(what, call, collective_dim)
    _one_if_sbuf(what, call)
    for src, dst in zip(call.srcs, call.dsts, strict=True):
        if src.shape != (dst.shape[0] * len(group), *dst.shape[1:]):
            fail(what, "dsts", dst.shape, f"has to be a {len(group)}th of src's {src.shape} along dim 0")

    def move(sources: dict[int, Arrays]) -> dict[int, Arrays]:
        sums = [_reduced(op, [sources[rank][n] for rank in group], view) for n, view in enumerate(call.srcs)]
        return {rank: [np.split(total, len(group))[at] for total in sums] for at, rank in enumerate(group)}

    _run(core, what, group, call, len(group) - 1, _bytes(call.dsts), move)


def all_to_all(
    srcs: Any,
    dsts: Any,
    replica_group: ReplicaGroup,
    collective_dim: int,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Chunk j of rank i's dst = chunk i of rank j's src, along dim 0, in HBM."""
    core, what = current_core("ncc.all_to_all"), "all_to_all"
    call, group = _check_tensors(core, what, srcs, dsts, priority), _group(core, what, replica_group)
    _hbm_only(what, call)
    _dim(what, call, collective_dim)
    _same_shapes(what, call)
    for src in call.srcs:
        if src.shape[0] % len(group):
            fail(what, "srcs", src.shape, f"dim 0 has to be a multiple of {len(group)} ranks")

    def move(sources: dict[int, Arrays]) -> dict[int, Arrays]:
        chunks = {rank: [np.split(part, len(group)) for part in sources[rank]] for rank in group}
        return {
            rank: [np.concatenate([chunks[other][n][at] for other in group]) for n in range(len(call.srcs))]
            for at, rank in enumerate(group)
        }

    _run(core, what, group, call, len(group) - 1, _bytes(call.srcs) / len(group), move)


def collective_permute(
    srcs: Any,
    dsts: Any,
    source_target_pairs: Sequence[tuple[int, int]],
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """For each pair (s, t): t's dst = s's src; one tensor, in HBM. A rank in no pair does not take part.

    Any pairing of distinct sources and distinct targets runs here; the runtime's page allows rings over linked
    neighbours only.
    """
    core, what = current_core("ncc.collective_permute"), "collective_permute"
    call = _check_tensors(core, what, srcs, dsts, priority)
    _hbm_only(what, call, most=1)
    _same_shapes(what, call)
    pairs = [tuple(pair) for pair in source_target_pairs]
    for end, side in enumerate(("sources", "targets")):
        ranks = [pair[end] for pair in pairs]
        if len(set(ranks)) != len(ranks) or any(rank not in range(core.launch.ranks) for rank in ranks):
            fail(what, "source_target_pairs", pairs, f"{side} have to be distinct ranks below {core.launch.ranks}")
    group = tuple(sorted({rank for pair in pairs for rank in pair}))
    if core.rank in group:
        _run(core, what, group, call, 1, _bytes(call.srcs), lambda sources: {t: sources[s] for s, t in pairs})


def _ring(core: Core, what: str, group: tuple[int, ...]) -> tuple[int, ...]:
    order = core.settings.ring
    if order is None:
        return group
    if sorted(order) != list(range(len(group))):
        fail(what, "settings.ring", order, f"has to be a permutation of 0 to {len(group) - 1}")
    return tuple(group[position] for position in order)


def _check_channels(core: Core, what: str, call: _Call, channel_ids: Sequence[int]) -> None:
    if list(channel_ids) != list(range(len(call.srcs))):
        fail(what, "channel_ids", list(channel_ids), f"has to be 0 to {len(call.srcs) - 1}, one tensor per channel")
    if len(call.srcs) > _MOST_CHANNELS:
        fail(what, "channel_ids", list(channel_ids), f"at most {_MOST_CHANNELS} channels")
    _same_shapes(what, call)


def _rotated(ring: tuple[int, ...], sources: dict[int, Arrays]) -> dict[int, Arrays]:
    return {ring[(at + 1) % len(ring)]: sources[rank] for at, rank in enumerate(ring)}


def collective_permute_implicit(
    srcs_by_channel: Any,
    dsts_by_channel: Any,
    replica_group: ReplicaGroup,
    channel_ids: Sequence[int] = (0,),
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """One hop: on each channel send src to the ring's successor and receive the predecessor's into dst.

    The ring is `settings.ring`'s, the same on every channel. Up to 4 channels: that groups which do not cover a node
    have 2 is not checked.
    """
    core, what = current_core("ncc.collective_permute_implicit"), "collective_permute_implicit"
    call = _check_tensors(core, what, srcs_by_channel, dsts_by_channel, priority)
    group = _group(core, what, replica_group)
    _check_channels(core, what, call, channel_ids)
    ring = _ring(core, what, group)
    _run(core, what, group, call, 1, _bytes(call.srcs), lambda sources: _rotated(ring, sources))


def collective_permute_implicit_reduce(
    srcs0_by_channel: Any,
    srcs1_by_channel: Any,
    dsts_by_channel: Any,
    replica_group: ReplicaGroup,
    op: Op,
    channel_ids: Sequence[int] = (0,),
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """One hop: send `op(src0, src1)` on, receive the predecessor's."""
    core, what = current_core("ncc.collective_permute_implicit_reduce"), "collective_permute_implicit_reduce"
    first = _check_tensors(core, what, srcs0_by_channel, dsts_by_channel, priority)
    second = _check_tensors(core, what, srcs1_by_channel, dsts_by_channel, priority)
    group = _group(core, what, replica_group)
    check_op(what, "op", op, _REDUCTIONS)
    for call in (first, second):
        _check_channels(core, what, call, channel_ids)
    ring, count = _ring(core, what, group), len(first.srcs)
    both = _Call([*first.srcs, *second.srcs], [*first.dsts, *first.dsts])

    def move(sources: dict[int, Arrays]) -> dict[int, Arrays]:
        sums = {
            rank: [_reduced(op, [parts[n], parts[count + n]], first.srcs[n]) for n in range(count)] * 2
            for rank, parts in sources.items()
        }
        return _rotated(ring, sums)

    _run(core, what, group, both, 1, _bytes(first.srcs), move)


def collective_permute_implicit_current_processing_rank_id(
    iteration_id: int | VirtualRegister, replica_group: ReplicaGroup, channel_id: int = 0, name: str | None = None
) -> VirtualRegister:
    """A register with the rank whose data is here after `iteration_id` hops; 0 is the own rank."""
    what = "collective_permute_implicit_current_processing_rank_id"
    core = current_core(f"ncc.{what}")
    ring = _ring(core, what, _group(core, what, replica_group))
    hops = register_value(iteration_id, what) if isinstance(iteration_id, VirtualRegister) else iteration_id
    core.count(what, costs.SYNC)
    return VirtualRegister(ring[(ring.index(core.rank) - hops) % len(ring)], frozen=True)


def rank_id(name: str | None = None) -> VirtualRegister:
    """A register with this rank's number."""
    core = current_core("ncc.rank_id")
    core.count("rank_id", costs.SYNC)
    return VirtualRegister(core.rank, frozen=True)


__all__ = [
    "ReplicaGroup",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "collective_permute",
    "collective_permute_implicit",
    "collective_permute_implicit_current_processing_rank_id",
    "collective_permute_implicit_reduce",
    "rank_id",
    "reduce_scatter",
]
