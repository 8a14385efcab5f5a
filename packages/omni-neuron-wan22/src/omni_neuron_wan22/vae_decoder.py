# SPDX-License-Identifier: Apache-2.0
"""The decoder of Wan's causal 3-D VAE, 2.1 and 2.2: one latent frame a call, its memory handed in and out.

A compiler sees two graphs: the first chunk, which becomes one frame, and the later ones.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from omni_neuron_wan22.config import VaeConfig
from omni_neuron_wan22.vae_layers import (
    FeatureCache,
    WanCausalConv3d,
    WanImageConv,
    WanMidBlock,
    WanResidualBlock,
    WanRMSNorm,
    WanUpsample,
    on_images,
    zero_feature_cache,
)


class WanUpResample(nn.Module):
    """Doubles height and width, to `out_channels`; with `temporal`, doubles the frames first."""

    def __init__(self, channels: int, out_channels: int, *, temporal: bool):
        super().__init__()
        self.time_conv = WanCausalConv3d(channels, 2 * channels, (3, 1, 1)) if temporal else None
        self.resample = nn.Sequential(WanUpsample(), WanImageConv(channels, out_channels))

    def forward(self, frames: torch.Tensor, cache: FeatureCache, first_chunk: bool) -> torch.Tensor:
        """`[B, C, T, H, W]` to `[B, C', T or 2 T, 2 H, 2 W]`; the first latent frame is one frame, not four."""
        if self.time_conv is not None:
            if first_chunk:
                cache.skip()
            else:
                b, c, t, h, w = frames.shape
                pairs = self.time_conv(frames, cache).view(b, 2, c, t, h, w)
                frames = pairs.permute(0, 2, 3, 1, 4, 5).reshape(b, c, 2 * t, h, w)
        return on_images(self.resample, frames)


class WanUpBlock(nn.Module):
    """Residual blocks, then the resampling; `upsample` is None in the last block."""

    def __init__(self, in_channels: int, out_channels: int, num_res_blocks: int, upsample: WanUpResample | None):
        super().__init__()
        widths = [in_channels] + [out_channels] * (num_res_blocks + 1)
        self.resnets = nn.ModuleList(WanResidualBlock(*pair) for pair in pairwise(widths))
        self.upsamplers = None if upsample is None else nn.ModuleList([upsample])

    def forward(self, frames: torch.Tensor, cache: FeatureCache, first_chunk: bool) -> torch.Tensor:
        """`[B, C, T, H, W]` to `[B, C', T', H', W']`."""
        for resnet in self.resnets:
            frames = resnet(frames, cache)
        if self.upsamplers is not None:
            frames = self.upsamplers[0](frames, cache, first_chunk)
        return frames


class WanResidualUpBlock(nn.Module):
    """VAE 2.2's: as `WanUpBlock`, and its input, repeated to the size of its output, is added where it resamples."""

    def __init__(self, in_channels: int, out_channels: int, num_res_blocks: int, upsample: WanUpResample | None):
        super().__init__()
        widths = [in_channels] + [out_channels] * (num_res_blocks + 1)
        self.resnets = nn.ModuleList(WanResidualBlock(*pair) for pair in pairwise(widths))
        self.upsampler = upsample
        self.out_channels = out_channels

    def forward(self, frames: torch.Tensor, cache: FeatureCache, first_chunk: bool) -> torch.Tensor:
        """`[B, C, T, H, W]` to `[B, C', T', H', W']`."""
        hidden = frames
        for resnet in self.resnets:
            hidden = resnet(hidden, cache)
        if self.upsampler is None:
            return hidden
        temporal = 1 if self.upsampler.time_conv is None else 2
        shortcut = repeat_to_double(frames, self.out_channels, temporal)
        # Of what the first latent frame would become only the last frame exists.
        shortcut = shortcut[:, :, temporal - 1 :] if first_chunk else shortcut
        return self.upsampler(hidden, cache, first_chunk) + shortcut


def repeat_to_double(frames: torch.Tensor, out_channels: int, temporal: int) -> torch.Tensor:
    """`[B, C, T, H, W]` to `[B, out_channels, temporal · T, 2 H, 2 W]` without weights.

    Every channel is repeated; then each `temporal` · 2 · 2 of them in a row become the frames, rows and columns that
    one position is divided into.
    """
    b, c, t, h, w = frames.shape
    repeats = out_channels * temporal * 4 // c
    parts = frames.repeat_interleave(repeats, dim=1).view(b, out_channels, temporal, 2, 2, t, h, w)
    return parts.permute(0, 1, 5, 2, 6, 3, 7, 4).reshape(b, out_channels, temporal * t, 2 * h, 2 * w)


class NeuronWanDecoder3d(nn.Module):
    """One latent frame to one video frame (the first) or four (the others), with the feature cache in and out."""

    def __init__(self, config: VaeConfig):
        super().__init__()
        dims = config.decoder_dims
        temporal = tuple(reversed(config.temperal_downsample))
        self.post_quant_conv = WanCausalConv3d(config.z_dim, config.z_dim, (1, 1, 1))
        self.conv_in = WanCausalConv3d(config.z_dim, dims[0], (3, 3, 3))
        self.mid_block = WanMidBlock(dims[0])
        blocks: list[nn.Module] = []
        block = WanResidualUpBlock if config.is_residual else WanUpBlock
        entering = dims[0]
        for index, channels in enumerate(dims[1:]):
            last = index == len(dims) - 2
            leaving = channels if config.is_residual or last else channels // 2
            upsample = None if last else WanUpResample(channels, leaving, temporal=temporal[index])
            blocks.append(block(entering, channels, config.num_res_blocks, upsample))
            entering = leaving
        self.up_blocks = nn.ModuleList(blocks)
        self.norm_out = WanRMSNorm(dims[-1])
        self.conv_out = WanCausalConv3d(dims[-1], config.out_channels, (3, 3, 3))

    def forward(
        self, latent_frame: torch.Tensor, feature_cache: list[torch.Tensor], *, first_chunk: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Decode `[B, z, 1, h, w]`.

        Args:
            latent_frame: one latent frame in the VAE's own scale.
            feature_cache: as `empty_feature_cache` makes it, then what the last call returned.
            first_chunk: whether this is the first latent frame.

        Returns:
            Frames `[B, out_channels, 1 or 4, 8 h, 8 w]` and the new feature cache, shapes unchanged. VAE 2.2's channels
            are patches, see `unpatchify`.
        """
        cache = FeatureCache(feature_cache)
        frames = self.conv_in(self.post_quant_conv(latent_frame), cache)
        frames = self.mid_block(frames, cache)
        for block in self.up_blocks:
            frames = block(frames, cache, first_chunk)
        frames = self.conv_out(F.silu(self.norm_out(frames)), cache)
        return frames, cache.future

    def empty_feature_cache(self, latent_frame: torch.Tensor) -> list[torch.Tensor]:
        """What the first call takes, for latents of this size."""
        return zero_feature_cache(self, latent_frame)
