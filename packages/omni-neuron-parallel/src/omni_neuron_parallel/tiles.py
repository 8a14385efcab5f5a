# SPDX-License-Identifier: Apache-2.0
"""A picture cut into overlapping tiles of one shape, their shares among ranks, and the blending back into one picture.

All of it is arithmetic on sizes, the same on every rank, so no rank has to ask another what it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import torch


@dataclass(frozen=True)
class TilePlan:
    """The tiles of a picture that a network maps to another size, such as a decoder (× 8) or an encoder (÷ 8).

    Along each axis tiles start at 0, stride, 2 · stride, …; the last one is pulled back to end with the picture. So all
    have one shape, which a compiler needs, their union covers the picture, and no tile lies within another. Make plans
    with `for_size`.

    Attributes:
        size: input height and width.
        tile: height and width of every input tile, at most the picture's.
        stride: distance between input tiles, the last one excepted.
        scale: output size / input size.
    """

    size: tuple[int, int]
    tile: tuple[int, int]
    stride: tuple[int, int]
    scale: Fraction

    @classmethod
    def for_size(
        cls,
        height: int,
        width: int,
        *,
        tile: tuple[int, int],
        stride: tuple[int, int],
        scale: Fraction | int = 1,
    ) -> TilePlan:
        """The plan for an input picture.

        Args:
            height, width: the input's, in its own units: latent positions for a decoder, pixels for an encoder.
            tile: height and width of a tile, in the same units. A picture smaller than a tile has one of its own size.
            stride: distance between tiles, at most the tile; the difference is the overlap, which is blended.
            scale: output size / input size, such as 8 or `Fraction(1, 8)`.

        Raises:
            ValueError: sizes below 1, a stride larger than the tile, or a size, tile or stride that `scale` does not
                map to a whole number (with 1/8 all are multiples of 8, and therefore every tile's origin).
        """
        scale = Fraction(scale)
        if scale <= 0:
            raise ValueError(f"scale = {scale}: it must be positive")
        for axis, size, tile_size, stride_size in zip(("height", "width"), (height, width), tile, stride, strict=True):
            named = {axis: size, f"tile {axis}": tile_size, f"stride along the {axis}": stride_size}
            for name, value in named.items():
                if value < 1 or value % scale.denominator:
                    multiples = f"positive multiples of {scale.denominator}"
                    raise ValueError(f"{name} = {value}: with scale {scale} valid values are {multiples}")
            if stride_size > tile_size:
                raise ValueError(
                    f"stride along the {axis} = {stride_size} would leave gaps between tiles of {tile_size}; "
                    f"valid values are {scale.denominator} to {tile_size}"
                )
        clipped = (min(tile[0], height), min(tile[1], width))
        return cls((height, width), clipped, (min(stride[0], clipped[0]), min(stride[1], clipped[1])), scale)

    @property
    def rows(self) -> tuple[int, ...]:
        """The first input row of each row of tiles."""
        return self._origins(0)

    @property
    def columns(self) -> tuple[int, ...]:
        """The first input column of each column of tiles."""
        return self._origins(1)

    @property
    def count(self) -> int:
        """Number of tiles."""
        return len(self.rows) * len(self.columns)

    @property
    def origins(self) -> tuple[tuple[int, int], ...]:
        """First input row and column of every tile, row by row: the order in which tiles are numbered."""
        return tuple((row, column) for row in self.rows for column in self.columns)

    @property
    def output_size(self) -> tuple[int, int]:
        """Height and width of the whole output."""
        return self._scaled(self.size[0]), self._scaled(self.size[1])

    @property
    def output_tile(self) -> tuple[int, int]:
        """Height and width of every output tile."""
        return self._scaled(self.tile[0]), self._scaled(self.tile[1])

    @property
    def output_rows(self) -> tuple[int, ...]:
        """The first output row of each row of tiles."""
        return tuple(self._scaled(row) for row in self.rows)

    @property
    def output_columns(self) -> tuple[int, ...]:
        """The first output column of each column of tiles."""
        return tuple(self._scaled(column) for column in self.columns)

    def cut(self, inputs: torch.Tensor, index: int) -> torch.Tensor:
        """Tile `index` of `[…, height, width]`, contiguous.

        Raises:
            ValueError: inputs of another size.
        """
        if tuple(inputs.shape[-2:]) != self.size:
            raise ValueError(f"the plan is for inputs of {self.size}; a tensor {tuple(inputs.shape)} is given")
        row, column = self.origins[index]
        return inputs[..., row : row + self.tile[0], column : column + self.tile[1]].contiguous()

    def _origins(self, axis: int) -> tuple[int, ...]:
        last = self.size[axis] - self.tile[axis]
        return (*range(0, last, self.stride[axis]), last)

    def _scaled(self, length: int) -> int:
        return int(length * self.scale)


def assign_tiles(plan: TilePlan, ranks: int) -> tuple[tuple[int, ...], ...]:
    """The numbers of each rank's tiles: tile i belongs to rank i mod ranks.

    All tiles have one area, so the largest share over the mean one is ceil(n / ranks) · ranks / n for n tiles, the
    least that whole tiles allow: at most 1.5 from n = ranks up, except where ranks < n < 4/3 · ranks. With more ranks
    than tiles, the last ranks have none.

    Raises:
        ValueError: no rank.
    """
    if ranks < 1:
        raise ValueError(f"{plan.count} tiles over {ranks} ranks: at least 1 is needed")
    return tuple(tuple(range(rank, plan.count, ranks)) for rank in range(ranks))


def stitch_tiles(plan: TilePlan, tiles: Sequence[torch.Tensor], output: torch.Tensor) -> None:
    """Blend output tiles into the whole picture.

    Tile by tile, row by row: first over the overlap with the tile above, then over the overlap with the tile to the
    left, both as they are after their own blending. Along an overlap of L pixels the weight of the later tile at pixel
    i is i / L. This is the order and these are the weights of diffusers' tiled VAEs. A last tile that was pulled back
    overlaps its neighbour by more than the others do, and blends over all of that: the neighbour's weight still falls
    from 1 to 1 / L, so nothing jumps, also where three tiles meet.

    Args:
        plan: the plan that the tiles were cut by.
        tiles: all of them, in the plan's order, `[…, *plan.output_tile]`. Overwritten.
        output: `[…, *plan.output_size]`; every element is written.

    Raises:
        ValueError: another number of tiles than the plan's.
    """
    if len(tiles) != plan.count:
        raise ValueError(f"{len(tiles)} tiles for a plan of {plan.count}")
    height, width = plan.output_tile
    tops, lefts = plan.output_rows, plan.output_columns
    overlaps_above = [0, *(top + height - below for top, below in pairwise(tops))]
    overlaps_left = [0, *(left + width - right for left, right in pairwise(lefts))]
    for i, top in enumerate(tops):
        for j, left in enumerate(lefts):
            index = i * len(lefts) + j
            tile = tiles[index]
            if i > 0:
                _blend(tiles[index - len(lefts)], tile, overlaps_above[i], dim=-2)
            if j > 0:
                _blend(tiles[index - 1], tile, overlaps_left[j], dim=-1)
            # What the next tiles cover is theirs: they hold this tile's part in their blended overlap.
            bottom = tops[i + 1] if i + 1 < len(tops) else top + height
            right = lefts[j + 1] if j + 1 < len(lefts) else left + width
            output[..., top:bottom, left:right] = tile[..., : bottom - top, : right - left]


def _blend(before: torch.Tensor, after: torch.Tensor, overlap: int, dim: int) -> None:
    """Write the blend of the end of `before` and the start of `after` to the start of `after`."""
    start = after.narrow(dim, 0, overlap)
    end = before.narrow(dim, before.shape[dim] - overlap, overlap)
    # Weights to float64, then rounded once; low-precision tiles are blended in float32.
    ramp = torch.arange(overlap, dtype=torch.float64, device=after.device) / overlap
    ramp = ramp.unflatten(0, (overlap, 1)) if dim == -2 else ramp
    dtype = torch.promote_types(after.dtype, torch.float32)
    start.copy_(end * (1 - ramp).to(dtype) + start * ramp.to(dtype))
