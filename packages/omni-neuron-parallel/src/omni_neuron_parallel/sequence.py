# SPDX-License-Identifier: Apache-2.0
"""One rank's part of a token sequence that is split over ranks (CP, or TP between its matrix products), and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from omni_neuron_parallel.groups import AxisGroup


@dataclass(frozen=True)
class SequenceShard:
    """The tokens of `rank` among `world` ranks. Every rank holds `shard_length` rows, the last with pads at the end.

    Rank r holds the rows [r · shard_length, (r + 1) · shard_length) of the sequence padded to world · shard_length. All
    is arithmetic on the three numbers, the same on every rank, so no rank has to ask another for its lengths.

    Attributes:
        sequence_length: tokens of the whole sequence, without pads.
        world: number of ranks that share it.
        rank: this rank's position among them.

    Raises:
        ValueError: no token, no rank, or a rank outside the world.
    """

    sequence_length: int
    world: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if self.sequence_length < 1 or self.world < 1:
            raise ValueError(
                f"a sequence of {self.sequence_length} tokens over {self.world} ranks: both are at least 1"
            )
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank {self.rank} is outside 0..{self.world - 1}")

    @property
    def shard_length(self) -> int:
        """Rows on every rank, pads included: ceil(sequence_length / world)."""
        return -(-self.sequence_length // self.world)

    @property
    def start(self) -> int:
        """The first token of this rank; `sequence_length` where the rank holds pads only."""
        return min(self.rank * self.shard_length, self.sequence_length)

    @property
    def end(self) -> int:
        """One past the last token of this rank."""
        return min((self.rank + 1) * self.shard_length, self.sequence_length)

    @property
    def valid_length(self) -> int:
        """Tokens of this rank, pads not counted: the first rows of its shard."""
        return self.end - self.start

    @property
    def num_pad(self) -> int:
        """Pads at the end of this rank's shard."""
        return self.shard_length - self.valid_length

    @property
    def valid_lengths(self) -> tuple[int, ...]:
        """`valid_length` of every rank, in rank order: the key lengths that attention over the blocks needs."""
        return tuple(SequenceShard(self.sequence_length, self.world, rank).valid_length for rank in range(self.world))

    def pad_mask(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Bool `[shard_length]`, True where the row is a pad."""
        return torch.arange(self.shard_length, device=device) >= self.valid_length

    def split(self, tensor: torch.Tensor, dim: int, place: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's rows of a whole tensor: tokens, a rope table, anything with one row a token.

        Args:
            tensor: any shape with `sequence_length` rows along `dim`.
            dim: the tensor's dim of tokens.
            place: `rank` as an int64 tensor `[1]`. With it the rank is data, so that a compiled graph is the same on
                every rank; without it the rank is part of the code, and the result may be a view.

        Returns:
            The same with `shard_length` rows; pads are zero.

        Raises:
            ValueError: another number of rows.
        """
        self._check_rows(tensor, dim, self.sequence_length, "the whole sequence")
        if place is None:
            return self._pad(tensor.narrow(dim, self.start, self.valid_length), dim)
        if self.world == 1:
            return tensor
        dim %= tensor.dim()
        padded = _append_zeros(tensor, self.shard_length * self.world - self.sequence_length, dim)
        return padded.unflatten(dim, (self.world, self.shard_length)).index_select(dim, place).squeeze(dim)

    def gather(self, tensor: torch.Tensor, dim: int, group: AxisGroup) -> torch.Tensor:
        """The whole tensor from every rank's shard, pads dropped, the same on every rank. Collective over `group`.

        Args:
            tensor: any shape with `shard_length` rows along `dim`.
            dim: the tensor's dim of tokens.
            group: the group whose ranks hold the shards.

        Raises:
            ValueError: another number of rows, or a group in which this rank is not `rank` of `world`.
        """
        if (group.size, group.rank) != (self.world, self.rank):
            raise ValueError(
                f"the shard is {self.rank} of {self.world}, this rank is {group.rank} of {group.size} in the "
                f"{group.axis} group"
            )
        self._check_rows(tensor, dim, self.shard_length, "one shard")
        return group.all_gather(tensor, dim).narrow(dim, 0, self.sequence_length)

    def _pad(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return _append_zeros(tensor, self.num_pad, dim)

    def _check_rows(self, tensor: torch.Tensor, dim: int, rows: int, meaning: str) -> None:
        if tensor.shape[dim] != rows:
            raise ValueError(
                f"dim {dim} of a tensor {tuple(tensor.shape)} has {tensor.shape[dim]} rows, not {rows} ({meaning})"
            )


@dataclass(frozen=True)
class SequenceParallel:
    """The tokens between tensor-parallel operations, split over the TP ranks (Korthikanti et al. 2022, section 4.2.2).

    Norms, residuals and whatever else treats each token alone work on a rank's part; `gather` precedes a
    column-parallel layer; a row-parallel one with `sequence_parallel` ends in `reduce_scatter`. The two move as many
    bytes as the all-reduce that they replace, and a rank holds 1 / tp of the tokens between them. Parts are those of
    `SequenceShard`, so the last ones may end in pads, which `gather` drops: nothing that mixes tokens sees one. In a
    group of one everything is the identity, which is how a model switches it off.

    Attributes:
        sequence_length: tokens, without pads.
        group: the ranks that share them.
    """

    sequence_length: int
    group: AxisGroup

    @property
    def shard(self) -> SequenceShard:
        """This rank's part."""
        return SequenceShard(self.sequence_length, self.group.size, self.group.rank)

    def split(self, hidden: torch.Tensor, dim: int = 1, place: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's part of all tokens that every rank holds; `place` as in `SequenceShard`. No communication."""
        return self.shard.split(hidden, dim, place)

    def gather(self, hidden: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """All tokens, without pads, from every rank's part. Collective over the group."""
        return self.shard.gather(hidden, dim, self.group)

    def reduce_scatter(self, partial: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This rank's part of the sum over the group of `partial`, all tokens; pads are zero. Collective over it."""
        shard = self.shard
        pads = shard.shard_length * shard.world - self.sequence_length
        return self.group.reduce_scatter(_append_zeros(partial, pads, dim), dim)


def _append_zeros(tensor: torch.Tensor, rows: int, dim: int) -> torch.Tensor:
    if rows == 0:
        return tensor
    trailing_dims = tensor.dim() - 1 - dim % tensor.dim()
    return F.pad(tensor, [0, 0] * trailing_dims + [0, rows])
