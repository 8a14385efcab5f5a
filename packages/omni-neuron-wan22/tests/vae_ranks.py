# SPDX-License-Identifier: Apache-2.0
"""Tiled decoding on every rank of a topology. Importable by spawned processes."""

from __future__ import annotations

from pathlib import Path

import torch

from omni_neuron_parallel import Topology, destroy_parallel, get_group, initialize_parallel
from omni_neuron_wan22 import NeuronAutoencoderKLWan, VaeTiling, WanCheckpoint, load_vae

TILING = VaeTiling(32, 32, 24, 24)


def make_latents(frames: int, height: int, width: int) -> torch.Tensor:
    return torch.randn(1, 16, frames, height, width, generator=torch.Generator().manual_seed(2))


def make_vae(path: str, dtype: torch.dtype = torch.float32) -> NeuronAutoencoderKLWan:
    return load_vae(WanCheckpoint(Path(path)), dtype=dtype)


def decode_on_group(
    path: str, topology: Topology, dtype: torch.dtype, latents: torch.Tensor, tiling: VaeTiling | None
) -> tuple[int, bool | None]:
    """How many tiles this rank decoded, and whether the video is one process's bit for bit (None if there is none)."""
    initialize_parallel(topology)
    try:
        with torch.inference_mode():
            vae, tiles = make_vae(path, dtype), []
            vae.decoder.register_forward_hook(
                lambda module, inputs, options, output: tiles.append(options["first_chunk"]), with_kwargs=True
            )
            video = vae.decode(latents.to(dtype), tiling=tiling, group=get_group("vae_patch"))
            decoded = sum(tiles)
            if video is None:
                return decoded, None
            alone = vae.decode(latents.to(dtype), tiling=tiling or VaeTiling())
            return decoded, video.dtype is dtype and torch.equal(video, alone)
    finally:
        destroy_parallel()
