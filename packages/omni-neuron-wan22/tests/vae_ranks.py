# SPDX-License-Identifier: Apache-2.0
"""Small VAEs of both kinds, and tiled encoding and decoding on every rank of a topology. For spawned processes, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from omni_neuron_parallel import Topology, destroy_parallel, get_group, initialize_parallel
from omni_neuron_wan22 import NeuronAutoencoderKLWan, VaeConfig, VaeTiling, WanCheckpoint, load_vae

TILING = VaeTiling(32, 32, 24, 24)
# Fields of both packages' configurations: all of Wan's layers, with few channels.
SMALL_VAES: dict[str, dict[str, Any]] = {
    "2.1": {"base_dim": 8, "z_dim": 4, "num_res_blocks": 1},
    "2.2": {
        "base_dim": 8,
        "decoder_base_dim": 12,
        "z_dim": 6,
        "num_res_blocks": 1,
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": 16,
    },
}


def make_latents(frames: int, height: int, width: int, channels: int = 16) -> torch.Tensor:
    return torch.randn(1, channels, frames, height, width, generator=torch.Generator().manual_seed(2))


def make_video(frames: int, height: int, width: int) -> torch.Tensor:
    return 2 * torch.rand(1, 3, frames, height, width, generator=torch.Generator().manual_seed(6)) - 1


def make_vae(path: str, dtype: torch.dtype = torch.float32) -> NeuronAutoencoderKLWan:
    return load_vae(WanCheckpoint(Path(path)), dtype=dtype)


def small_vae(version: str) -> NeuronAutoencoderKLWan:
    """With the encoder and random weights, the same in every process, that keep activations near 1."""
    settings = SMALL_VAES[version]
    statistics = {"latents_mean": (0.5,) * settings["z_dim"], "latents_std": (2.0,) * settings["z_dim"]}
    vae = NeuronAutoencoderKLWan(VaeConfig(**settings, **statistics), encoder=True)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in vae.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            fan_in = parameter[0].numel()
            parameter.copy_(
                noise / fan_in**0.5 if name.endswith("weight") else 0.1 * noise + float(name.endswith("gamma"))
            )
    return vae


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


def small_vaes_on_group(topology: Topology) -> list[tuple[int, int, bool | None]]:
    """Of each small VAE: tiles that this rank encoded and decoded, and whether all bits are one process's."""
    initialize_parallel(topology)
    try:
        with torch.inference_mode():
            return [_both_ways(small_vae(version)) for version in SMALL_VAES]
    finally:
        destroy_parallel()


def _both_ways(vae: NeuronAutoencoderKLWan) -> tuple[int, int, bool | None]:
    """Four tiles of a video and of latents."""
    scale, group = vae.config.scale_factor_spatial, get_group("vae_patch")
    video, latents = make_video(5, 6 * scale, 5 * scale), make_latents(2, 6, 5, vae.config.z_dim)
    vae.enable_tiling(VaeTiling(4 * scale, 4 * scale, 3 * scale, 3 * scale))
    tiles: list[torch.nn.Module] = []
    hooks = [
        half.register_forward_hook(
            lambda module, inputs, options, output: tiles.append(module) if options["first_chunk"] else None,
            with_kwargs=True,
        )
        for half in (vae.encoder, vae.decoder)
    ]
    encoded, decoded = vae.encode(video, group=group), vae.decode(latents, group=group)
    for hook in hooks:
        hook.remove()
    counts = tiles.count(vae.encoder), tiles.count(vae.decoder)
    if encoded is None or decoded is None:
        return *counts, None if encoded is decoded else False
    return *counts, torch.equal(encoded, vae.encode(video)) and torch.equal(decoded, vae.decode(latents))
