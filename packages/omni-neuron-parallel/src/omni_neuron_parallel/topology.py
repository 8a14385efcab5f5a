# SPDX-License-Identifier: Apache-2.0
"""The rank layout: which global rank stands where on the tensor, context and CFG axes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

Axis = Literal["tp", "cp", "cfg"]
AXES: tuple[Axis, ...] = get_args(Axis)


@dataclass(frozen=True)
class Topology:
    """The sizes of the three axes; everything else follows from them.

    Global rank = cfg · (tp_size · cp_size) + cp · tp_size + tp: TP varies fastest, so that the ranks which talk most
    are neighbours. This is vLLM-Omni's order `tp-sp-pp-cfg-dp` with pipeline and data parallelism of size 1.

    Attributes:
        tp: ranks that share each weight matrix (tensor parallel).
        cp: ranks that share the token sequence (context parallel; vLLM-Omni's `ring_degree`).
        cfg: ranks that share the branches of classifier-free guidance.

    Raises:
        ValueError: a size below 1.
    """

    tp: int = 1
    cp: int = 1
    cfg: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if self.size(axis) < 1:
                raise ValueError(f"{axis} = {self.size(axis)}: the size of a parallel axis is at least 1")

    @property
    def world_size(self) -> int:
        """Number of ranks: tp · cp · cfg."""
        return self.tp * self.cp * self.cfg

    def size(self, axis: Axis) -> int:
        """The number of ranks along `axis`."""
        sizes: dict[Axis, int] = {"tp": self.tp, "cp": self.cp, "cfg": self.cfg}
        return sizes[axis]

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Where global `rank` stands on each axis."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size} ({self})")
        return {
            "tp": rank % self.tp,
            "cp": rank // self.tp % self.cp,
            "cfg": rank // (self.tp * self.cp),
        }

    def rank(self, *, tp: int = 0, cp: int = 0, cfg: int = 0) -> int:
        """The global rank at these coordinates."""
        for axis, value, size in (("tp", tp, self.tp), ("cp", cp, self.cp), ("cfg", cfg, self.cfg)):
            if not 0 <= value < size:
                raise ValueError(f"{axis} coordinate {value} is outside 0..{size - 1} ({self})")
        return cfg * self.tp * self.cp + cp * self.tp + tp

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Every group of `axis` in the world: a partition of all ranks, each group in ascending order.

        A collective on Neuron is compiled with the groups of the *whole* world, not with the caller's own group alone.
        """
        return tuple(self._groups(axis))

    def _groups(self, axis: Axis) -> Iterator[tuple[int, ...]]:
        stride = {"tp": 1, "cp": self.tp, "cfg": self.tp * self.cp}[axis]
        for first in range(self.world_size):
            if self.coordinates(first)[axis] == 0:
                yield tuple(first + stride * index for index in range(self.size(axis)))

    def group_of(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """The group of `axis` that holds global `rank`."""
        return next(group for group in self.groups(axis) if rank in group)

    def __str__(self) -> str:
        return f"TP{self.tp}×CP{self.cp}×CFG{self.cfg}"


def valid_tensor_parallel_sizes(num_heads: int, limit: int = 64) -> list[int]:
    """The TP sizes up to `limit` that give every rank the same number of whole attention heads."""
    return [size for size in range(1, min(num_heads, limit) + 1) if num_heads % size == 0]
