# SPDX-License-Identifier: Apache-2.0
"""The full partition behind each process group's name, as the collectives of a compiled graph state it."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from omni_neuron_runtime.compile.errors import CompileError

Partition = tuple[tuple[int, ...], ...]

_partitions: dict[str, Partition] = {}


def check_covers(group_name: str, groups: Sequence[Sequence[int]]) -> Partition:
    """The groups as tuples, once it is sure that together they hold each of 0, 1, … exactly once.

    Raises:
        ValueError: they do not.
    """
    ranks = [rank for group in groups for rank in group]
    if not ranks or sorted(ranks) != list(range(len(ranks))):
        raise ValueError(
            f"replica groups {[list(group) for group in groups]} of process group {group_name!r} do not hold each rank "
            f"of the world exactly once; valid are groups that together make 0, 1, … world size − 1"
        )
    return tuple(tuple(group) for group in groups)


def register_partition(group_name: str, partition: Partition) -> None:
    """Remember the partition of a process group for the backends of this process; replaces an earlier one."""
    _partitions[group_name] = partition


def partition_of(group_name: str) -> Partition:
    """The partition that a process group belongs to.

    Each group is in ascending order, whatever the order of a physical mesh: that is c10d's order of host tensors, which
    these backends compute with.

    Raises:
        CompileError: the group is neither registered nor the whole world, or it leaves out ranks of the world.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    partition = _partitions.get(group_name)
    if partition is None:
        ranks = _ranks_of(group_name)
        if ranks is None or len(ranks) != world:
            raise CompileError(
                f"process group {group_name!r} (ranks {'unknown' if ranks is None else ranks}) does not cover the "
                f"world of {world} ranks and its partition is not registered; make it with "
                f"omni_neuron_parallel.register_group, or call "
                f"omni_neuron_runtime.register_process_group_replica_groups({group_name!r}, groups) with all groups"
            )
        partition = (tuple(range(world)),)
    covered = sum(len(group) for group in partition)
    if covered != world:
        raise CompileError(
            f"process group {group_name!r} is registered with {[list(group) for group in partition]}, which hold "
            f"{covered} ranks; the world has {world}, and replica groups have to hold each of them exactly once"
        )
    return tuple(tuple(sorted(group)) for group in partition)


def _ranks_of(group_name: str) -> list[int] | None:
    if not dist.is_initialized():
        return None
    for group, name in dist.distributed_c10d._world.pg_names.items():
        if name == group_name:
            return sorted(dist.get_process_group_ranks(group))
    return None
