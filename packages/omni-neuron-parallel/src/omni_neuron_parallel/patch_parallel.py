# SPDX-License-Identifier: Apache-2.0
"""Tiles of a video decoded or encoded on several ranks and stitched on the first one, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from omni_neuron_parallel.collectives import collective_step
from omni_neuron_parallel.groups import AxisGroup
from omni_neuron_parallel.tiles import TilePlan, assign_tiles, stitch_tiles

MAX_GATHER_BYTES = 256 * 1024**2


def run_tiles(
    inputs: torch.Tensor,
    compute: Callable[[torch.Tensor], Iterable[torch.Tensor]],
    plan: TilePlan,
    *,
    channels: int,
    frames: int,
    dtype: torch.dtype,
    group: AxisGroup | None = None,
    max_gather_bytes: int = MAX_GATHER_BYTES,
) -> torch.Tensor | None:
    """Compute every tile of `inputs` on the ranks of `group` and stitch them on its first rank.

    Each rank computes its tiles one after the other and keeps them on the host. Then all frames go to the first rank in
    pieces: a run of frames of every tile, as many frames as `max_gather_bytes` allows. So the first rank holds, besides
    the output, its own tiles and one piece. All sizes follow from the arguments. The result is that of one process, bit
    for bit, where one tile computes alike on every rank.

    Collective over `group`, if that holds global rank 0: every rank of it calls this with the same arguments. Ranks of
    other groups return None at once and compute nothing.

    Args:
        inputs: `[B, C, T, H, W]`, on any device; H and W are the plan's.
        compute: takes a tile `[B, C, T, h, w]`, contiguous, on the device of `inputs`, and gives the frames of its
            output in chunks `[B, channels, n, h', w']` on any device, in order, n as it likes.
        plan: the tiles; its scale maps h, w to h', w'.
        channels: of the output.
        frames: of the output.
        dtype: of the output.
        group: the ranks that share the tiles; None computes them all here.
        max_gather_bytes: the most that the first rank receives at a time, its own part included.

    Returns:
        On the first rank of the group `[B, channels, frames, H', W']` of `dtype` on the host, elsewhere None.

    Raises:
        CollectiveError: another rank of the group died or took longer than the group's deadline.
        ValueError: `max_gather_bytes` is less than one frame of every tile, inputs that are not the plan's, or chunks
            that do not make up `frames` frames.
    """
    group = group or AxisGroup("vae_patch")
    if 0 not in group.ranks:
        return None
    assignment = assign_tiles(plan, group.size)
    run = _frames_a_piece(inputs.shape[0] * channels, plan, len(assignment[0]) * group.size, dtype, max_gather_bytes)
    # One shape on every rank, as a gather needs it. Ranks with fewer tiles than the first send zeros in the last place.
    shape = (len(assignment[0]), inputs.shape[0], channels, frames, *plan.output_tile)
    own = torch.zeros(shape, dtype=dtype)
    for tile, index in zip(own, assignment[group.rank], strict=False):
        _fill(tile, compute(plan.cut(inputs, index)))

    output = torch.empty(*shape[1:4], *plan.output_size, dtype=dtype) if group.rank == 0 else None
    for first in range(0, frames, run):
        piece = own[:, :, :, first : first + run].contiguous()
        with collective_step(f"gathering {piece.shape[3]} frames of tiles from frame {first} of {frames}"):
            gathered = group.gather_to_first(piece)
        if gathered is not None and output is not None:
            tiles = {
                index: tile
                for indices, part in zip(assignment, gathered, strict=True)
                for index, tile in zip(indices, part, strict=False)
            }
            stitch_tiles(plan, [tiles[index] for index in range(plan.count)], output[:, :, first : first + run])
    return output


def _frames_a_piece(planes: int, plan: TilePlan, places: int, dtype: torch.dtype, max_gather_bytes: int) -> int:
    """How many frames of `places` tiles, of `planes` batch entries and channels, fit into `max_gather_bytes`."""
    height, width = plan.output_tile
    frame_bytes = places * planes * height * width * dtype.itemsize
    if max_gather_bytes < frame_bytes:
        raise ValueError(
            f"max_gather_bytes = {max_gather_bytes}: one frame of {places} tiles of {height}×{width} takes "
            f"{frame_bytes} bytes, the least that is valid"
        )
    return max_gather_bytes // frame_bytes


def _fill(tile: torch.Tensor, chunks: Iterable[torch.Tensor]) -> None:
    """Copy chunks of frames into `tile`, `[B, C, T, h, w]` on the host."""
    frames, end = tile.shape[2], 0
    for chunk in chunks:
        first, end = end, end + chunk.shape[2]
        expected = (*tile.shape[:2], chunk.shape[2], *tile.shape[3:])
        if tuple(chunk.shape) != expected or end > frames:
            raise ValueError(
                f"a chunk {tuple(chunk.shape)} after {first} frames does not fit an output tile {tuple(tile.shape)}"
            )
        tile[:, :, first:end].copy_(chunk)
    if end != frames:
        raise ValueError(f"a tile's chunks have {end} frames; frames = {frames}")
