# SPDX-License-Identifier: Apache-2.0
"""Wan's causal 3-D VAE: video to latents and back, chunk by chunk in time, whole or in tiles, here or on several ranks.

One latent frame at a time is on the device, with the feature cache; input and output wait on the host. So what the
device holds does not depend on the video's length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import overload

import torch
from torch import nn

from omni_neuron_parallel import AxisGroup, run_tiles
from omni_neuron_wan22.config import VaeConfig
from omni_neuron_wan22.vae_decoder import NeuronWanDecoder3d
from omni_neuron_wan22.vae_encoder import NeuronWanEncoder3d
from omni_neuron_wan22.vae_layers import patchify, unpatchify
from vllm_omni_neuron.sdk import VaeTiling


class NeuronAutoencoderKLWan(nn.Module):
    """VAE 2.1 or 2.2. Lives on the ranks that decode only.

    Args:
        config: sizes and the latents' statistics.
        encoder: whether to have the encoder, which text-to-video does without.

    Attributes:
        tiling: how videos are cut into tiles; None, as at first, takes them whole. See `enable_tiling`.
    """

    def __init__(self, config: VaeConfig, *, encoder: bool = False):
        super().__init__()
        self.config = config
        self.tiling: VaeTiling | None = None
        self.decoder = NeuronWanDecoder3d(config)
        self.has_encoder = encoder
        if encoder:
            self.encoder = NeuronWanEncoder3d(config)
        self.requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations."""
        return self.decoder.conv_in.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.decoder.conv_in.weight.device

    def enable_tiling(self, tiling: VaeTiling | None = None) -> None:
        """Encode and decode tile by tile from now on, by default in diffusers' tiles of 256 pixels every 192."""
        self.tiling = tiling or VaeTiling()

    def normalize(self, latents: torch.Tensor) -> torch.Tensor:
        """The VAE's latents to the DiT's of unit variance, in float32: (latents − mean) / std, channel by channel."""
        mean, std = self._statistics(latents.device)
        return (latents.float() - mean) / std

    def denormalize(self, latents: torch.Tensor) -> torch.Tensor:
        """The DiT's unit-variance latents to the VAE's own: latents · std + mean, channel by channel."""
        mean, std = self._statistics(latents.device)
        return (latents.float() * std + mean).to(self.dtype)

    @overload
    def encode(self, video: torch.Tensor, *, tiling: VaeTiling | None = None) -> torch.Tensor: ...
    @overload
    def encode(
        self, video: torch.Tensor, *, tiling: VaeTiling | None = None, group: AxisGroup
    ) -> torch.Tensor | None: ...
    def encode(
        self, video: torch.Tensor, *, tiling: VaeTiling | None = None, group: AxisGroup | None = None
    ) -> torch.Tensor | None:
        """Encode a video to the mode (the mean) of its posterior, whole or in tiles, here or on the ranks of a group.

        What `decode` says of tiles and ranks holds here. (diffusers cuts the video that VAE 2.2 encodes in units of its
        patches: its tiles are twice as large there.)

        Args:
            video: `[B, 3, F, H, W]` within ±1, whole and the same on every rank, on any device; F = 4 n + 1, H and W
                multiples of 8 (VAE 2.2: 16).
            tiling: instead of `self.tiling`. With neither, more than one rank in `group` means `VaeTiling()`.
            group: the ranks that share the tiles; collective over it. None: this process alone.

        Returns:
            The latents `[B, z, n + 1, H / 8, W / 8]` in the VAE's own scale (see `normalize`) and `dtype`, on the host
            of the first rank of the group that holds global rank 0. None on every other rank; those of other groups
            return at once.

        Raises:
            ValueError: a video of another size, or a VAE made without its encoder.
            WanConfigError: a tiling that does not fit the VAE.
        """
        self._check_video(video)
        tiling, group = tiling or self.tiling, group or AxisGroup("vae_patch")
        frames, height, width = video.shape[2:]
        frames = (frames - 1) // self.config.scale_factor_temporal + 1
        # From the host, so that chunks and tiles reach the device in one piece, of one layout and in the VAE's dtype.
        video = video.cpu()
        if tiling is None and group.ranks == (0,):
            return _on_host(self._encode_chunks(video), frames)
        return run_tiles(
            video,
            self._encode_chunks,
            (tiling or VaeTiling()).encoding_plan(height, width, self.config.scale_factor_spatial),
            channels=self.config.z_dim,
            frames=frames,
            dtype=self.dtype,
            group=group,
        )

    @overload
    def decode(self, latents: torch.Tensor, *, tiling: VaeTiling | None = None) -> torch.Tensor: ...
    @overload
    def decode(
        self, latents: torch.Tensor, *, tiling: VaeTiling | None = None, group: AxisGroup
    ) -> torch.Tensor | None: ...
    def decode(
        self, latents: torch.Tensor, *, tiling: VaeTiling | None = None, group: AxisGroup | None = None
    ) -> torch.Tensor | None:
        """Decode latents to a video, whole or in tiles, here or on the ranks of a group.

        Tiles are decoded one after the other, so the feature cache is one tile's. The mid block's attention sees one
        tile instead of the frame: a tiled video is close to, not the same as, the video decoded whole. How many ranks
        share the tiles changes no bit.

        Args:
            latents: `[B, z, T, h, w]` in the VAE's own scale, whole and the same on every rank, on any device.
            tiling: instead of `self.tiling`. With neither, more than one rank in `group` means `VaeTiling()`.
            group: the ranks that share the tiles; collective over it. None: this process alone.

        Returns:
            The video `[B, 3, 4 T − 3, 8 h, 8 w]` (VAE 2.2: 16 h, 16 w) within ±1, in `dtype`, on the host of the first
            rank of the group that holds global rank 0. None on every other rank; those of other groups return at once.

        Raises:
            WanConfigError: a tiling that does not fit the VAE.
        """
        tiling, group = tiling or self.tiling, group or AxisGroup("vae_patch")
        frames, height, width = latents.shape[2:]
        frames = self.config.scale_factor_temporal * (frames - 1) + 1
        latents = latents.cpu()
        video: torch.Tensor | None
        if tiling is None and group.ranks == (0,):
            video = _on_host(self._decode_chunks(latents), frames)
        else:
            video = run_tiles(
                latents,
                self._decode_chunks,
                (tiling or VaeTiling()).decoding_plan(
                    height, width, self.config.scale_factor_spatial, patch=self.config.patch
                ),
                channels=self.config.out_channels,
                frames=frames,
                dtype=self.dtype,
                group=group,
            )
        if video is None:
            return None
        video.clamp_(-1.0, 1.0)
        return video if self.config.patch == 1 else unpatchify(video, self.config.patch)

    def _encode_chunks(self, video: torch.Tensor) -> Iterator[torch.Tensor]:
        """The latent frames of `video` (on the host; whole or a tile of it), one by one."""
        stride = self.config.scale_factor_temporal
        feature_cache: list[torch.Tensor] | None = None
        for first in (0, *range(1, video.shape[2], stride)):
            frames = video[:, :, first : first + stride] if first else video[:, :, :1]
            frames = frames if self.config.patch == 1 else patchify(frames, self.config.patch)
            # Contiguous: the strides of a slice depend on the number of frames, and other strides are another graph.
            chunk = frames.to(self.dtype).contiguous().to(self.device)
            if feature_cache is None:
                feature_cache = self.encoder.empty_feature_cache(chunk)
            latent_frame, feature_cache = self.encoder(chunk, feature_cache, first_chunk=not first)
            yield latent_frame

    def _decode_chunks(self, latents: torch.Tensor) -> Iterator[torch.Tensor]:
        """The frames of each latent frame (on the host) in turn, not yet clamped; VAE 2.2's in patches."""
        feature_cache: list[torch.Tensor] | None = None
        for index in range(latents.shape[2]):
            frame = latents[:, :, index : index + 1].to(self.dtype).contiguous().to(self.device)
            if feature_cache is None:
                feature_cache = self.decoder.empty_feature_cache(frame)
            frames, feature_cache = self.decoder(frame, feature_cache, first_chunk=index == 0)
            yield frames

    def _statistics(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The latents' mean and standard deviation, `[1, z, 1, 1, 1]` float32."""
        statistics = torch.tensor([self.config.latents_mean, self.config.latents_std], dtype=torch.float32)
        mean, std = statistics.to(device)[:, None, :, None, None, None].unbind(0)
        return mean, std

    def _check_video(self, video: torch.Tensor) -> None:
        if not self.has_encoder:
            raise ValueError("this VAE was loaded without its encoder: load_vae(…, encoder=True)")
        config = self.config
        for name, size, multiple, rest in (
            ("frames", video.shape[2], config.scale_factor_temporal, 1),
            ("height", video.shape[3], config.scale_factor_spatial, 0),
            ("width", video.shape[4], config.scale_factor_spatial, 0),
        ):
            if size < 1 or size % multiple != rest:
                more = f" plus {rest}" if rest else ""
                raise ValueError(f"{name} of the video = {size}: valid are multiples of {multiple}{more}")


def _on_host(chunks: Iterable[torch.Tensor], frames: int) -> torch.Tensor:
    """Chunks `[B, C, n, H, W]` joined to `[B, C, frames, H, W]` on the host as they come: none stays on the device."""
    joined: torch.Tensor | None = None
    end = 0
    for chunk in chunks:
        if joined is None:
            joined = torch.empty(*chunk.shape[:2], frames, *chunk.shape[3:], dtype=chunk.dtype)
        first, end = end, end + chunk.shape[2]
        joined[:, :, first:end].copy_(chunk)
    assert joined is not None and end == frames
    return joined
