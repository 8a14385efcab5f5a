# SPDX-License-Identifier: Apache-2.0
"""The process groups of this rank, one an axis, and the collectives on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from omni_neuron_parallel.topology import AXES, Axis, Topology
from omni_neuron_runtime import register_process_group_replica_groups

# The functional ops rather than `dist.all_reduce`: they return a new tensor, are traced into a graph by torch.compile,
# and need no AsyncCollectiveTensor wrapper (which `torch.distributed._functional_collectives` would add in eager mode).
_OPS = torch.ops._c10d_functional


@dataclass(frozen=True)
class AxisGroup:
    """The ranks that share one axis with this rank.

    Attributes:
        axis: the mesh axis, or another name of the partition that the group belongs to.
        ranks: global ranks in group order.
        rank: this process's position in `ranks`.
        process_group: the torch process group; None in a group of one rank, whose collectives do nothing.
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
        return _OPS.wait_tensor(_OPS.all_reduce(tensor.contiguous(), "sum", self._name))

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The ranks' tensors, all of one shape, joined along `dim` in group order."""
        if self.size == 1:
            return tensor
        gathered = _OPS.wait_tensor(_OPS.all_gather_into_tensor(tensor.contiguous(), self.size, self._name))
        if dim % tensor.dim() == 0:
            return gathered
        return torch.cat(gathered.chunk(self.size, dim=0), dim=dim)

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
        if dim % tensor.dim():
            # The collective scatters dim 0.
            tensor = torch.cat(tensor.chunk(self.size, dim=dim), dim=0)
        scattered = _OPS.wait_tensor(_OPS.reduce_scatter_tensor(tensor.contiguous(), "sum", self.size, self._name))
        return scattered

    def start_rotate(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to send `tensor` to the next rank of the group and to receive the previous rank's, of the same shape.

        Every rank takes part: the pairs (r, r + 1 mod size) together are one permutation, which on Neuron is one
        collective-permute. Gloo has no such collective, so here it is a send and a receive (eager mode only).

        Returns:
            A function that waits for both and returns the received tensor. Do not write to `tensor` before.
        """
        if self.size == 1:
            return lambda: tensor
        sent = tensor.contiguous()
        received = torch.empty_like(sent)
        following, previous = (self.ranks[(self.rank + step) % self.size] for step in (1, -1))
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, following, self.process_group),
                dist.P2POp(dist.irecv, received, previous, self.process_group),
            ]
        )

        def wait() -> torch.Tensor:
            for work in works:
                work.wait()
            return received

        return wait

    @property
    def _name(self) -> str:
        assert self.process_group is not None
        return self.process_group.group_name


class _State:
    topology: Topology | None = None
    groups: dict[Axis, AxisGroup] = {}  # noqa: RUF012 - one state a process, replaced as a whole


def initialize_parallel(topology: Topology) -> None:
    """Make the groups of every axis on an initialised `torch.distributed` world.

    Collective: every rank calls it with the same topology. A world of one rank needs no `torch.distributed`.

    Raises:
        RuntimeError: already initialised with another topology, or `torch.distributed` is not initialised.
        ValueError: the topology's world size is not that of `torch.distributed`.
    """
    if _State.topology == topology:
        return
    if _State.topology is not None:
        raise RuntimeError(f"parallel groups exist for {_State.topology}; call destroy_parallel() before {topology}")
    rank = 0
    if topology.world_size > 1:
        if not dist.is_initialized():
            raise RuntimeError(f"{topology} needs torch.distributed: call torch.distributed.init_process_group first")
        if dist.get_world_size() != topology.world_size:
            raise ValueError(
                f"{topology} is a world of {topology.world_size} ranks, torch.distributed has {dist.get_world_size()}"
            )
        rank = dist.get_rank()
    install_groups(topology, {axis: _make_group(topology, axis, rank) for axis in AXES})


def _make_group(topology: Topology, axis: Axis, rank: int) -> AxisGroup:
    ranks = topology.group_of(axis, rank)
    if len(ranks) == 1:
        return AxisGroup(axis, ranks)
    # Collective over the world: every rank makes every group, in the same order.
    process_group, _ = dist.new_subgroups_by_enumeration([list(group) for group in topology.groups(axis)])
    return AxisGroup(axis, ranks, ranks.index(rank), process_group)


def install_groups(topology: Topology, groups: dict[Axis, AxisGroup]) -> None:
    """Take over groups that exist already, such as vLLM-Omni's, as the groups of this process."""
    missing = [axis for axis in AXES if axis not in groups]
    if missing:
        raise ValueError(f"no group for {', '.join(missing)}; every axis of {topology} needs one, of size 1 if unused")
    for axis, group in groups.items():
        if group.size != topology.size(axis):
            raise ValueError(f"the {axis} group has {group.size} ranks {list(group.ranks)}; the topology is {topology}")
    _register(topology, groups.values())
    _State.topology, _State.groups = topology, dict(groups)


def destroy_parallel() -> None:
    """Forget the groups. The process groups themselves end with `torch.distributed.destroy_process_group`."""
    _State.topology, _State.groups = None, {}


def get_topology() -> Topology:
    """The topology of this process; one rank where nothing was initialised."""
    return _State.topology or Topology()


def get_group(axis: Axis) -> AxisGroup:
    """This rank's group along `axis`; a group of one where nothing was initialised."""
    return _State.groups.get(axis) or AxisGroup(axis)


def get_world_group() -> dist.ProcessGroup | None:
    """The group of all ranks; None in a world of one."""
    return dist.group.WORLD if get_topology().world_size > 1 else None


def register_replica_groups(tp_size: int, cp_size: int) -> None:
    """Tell the compile backend the full partition behind each group's name (idempotent).

    `install_groups` does this already; models written for AWS's plugin call it under this name.

    Raises:
        ValueError: sizes that are not those of the topology in force.
    """
    topology = get_topology()
    if (tp_size, cp_size) != (topology.tp, topology.cp):
        raise ValueError(f"register_replica_groups(tp_size={tp_size}, cp_size={cp_size}): the topology is {topology}")
    _register(topology, _State.groups.values())


def _register(topology: Topology, groups: Iterable[AxisGroup]) -> None:
    for group in groups:
        if group.process_group is not None:
            partition = [list(ranks) for ranks in topology.groups(group.axis)]
            register_process_group_replica_groups(group.process_group.group_name, partition)
