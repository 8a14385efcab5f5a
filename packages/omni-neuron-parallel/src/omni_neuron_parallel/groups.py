# SPDX-License-Identifier: Apache-2.0
"""The process groups of this rank, one an axis and any further ones by name, and the collectives on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from omni_neuron_parallel.collectives import collective_errors, collective_permute
from omni_neuron_parallel.meshes import place_on_fabric
from omni_neuron_parallel.topology import AXES, Axis, Partition, Topology, check_partition
from omni_neuron_runtime import env, register_process_group_replica_groups

# The functional ops rather than `dist.all_reduce`: they return a new tensor, are traced into a graph by torch.compile,
# and need no AsyncCollectiveTensor wrapper (which `torch.distributed._functional_collectives` would add in eager mode).
_OPS = torch.ops._c10d_functional


@dataclass(frozen=True)
class AxisGroup:
    """The ranks that share one axis with this rank.

    Results are in *group order*, also where a physical mesh turns a group round, such as ranks (12, 8). c10d sorts the
    ranks of a process group, so host (CPU) tensors are put in order here; on a device the registered replica groups
    give the order.

    Attributes:
        axis: the mesh axis, or another name of the partition that the group belongs to.
        ranks: global ranks in group order.
        rank: this process's position in `ranks`.
        process_group: the torch process group; None in a group of one rank, whose collectives do nothing.

    Every collective raises `CollectiveError` where another rank died or did not take part within the deadline of the
    process group, except in compiled code, where torch's own error arrives.
    """

    axis: str
    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    process_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if len(self.ranks) > 1 and self.process_group is None:
            raise ValueError(f"the {self.axis} group of ranks {list(self.ranks)} has no process group")

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of `tensor` over the group, the same bits on every rank. Shape and dtype as given."""
        if self.size == 1:
            return tensor
        with self._errors("all_reduce"):
            return _OPS.wait_tensor(_OPS.all_reduce(tensor.contiguous(), "sum", self._name))

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The ranks' tensors, all of one shape, joined along `dim` in group order."""
        if self.size == 1:
            return tensor
        with self._errors("all_gather"):
            gathered = _OPS.wait_tensor(_OPS.all_gather_into_tensor(tensor.contiguous(), self.size, self._name))
        places = self._places(tensor)
        if dim % tensor.dim() == 0 and places == list(range(self.size)):
            return gathered
        parts = gathered.chunk(self.size, dim=0)
        return torch.cat([parts[place] for place in places], dim=dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part, along `dim` and in group order, of the sum of `tensor` over the group.

        Raises:
            ValueError: the group's size does not divide the dim.
        """
        if self.size == 1:
            return tensor
        if tensor.shape[dim] % self.size:
            raise ValueError(
                f"dim {dim} of a tensor {tuple(tensor.shape)} cannot be scattered over the {self.size} ranks of the "
                f"{self.axis} group"
            )
        places = self._places(tensor)
        if dim % tensor.dim() or places != list(range(self.size)):
            # The collective scatters dim 0, in the order of its own places.
            parts = tensor.chunk(self.size, dim=dim)
            tensor = torch.cat([parts[places.index(place)] for place in range(self.size)], dim=0)
        with self._errors("reduce_scatter"):
            return _OPS.wait_tensor(_OPS.reduce_scatter_tensor(tensor.contiguous(), "sum", self.size, self._name))

    def gather_to_first(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """The ranks' host tensors, all of one shape, on the group's first rank in group order; None on the others.

        Raises:
            ValueError: `tensor` is not on the host.
        """
        if self.size == 1:
            return [tensor]
        if tensor.device.type != "cpu":
            raise ValueError(f"gather_to_first takes host tensors, not one on {tensor.device}: call .cpu() before")
        sent = tensor.contiguous()
        received = [torch.empty_like(sent) for _ in self.ranks] if self.rank == 0 else None
        with self._errors("gather_to_first"):
            dist.gather(sent, received, dst=self.ranks[0], group=self.process_group)
        return None if received is None else [received[place] for place in self._places(tensor)]

    def start_rotate(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to send `tensor` to the next rank of the group and to receive the previous rank's, of the same shape.

        Every rank takes part: the pairs (r, r + 1 mod size) together are one permutation (`collective_permute`), which
        can be traced.

        Returns:
            A function that waits for it and returns the received tensor. Do not write to `tensor` before.
        """
        if self.size == 1:
            return lambda: tensor
        places = self._places(tensor)
        following = [places[(places.index(place) + 1) % self.size] for place in range(self.size)]
        with self._errors("rotate"):
            received = collective_permute(tensor.contiguous(), following, self._name)

        def wait() -> torch.Tensor:
            with self._errors("rotate"):
                return _OPS.wait_tensor(received)

        return wait

    def _places(self, tensor: torch.Tensor) -> list[int]:
        """Where each rank of the group stands in the results of the process group's collectives on `tensor`."""
        if tensor.device.type != "cpu":
            return list(range(self.size))
        ascending = sorted(self.ranks)
        return [ascending.index(rank) for rank in self.ranks]

    def _errors(self, operation: str) -> contextlib.AbstractContextManager[None]:
        return collective_errors(self.axis, self.ranks, self.ranks[self.rank], operation)

    @property
    def _name(self) -> str:
        assert self.process_group is not None
        return self.process_group.group_name


class _State:
    topology: Topology | None = None
    groups: dict[str, AxisGroup] = {}  # noqa: RUF012 - one state a process, replaced as a whole
    partitions: dict[str, Partition] = {}  # noqa: RUF012
    made: list[dist.ProcessGroup] = []  # noqa: RUF012 - by this module, so that it can end them


def initialize_parallel(topology: Topology, timeout: float | None = None) -> None:
    """Make the groups of every axis on an initialised `torch.distributed` world.

    Collective: every rank calls it with the same topology. A world of one rank needs no `torch.distributed`. On a trn2
    a layout that lies on the physical mesh is placed on it (`place_on_fabric`): `get_topology` then says so.

    Args:
        topology: sizes of the axes.
        timeout: seconds that a collective of these groups may take; None for OMNI_NEURON_COLLECTIVE_TIMEOUT_S.

    Raises:
        CollectiveError: a rank did not take part in making the groups.
        RuntimeError: already initialised with another topology, or `torch.distributed` is not initialised.
        ValueError: the topology's world size is not that of `torch.distributed`, or its groups cannot be routed from
            the cores of this engine.
    """
    topology = place_on_fabric(topology)
    if _State.topology == topology:
        return
    if _State.topology is not None:
        raise RuntimeError(f"parallel groups exist for {_State.topology}; call destroy_parallel() before {topology}")
    if topology.world_size > 1:
        if not dist.is_initialized():
            raise RuntimeError(f"{topology} needs torch.distributed: call torch.distributed.init_process_group first")
        if dist.get_world_size() != topology.world_size:
            raise ValueError(
                f"{topology} is a world of {topology.world_size} ranks, torch.distributed has {dist.get_world_size()}"
            )
    install_groups(topology, {axis: make_group(axis, topology.groups(axis), timeout) for axis in AXES})


def make_group(name: str, partition: Partition, timeout: float | None = None) -> AxisGroup:
    """This rank's group of a partition of the world, new and known to nobody else. Collective over the world.

    Raises:
        CollectiveError: a rank did not take part.
    """
    rank = dist.get_rank() if len(partition) * len(partition[0]) > 1 else 0
    ranks = next(group for group in partition if rank in group)
    if len(ranks) == 1:
        return AxisGroup(name, ranks)
    seconds = env.get("OMNI_NEURON_COLLECTIVE_TIMEOUT_S") if timeout is None else timeout
    # Every rank makes every group, in the same order.
    with collective_errors(name, ranks, rank, "making"):
        process_group, _ = dist.new_subgroups_by_enumeration(
            [list(group) for group in partition], timeout=timedelta(seconds=seconds)
        )
        # A rank may have connected while another still does, and would break that one's making if it ended the group.
        dist.all_reduce(torch.zeros(1), group=process_group)
    _State.made.append(process_group)
    return AxisGroup(name, ranks, ranks.index(rank), process_group)


def install_groups(topology: Topology, groups: Mapping[Axis, AxisGroup]) -> None:
    """Take over groups that exist already, such as vLLM-Omni's, as the groups of this process.

    Raises:
        ValueError: an axis of more than one rank has no group, or a group is not one of the topology's.
    """
    missing = [axis for axis in AXES if axis not in groups and topology.size(axis) > 1]
    if missing:
        raise ValueError(f"no group for {', '.join(missing)}; every axis of {topology} with more than one rank has one")
    for axis, group in groups.items():
        if group.size != topology.size(axis) or (group.size > 1 and group.ranks not in topology.groups(axis)):
            raise ValueError(f"{list(group.ranks)} is no {axis} group of {topology}: {topology.groups(axis)}")
    for axis, group in groups.items():
        _add(axis, group, topology.groups(axis))
    _State.topology = topology


def register_group(name: str, partition: Sequence[Sequence[int]], timeout: float | None = None) -> AxisGroup:
    """Make a further group, under a name of the caller's, and tell the compile backend its partition.

    Collective over the world, and the same call on every rank. A second call with the same partition returns the group
    that exists. `expand_to_partition` completes a group that only some ranks need.

    Args:
        name: `get_group(name)` returns the group from then on, until `destroy_parallel`.
        partition: groups of one size that hold every rank of the world exactly once, each in group order.
        timeout: seconds that a collective of the group may take; None for OMNI_NEURON_COLLECTIVE_TIMEOUT_S.

    Returns:
        The group that holds this rank.

    Raises:
        CollectiveError: a rank did not take part.
        RuntimeError: the name is in use for another partition.
        ValueError: the groups are no partition of the world, or the name is that of an axis.
    """
    groups = check_partition(name, partition, dist.get_world_size() if dist.is_initialized() else 1)
    existing = _State.partitions.get(name)
    if existing == groups:
        return _State.groups[name]
    if name in AXES:
        raise ValueError(f"{name!r} is an axis, whose groups are {existing or 'made by initialize_parallel'}")
    if existing is not None:
        raise RuntimeError(f"group {name!r} exists with the groups {existing}; take another name for {groups}")
    group = make_group(name, groups, timeout)
    _add(name, group, groups)
    return group


def destroy_parallel() -> None:
    """Forget the groups and end the process groups that this module made; adopted ones are left to their owner.

    Not collective. A process group that is only forgotten keeps threads, which poll: hundreds of them fill a core.
    """
    for process_group in _State.made:
        # ValueError: it has ended already, with its world.
        with contextlib.suppress(ValueError):
            dist.destroy_process_group(process_group)
    _State.topology, _State.groups, _State.partitions, _State.made = None, {}, {}, []


def get_topology() -> Topology:
    """The topology of this process; one rank where nothing was initialised."""
    return _State.topology or Topology()


def get_group(name: str) -> AxisGroup:
    """This rank's group along an axis, or the one registered under `name`; an axis without a group is of size one.

    Raises:
        ValueError: no axis and no registered group has this name.
    """
    if name not in _State.groups and name not in AXES:
        raise ValueError(f"there is no group {name!r}: there are {', '.join(dict.fromkeys([*AXES, *_State.groups]))}")
    return _State.groups.get(name) or AxisGroup(name)


def get_partition(group: AxisGroup) -> Partition:
    """The groups of the world that `group` is one of; that group alone where nobody installed or registered it."""
    partition = _State.partitions.get(group.axis, ())
    return partition if group.ranks in partition else (group.ranks,)


def get_world_group() -> dist.ProcessGroup | None:
    """The group of all ranks; None in a world of one."""
    return dist.group.WORLD if get_topology().world_size > 1 else None


def register_replica_groups(tp_size: int, cp_size: int) -> None:
    """Tell the compile backend the full partition behind each group's name (idempotent).

    `install_groups` and `register_group` do this already; models written for AWS's plugin call it under this name.

    Raises:
        ValueError: sizes that are not those of the topology in force.
    """
    topology = get_topology()
    if (tp_size, cp_size) != (topology.tp, topology.cp):
        raise ValueError(f"register_replica_groups(tp_size={tp_size}, cp_size={cp_size}): the topology is {topology}")
    for name, group in _State.groups.items():
        _add(name, group, _State.partitions[name])


def _add(name: str, group: AxisGroup, partition: Partition) -> None:
    if group.process_group is not None:
        register_process_group_replica_groups(group.process_group.group_name, partition)
    _State.groups = {**_State.groups, name: group}
    _State.partitions = {**_State.partitions, name: partition}
