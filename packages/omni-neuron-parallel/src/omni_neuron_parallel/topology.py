# SPDX-License-Identifier: Apache-2.0
"""The rank layout: which global rank stands where on the tensor, context and CFG axes, and who decodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

MeshAxis = Literal["tp", "cp", "cfg"]
Axis = Literal["tp", "cp", "cfg", "vae_patch"]
MESH_AXES: tuple[MeshAxis, ...] = get_args(MeshAxis)
AXES: tuple[Axis, ...] = get_args(Axis)
Partition = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Topology:
    """The sizes of the axes, and the rank at each place; everything else follows from them.

    Place = cfg · (tp_size · cp_size) + cp · tp_size + tp: TP varies fastest, so that the ranks which talk most are
    neighbours. This is vLLM-Omni's order `tp-sp-pp-cfg-dp` with pipeline and data parallelism of size 1. A rank stands
    at the place of its own number, unless `placement` says otherwise (`place_on_mesh` does for some layouts of trn2).

    `vae_patch` is no axis of the mesh: its groups cut the same world into blocks of consecutive ranks, whatever the
    placement. The block that begins at rank 0 decodes; the others exist because a collective on Neuron is compiled with
    groups that hold every rank.

    Attributes:
        tp: ranks that share each weight matrix (tensor parallel).
        cp: ranks that share the token sequence (context parallel; vLLM-Omni's `ring_degree`).
        cfg: ranks that share the branches of classifier-free guidance.
        vae_patch: ranks that share the tiles of the VAE; divides the world.
        placement: the global rank at each place; None for place = rank.

    Raises:
        ValueError: a size below 1, a `vae_patch` that does not divide the world, a placement that is not a permutation.
    """

    tp: int = 1
    cp: int = 1
    cfg: int = 1
    vae_patch: int = 1
    placement: tuple[int, ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for axis in AXES:
            if self.size(axis) < 1:
                raise ValueError(f"{axis} = {self.size(axis)}: the size of a parallel axis is at least 1")
        if self.world_size % self.vae_patch:
            raise ValueError(
                f"vae_patch = {self.vae_patch} does not divide the world of {self.world_size} ranks "
                f"(tp {self.tp} · cp {self.cp} · cfg {self.cfg}); valid are {_listed(divisors(self.world_size))}"
            )
        if self.placement is not None:
            in_order = tuple(range(self.world_size))
            if tuple(sorted(self.placement)) != in_order:
                raise ValueError(
                    f"placement {self.placement} does not hold each of the ranks 0..{self.world_size - 1} exactly once"
                )
            object.__setattr__(self, "placement", None if self.placement == in_order else tuple(self.placement))

    @property
    def world_size(self) -> int:
        """Number of ranks: tp · cp · cfg."""
        return self.tp * self.cp * self.cfg

    def size(self, axis: Axis) -> int:
        """The number of ranks along `axis`."""
        sizes: dict[Axis, int] = {"tp": self.tp, "cp": self.cp, "cfg": self.cfg, "vae_patch": self.vae_patch}
        return sizes[axis]

    def coordinates(self, rank: int) -> dict[MeshAxis, int]:
        """Where global `rank` stands on each axis of the mesh."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size} ({self})")
        place = rank if self.placement is None else self.placement.index(rank)
        return {
            "tp": place % self.tp,
            "cp": place // self.tp % self.cp,
            "cfg": place // (self.tp * self.cp),
        }

    def rank(self, *, tp: int = 0, cp: int = 0, cfg: int = 0) -> int:
        """The global rank at these coordinates."""
        for axis, value, size in (("tp", tp, self.tp), ("cp", cp, self.cp), ("cfg", cfg, self.cfg)):
            if not 0 <= value < size:
                raise ValueError(f"{axis} coordinate {value} is outside 0..{size - 1} ({self})")
        return self._rank_at(cfg * self.tp * self.cp + cp * self.tp + tp)

    def _rank_at(self, place: int) -> int:
        return place if self.placement is None else self.placement[place]

    def groups(self, axis: Axis) -> Partition:
        """Every group of `axis` in the world: a partition of all ranks, each group in the order of its coordinate.

        Ascending, except that a placement may turn a group of the mesh round, such as (12, 8). A collective on Neuron
        is compiled with the groups of the *whole* world, not with the caller's own group alone.
        """
        if axis == "vae_patch":
            return consecutive_partition(self.vae_patch, self.world_size)
        return tuple(self._mesh_groups(axis))

    def _mesh_groups(self, axis: MeshAxis) -> Iterator[tuple[int, ...]]:
        stride = {"tp": 1, "cp": self.tp, "cfg": self.tp * self.cp}[axis]
        size = self.size(axis)
        for first in range(self.world_size):
            if first // stride % size == 0:
                yield tuple(self._rank_at(first + stride * index) for index in range(size))

    def group_of(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """The group of `axis` that holds global `rank`."""
        return next(group for group in self.groups(axis) if rank in group)

    def decodes(self, rank: int) -> bool:
        """Whether global `rank` takes part in VAE decoding and encoding: one of the first `vae_patch` ranks."""
        return rank < self.vae_patch

    def problems(
        self, *, num_heads: int | None = None, num_tokens: int | None = None, num_devices: int | None = None
    ) -> list[str]:
        """What speaks against this layout, in sentences that name setting, value and valid values; empty where nothing.

        Args:
            num_heads: attention heads, which are never split: TP must divide them.
            num_tokens: length of the token sequence. CP need not divide it (shards are padded), but a CP rank without
                any token would only wait.
            num_devices: devices there are; None leaves that, or either of the others, unchecked.
        """
        found = []
        if num_heads is not None and num_heads % self.tp:
            valid = _listed(valid_tensor_parallel_sizes(num_heads))
            found.append(f"tp = {self.tp} does not divide {num_heads} attention heads: use {valid}")
        if num_tokens is not None and self.cp > num_tokens:
            found.append(f"cp = {self.cp} is more than the {num_tokens} tokens of the sequence: use 1 to {num_tokens}")
        if num_devices is not None and self.world_size > num_devices:
            found.append(
                f"tp {self.tp} · cp {self.cp} · cfg {self.cfg} = {self.world_size} ranks are more than the "
                f"{num_devices} devices: use sizes whose product is at most {num_devices}"
            )
        return found

    def check(
        self, *, num_heads: int | None = None, num_tokens: int | None = None, num_devices: int | None = None
    ) -> None:
        """Refuse a layout that has `problems`.

        Raises:
            ValueError: all of them.
        """
        found = self.problems(num_heads=num_heads, num_tokens=num_tokens, num_devices=num_devices)
        if found:
            raise ValueError(f"{self}: " + "; ".join(found))

    def __str__(self) -> str:
        vae = f", VAE patch {self.vae_patch}" if self.vae_patch > 1 else ""
        return f"TP{self.tp}×CP{self.cp}×CFG{self.cfg}{vae}"


def valid_tensor_parallel_sizes(num_heads: int, limit: int = 64) -> list[int]:
    """The TP sizes up to `limit` that give every rank the same number of whole attention heads."""
    return [size for size in divisors(num_heads) if size <= limit]


def divisors(number: int) -> list[int]:
    """The divisors of a positive `number`, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]


def consecutive_partition(size: int, world_size: int) -> Partition:
    """The world cut into groups of `size` consecutive ranks (`size` divides the world)."""
    return tuple(tuple(range(first, first + size)) for first in range(0, world_size, size))


def check_partition(name: str, partition: Sequence[Sequence[int]], world_size: int) -> Partition:
    """`partition` as tuples, once it is one: groups of one size that hold each rank of the world exactly once.

    Raises:
        ValueError: ranks that are missing, doubled or not of this world, or groups of unequal sizes.
    """
    groups = tuple(tuple(group) for group in partition)
    ranks = [rank for group in groups for rank in group]
    faults = {
        "missing ranks": [rank for rank in range(world_size) if rank not in ranks],
        "ranks in more than one place": sorted({rank for rank in ranks if ranks.count(rank) > 1}),
        "ranks outside the world": sorted({rank for rank in ranks if not 0 <= rank < world_size}),
        "groups of unequal sizes": sorted({len(group) for group in groups}) if len(set(map(len, groups))) > 1 else [],
    }
    found = [f"{fault} {values}" for fault, values in faults.items() if values]
    if found:
        raise ValueError(
            f"the groups of {name!r} are no partition of a world of {world_size}: {'; '.join(found)}. Valid are groups "
            f"of one size that hold each of the ranks 0..{world_size - 1} exactly once"
        )
    return groups


def expand_to_partition(ranks: Sequence[int], world_size: int) -> Partition:
    """A partition of the world whose first group is `ranks`, for a collective that only they need.

    The other groups are `ranks` moved up, which keeps their shape on the fabric, where such copies fill the world; else
    the remaining ranks in ascending order, cut into groups of the same size.

    Raises:
        ValueError: a rank that is doubled or outside the world, or a number of ranks that does not divide the world.
    """
    group = tuple(ranks)
    if not group or len(set(group)) < len(group) or not set(group) <= set(range(world_size)):
        raise ValueError(f"the ranks {list(group)} are not one or more different ranks of a world of {world_size}")
    if world_size % len(group):
        raise ValueError(
            f"a group of {len(group)} ranks cannot be one of equal groups in a world of {world_size}; valid sizes are "
            f"{_listed(divisors(world_size))}"
        )
    rest = [rank for rank in range(world_size) if rank not in group]
    copies, left = [group], set(rest)
    while left:
        copy = tuple(rank + min(left) - min(group) for rank in group)
        if not left.issuperset(copy):
            return (group, *(tuple(rest[first : first + len(group)]) for first in range(0, len(rest), len(group))))
        copies.append(copy)
        left -= set(copy)
    return tuple(copies)


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
