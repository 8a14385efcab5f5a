# SPDX-License-Identifier: Apache-2.0
"""A toy causal encoder and decoder, and runs of them over tiles on every rank. Importable by spawned processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parallel_ranks import random
from torch import nn

from omni_neuron_parallel import AxisGroup, TilePlan, get_group, run_tiles

CHANNELS, LATENT_CHANNELS = 3, 4


class ToyCodec(nn.Module):
    """Frames (1, then 4 a chunk) to latents 8 times smaller and back; each chunk sees the one before."""

    def __init__(self) -> None:
        super().__init__()
        widths = (CHANNELS, 5, 6, LATENT_CHANNELS)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in pairwise(widths))
        self.up = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(reversed(widths)))
        for seed, parameter in enumerate(self.parameters()):
            parameter.data.copy_(0.4 * random(*parameter.shape, seed=seed))

    def encode(self, frames: torch.Tensor) -> Iterator[torch.Tensor]:
        past = torch.zeros(())
        for chunk in (frames[:, :, :1], *frames[:, :, 1:].split(4, dim=2)):
            hidden = chunk.mean(dim=2)
            for layer in self.down:
                hidden = torch.tanh(layer(hidden))
            past = 0.5 * past + hidden
            yield past.unsqueeze(2)

    def decode(self, latents: torch.Tensor) -> Iterator[torch.Tensor]:
        past = torch.zeros(())
        for index, hidden in enumerate(latents.unbind(2)):
            for layer in self.up:
                hidden = torch.tanh(layer(F.interpolate(hidden, scale_factor=2)))
            past = 0.5 * past + hidden
            yield torch.stack([past * (step + 1) for step in range(1 if index == 0 else 4)], dim=2)


@dataclass(frozen=True)
class CountingGroup(AxisGroup):
    """Counts what each gather brings to the first rank."""

    gathered_bytes: list[int] = field(default_factory=list)

    def gather_to_first(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        self.gathered_bytes.append(tensor.nbytes * self.size)
        return super().gather_to_first(tensor)


def run(
    direction: str, size: tuple[int, int], group: AxisGroup | None = None, **options: int
) -> tuple[torch.Tensor | None, int]:
    """The stitched output of a picture of `size` pixels, 17 frames, and the tiles that were computed here."""
    codec, computed = ToyCodec(), []
    decoding = direction == "decode"
    unit = 8 if decoding else 1
    height, width = size[0] // unit, size[1] // unit
    plan = TilePlan.for_size(
        height,
        width,
        tile=(48 // unit, 32 // unit),
        stride=(32 // unit, 24 // unit),
        scale=8 if decoding else Fraction(1, 8),
    )
    inputs = random(2, *((LATENT_CHANNELS, 5) if decoding else (CHANNELS, 17)), height, width, seed=100)
    work: Callable[[torch.Tensor], Iterator[torch.Tensor]] = codec.decode if decoding else codec.encode

    def compute(tile: torch.Tensor) -> Iterator[torch.Tensor]:
        computed.append(tile)
        return work(tile)

    channels, frames = (CHANNELS, 17) if decoding else (LATENT_CHANNELS, 5)
    output = run_tiles(
        inputs, compute, plan, channels=channels, frames=frames, dtype=torch.float32, group=group, **options
    )
    return output, len(computed)


def patch_parallel(direction: str, size: tuple[int, int], max_gather_bytes: int) -> tuple[int, bool | None, list[int]]:
    """Tiles computed here, whether the result is one process's bit for bit (None if there is none), gather sizes."""
    axis_group = get_group("vae_patch")
    group = CountingGroup(axis_group.axis, axis_group.ranks, axis_group.rank, axis_group.process_group)
    output, computed = run(direction, size, group, max_gather_bytes=max_gather_bytes)
    equal = None if output is None else torch.equal(output, run(direction, size)[0])
    return computed, equal, group.gathered_bytes


def gathered_dtype(dtype: torch.dtype) -> bool | None:
    """Tiles of another dtype; the identity, without overlap, so that nothing is rounded."""
    plan = TilePlan.for_size(10, 14, tile=(5, 7), stride=(5, 7))
    inputs = random(1, 2, 3, 10, 14, seed=5).to(dtype)
    output = run_tiles(
        inputs, lambda tile: tile.split(2, 2), plan, channels=2, frames=3, dtype=dtype, group=get_group("vae_patch")
    )
    return None if output is None else output.dtype is dtype and bool((output == inputs).all())


def returns_at_once() -> bool:
    """Ranks outside the block of rank 0, which does not call: computing raises, and a collective has nobody to meet."""

    def compute(tile: torch.Tensor) -> list[torch.Tensor]:
        raise AssertionError("a rank outside the decoding group computes")

    if 0 in get_group("vae_patch").ranks:
        return True
    plan = TilePlan.for_size(8, 8, tile=(4, 4), stride=(4, 4))
    output = run_tiles(
        torch.zeros(1, 1, 1, 8, 8),
        compute,
        plan,
        channels=1,
        frames=1,
        dtype=torch.float32,
        group=get_group("vae_patch"),
    )
    return output is None and dist.is_initialized()
