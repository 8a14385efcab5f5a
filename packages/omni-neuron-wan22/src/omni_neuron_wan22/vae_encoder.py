# SPDX-License-Identifier: Apache-2.0
"""The encoder of Wan's causal 3-D VAE, 2.1 and 2.2: one latent frame's video frames a call, its memory in and out.

A compiler sees two graphs: the first chunk, which is one frame, and the later ones of four.
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
    WanDownsamplePad,
    WanMidBlock,
    WanResidualBlock,
    WanRMSNorm,
    on_images,
    zero_feature_cache,
)


class WanDownResample(nn.Module):
    """Halves height and width, then, with `temporal`, the frames."""

    def __init__(self, channels: int, *, temporal: bool):
        super().__init__()
        # The kernel library has no convolution with a stride; these few are torch's.
        self.resample = nn.Sequential(WanDownsamplePad(), nn.Conv2d(channels, channels, 3, stride=2))
        self.time_conv = nn.Conv3d(channels, channels, (3, 1, 1), stride=(2, 1, 1)) if temporal else None

    def forward(self, frames: torch.Tensor, cache: FeatureCache, first_chunk: bool) -> torch.Tensor:
        """`[B, C, T, H, W]` to `[B, C, T or T / 2, H / 2, W / 2]`; the first frame stays one."""
        frames = on_images(self.resample, frames)
        if self.time_conv is None:
            return frames
        last_frame = cache.exchange(frames)
        return frames if first_chunk else self.time_conv(torch.cat([last_frame, frames], dim=2))


class WanResidualDownBlock(nn.Module):
    """VAE 2.2's: residual blocks, then the resampling (None in the last block); its input, averaged to the size of its
    output, is added."""

    def __init__(self, in_channels: int, out_channels: int, num_res_blocks: int, downsample: WanDownResample | None):
        super().__init__()
        widths = [in_channels] + [out_channels] * num_res_blocks
        self.resnets = nn.ModuleList(WanResidualBlock(*pair) for pair in pairwise(widths))
        self.downsampler = downsample
        self.out_channels = out_channels

    def forward(self, frames: torch.Tensor, cache: FeatureCache, first_chunk: bool) -> torch.Tensor:
        """`[B, C, T, H, W]` to `[B, C', T', H', W']`."""
        hidden = frames
        for resnet in self.resnets:
            hidden = resnet(hidden, cache)
        if self.downsampler is None:
            return hidden + average_groups(frames, self.out_channels, 1, 1)
        temporal = 1 if self.downsampler.time_conv is None else 2
        shortcut = average_groups(frames, self.out_channels, temporal, 2)
        return self.downsampler(hidden, cache, first_chunk) + shortcut


def average_groups(frames: torch.Tensor, out_channels: int, temporal: int, spatial: int) -> torch.Tensor:
    """`[B, C, T, H, W]` to `[B, out_channels, ⌈T / temporal⌉, H / spatial, W / spatial]` without weights.

    The frames, rows and columns that become one position are channels of it; each output channel is the mean of as many
    of those in a row as it takes. A frame that has none to share its position with shares it with zeros before it.
    """
    frames = F.pad(frames, (0, 0, 0, 0, -frames.shape[2] % temporal, 0))
    b, c, t, h, w = frames.shape
    t, h, w = t // temporal, h // spatial, w // spatial
    parts = frames.reshape(b, c, t, temporal, h, spatial, w, spatial).permute(0, 1, 3, 5, 7, 2, 4, 6)
    return parts.reshape(b, out_channels, -1, t, h, w).mean(dim=2)


class NeuronWanEncoder3d(nn.Module):
    """One video frame (the first) or four (the others) to one latent frame, with the feature cache in and out."""

    def __init__(self, config: VaeConfig):
        super().__init__()
        dims = config.encoder_dims
        self.conv_in = WanCausalConv3d(config.in_channels, dims[0], (3, 3, 3))
        blocks: list[nn.Module] = []
        for index, (entering, channels) in enumerate(pairwise(dims)):
            last = index == len(dims) - 2
            downsample = None if last else WanDownResample(channels, temporal=config.temperal_downsample[index])
            if config.is_residual:
                blocks.append(WanResidualDownBlock(entering, channels, config.num_res_blocks, downsample))
                continue
            # VAE 2.1 numbers residual blocks and resamplings in one list.
            widths = [entering] + [channels] * config.num_res_blocks
            blocks += [WanResidualBlock(*pair) for pair in pairwise(widths)]
            blocks += [] if downsample is None else [downsample]
        self.down_blocks = nn.ModuleList(blocks)
        self.mid_block = WanMidBlock(dims[-1])
        self.norm_out = WanRMSNorm(dims[-1])
        self.conv_out = WanCausalConv3d(dims[-1], 2 * config.z_dim, (3, 3, 3))
        self.quant_conv = WanCausalConv3d(2 * config.z_dim, 2 * config.z_dim, (1, 1, 1))

    def forward(
        self, chunk: torch.Tensor, feature_cache: list[torch.Tensor], *, first_chunk: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Encode `[B, in_channels, 1 or 4, H, W]`, VAE 2.2's after `patchify`.

        Args:
            chunk: the first video frame, or the next four.
            feature_cache: as `empty_feature_cache` makes it, then what the last call returned.
            first_chunk: whether this is the first video frame.

        Returns:
            The posterior's mode `[B, z, 1, H / 8, W / 8]` and the new feature cache, shapes unchanged.
        """
        cache = FeatureCache(feature_cache)
        frames = self.conv_in(chunk, cache)
        for block in self.down_blocks:
            plain = isinstance(block, WanResidualBlock)
            frames = block(frames, cache) if plain else block(frames, cache, first_chunk)
        frames = self.mid_block(frames, cache)
        moments = self.quant_conv(self.conv_out(F.silu(self.norm_out(frames)), cache))
        # The mean of a normal distribution is its mode; the other half is the logarithm of its variance.
        return moments.chunk(2, dim=1)[0].contiguous(), cache.future

    def empty_feature_cache(self, chunk: torch.Tensor) -> list[torch.Tensor]:
        """What the first call takes, for video frames of this size."""
        return zero_feature_cache(self, chunk)
