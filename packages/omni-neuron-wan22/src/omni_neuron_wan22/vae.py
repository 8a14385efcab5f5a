# SPDX-License-Identifier: Apache-2.0
"""The decoder of Wan's causal 3-D VAE (VAE 2.1), one latent frame a call, its memory handed in and out.

Every causal convolution sees two frames of its own past. Here that past is an explicit tensor of fixed shape, zero
before the first frame, which equals the zero padding that a convolution over the whole video would apply. So the first
chunk and all later ones take and return the same cache shapes, and a compiler sees two graphs, not four.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import overload

import torch
import torch.nn.functional as F
from torch import nn

from omni_neuron_kernels import causal_conv3d, flash_attention
from omni_neuron_parallel import AxisGroup, TilePlan, run_tiles
from omni_neuron_wan22.config import VaeConfig, WanConfigError

CACHED_FRAMES = 2


class FeatureCache:
    """The past of every causal convolution during one call, read and replaced in a fixed order."""

    def __init__(self, past: list[torch.Tensor]):
        self._past: Iterator[torch.Tensor] = iter(past)
        self.future: list[torch.Tensor] = []

    def exchange(self, frames: torch.Tensor) -> torch.Tensor:
        """The two frames before `frames` `[B, C, T, H, W]`, of which the last two become the next call's past."""
        past = next(self._past)
        missing = CACHED_FRAMES - frames.shape[2]
        latest = torch.cat([past[:, :, -missing:], frames], dim=2) if missing > 0 else frames[:, :, -CACHED_FRAMES:]
        # Contiguous, as the first chunk's zeros are: other strides are another graph to a compiler, and a view would
        # keep all of `frames`.
        self.future.append(latest.contiguous())
        return past

    def skip(self) -> None:
        """Hand one past on unused: the first chunk does not reach the temporal upsampling."""
        self.future.append(next(self._past))


class WanCausalConv3d(nn.Conv3d):
    """A 3-D convolution over two past frames and the present ones; spatial padding keeps height and width."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: tuple[int, int, int]):
        padding = (0, kernel_size[1] // 2, kernel_size[2] // 2)
        super().__init__(in_channels, out_channels, kernel_size, padding=padding)

    def forward(self, frames: torch.Tensor, cache: FeatureCache | None = None) -> torch.Tensor:
        """`[B, C, T, H, W]` to `[B, C', T, H, W]`; kernels of more than one frame need the cache."""
        past = None if cache is None else cache.exchange(frames)
        padding = (0, self.kernel_size[1] // 2, self.kernel_size[2] // 2)
        assert self.bias is not None
        return causal_conv3d(frames, self.weight, self.bias, padding=padding, past=past)


class WanRMSNorm(nn.Module):
    """RMS norm over channels, dim 1: x / ‖x‖₂ · √C · gain, the norm in float32. `gain_dims` trailing dims of size 1."""

    def __init__(self, channels: int, gain_dims: int = 3):
        super().__init__()
        self.scale = channels**0.5
        self.gamma = nn.Parameter(torch.empty(channels, *[1] * gain_dims))

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Shape and dtype as given."""
        norm = frames.float().square().sum(1, keepdim=True).sqrt().clamp(min=1e-12)
        return frames * (self.scale / norm).to(frames.dtype) * self.gamma


class WanResidualBlock(nn.Module):
    """Two normalised causal convolutions and a shortcut."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.norm1 = WanRMSNorm(in_channels)
        self.conv1 = WanCausalConv3d(in_channels, out_channels, (3, 3, 3))
        self.norm2 = WanRMSNorm(out_channels)
        self.conv2 = WanCausalConv3d(out_channels, out_channels, (3, 3, 3))
        same = in_channels == out_channels
        self.conv_shortcut = nn.Identity() if same else WanCausalConv3d(in_channels, out_channels, (1, 1, 1))

    def forward(self, frames: torch.Tensor, cache: FeatureCache) -> torch.Tensor:
        """`[B, C, T, H, W]` to `[B, C', T, H, W]`."""
        hidden = self.conv1(F.silu(self.norm1(frames)), cache)
        hidden = self.conv2(F.silu(self.norm2(hidden)), cache)
        return hidden + self.conv_shortcut(frames)


class WanAttentionBlock(nn.Module):
    """Single-head attention of a frame's positions on each other; the head is as wide as the channels (384 in A14B)."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = WanRMSNorm(channels, gain_dims=2)
        self.to_qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj = nn.Conv2d(channels, channels, 1)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """`[B, C, T, H, W]` to the same."""
        b, c, t, h, w = frames.shape
        images = frames.transpose(1, 2).reshape(b * t, c, h, w)
        query, key, value = self.to_qkv(self.norm(images)).flatten(2).transpose(1, 2).unsqueeze(2).chunk(3, dim=-1)
        attended = flash_attention(query, key, value)
        images = self.proj(attended.squeeze(2).transpose(1, 2).reshape(b * t, c, h, w))
        return images.view(b, t, c, h, w).transpose(1, 2) + frames


class WanMidBlock(nn.Module):
    """Residual block, attention, residual block."""

    def __init__(self, channels: int):
        super().__init__()
        self.resnets = nn.ModuleList(WanResidualBlock(channels, channels) for _ in range(2))
        self.attentions = nn.ModuleList([WanAttentionBlock(channels)])

    def forward(self, frames: torch.Tensor, cache: FeatureCache) -> torch.Tensor:
        """`[B, C, T, H, W]` to the same."""
        frames = self.attentions[0](self.resnets[0](frames, cache))
        return self.resnets[1](frames, cache)


class WanUpsample(nn.Module):
    """Nearest-neighbour doubling of height and width. Has no parameters; holds a place in diffusers' key names."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """`[B, C, H, W]` to `[B, C, 2 H, 2 W]`."""
        return images.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)


class WanImageConv(nn.Conv2d):
    """A 3 × 3 convolution that keeps height and width: `[B, C, H, W]` to `[B, C', H, W]`."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__(in_channels, out_channels, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """See the class."""
        assert self.bias is not None
        return causal_conv3d(images.unsqueeze(2), self.weight.unsqueeze(2), self.bias, padding=(0, 1, 1)).squeeze(2)


class WanResample(nn.Module):
    """Doubles height and width and halves the channels; with `temporal`, doubles the frames first."""

    def __init__(self, channels: int, *, temporal: bool):
        super().__init__()
        self.time_conv = WanCausalConv3d(channels, 2 * channels, (3, 1, 1)) if temporal else None
        self.resample = nn.Sequential(WanUpsample(), WanImageConv(channels, channels // 2))

    def forward(self, frames: torch.Tensor, cache: FeatureCache, first_chunk: bool) -> torch.Tensor:
        """`[B, C, T, H, W]` to `[B, C / 2, T or 2 T, 2 H, 2 W]`; the first latent frame is one frame, not four."""
        if self.time_conv is not None:
            if first_chunk:
                cache.skip()
            else:
                b, c, t, h, w = frames.shape
                pairs = self.time_conv(frames, cache).view(b, 2, c, t, h, w)
                frames = pairs.permute(0, 2, 3, 1, 4, 5).reshape(b, c, 2 * t, h, w)
        b, c, t, h, w = frames.shape
        images = self.resample(frames.transpose(1, 2).reshape(b * t, c, h, w))
        return images.view(b, t, *images.shape[1:]).transpose(1, 2)


class WanUpBlock(nn.Module):
    """Residual blocks, then the resampling; `upsample` is None in the last block."""

    def __init__(self, in_channels: int, out_channels: int, num_res_blocks: int, upsample: WanResample | None):
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


class NeuronWanDecoder3d(nn.Module):
    """One latent frame to one video frame (the first) or four (the others), with the feature cache in and out."""

    def __init__(self, config: VaeConfig):
        super().__init__()
        dims = config.decoder_dims
        temporal = tuple(reversed(config.temperal_downsample))
        self.conv_in = WanCausalConv3d(config.z_dim, dims[0], (3, 3, 3))
        self.mid_block = WanMidBlock(dims[0])
        blocks = []
        for index, (in_channels, out_channels) in enumerate(pairwise(dims)):
            last = index == len(dims) - 2
            upsample = None if last else WanResample(out_channels, temporal=temporal[index])
            # Every resampling but the missing last one halves the channels.
            entering = in_channels if index == 0 else in_channels // 2
            blocks.append(WanUpBlock(entering, out_channels, config.num_res_blocks, upsample))
        self.up_blocks = nn.ModuleList(blocks)
        self.norm_out = WanRMSNorm(dims[-1])
        self.conv_out = WanCausalConv3d(dims[-1], config.out_channels, (3, 3, 3))

    def forward(
        self, latent_frame: torch.Tensor, feature_cache: list[torch.Tensor], *, first_chunk: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Decode `[B, z, 1, h, w]`.

        Args:
            latent_frame: one latent frame after `post_quant_conv`.
            feature_cache: as `empty_feature_cache` makes it, then what the last call returned.
            first_chunk: whether this is the first latent frame.

        Returns:
            Frames `[B, 3, 1 or 4, 8 h, 8 w]` and the new feature cache, shapes unchanged.
        """
        cache = FeatureCache(feature_cache)
        frames = self.mid_block(self.conv_in(latent_frame, cache), cache)
        for block in self.up_blocks:
            frames = block(frames, cache, first_chunk)
        frames = self.conv_out(F.silu(self.norm_out(frames)), cache)
        return frames, cache.future

    def empty_feature_cache(self, latent_frame: torch.Tensor) -> list[torch.Tensor]:
        """Two zero frames for every causal convolution, in the order of the calls, for latents of this size."""
        b, _, _, h, w = latent_frame.shape
        cache = []
        # Modules are registered in the order in which `forward` calls them.
        for module in self.modules():
            if isinstance(module, WanCausalConv3d) and module.kernel_size[0] > 1:
                cache.append(latent_frame.new_zeros(b, module.in_channels, CACHED_FRAMES, h, w))
            elif isinstance(module, WanUpsample):
                h, w = 2 * h, 2 * w
        return cache


@dataclass(frozen=True)
class VaeTiling:
    """How a video is cut into tiles for decoding, in pixels; names and defaults are diffusers'.

    Attributes:
        tile_sample_min_height, tile_sample_min_width: of a tile; a smaller video is one tile.
        tile_sample_stride_height, tile_sample_stride_width: distance between tiles; what they overlap by is blended.
    """

    tile_sample_min_height: int = 256
    tile_sample_min_width: int = 256
    tile_sample_stride_height: int = 192
    tile_sample_stride_width: int = 192

    def plan(self, height: int, width: int, scale: int) -> TilePlan:
        """The plan for latents of `height` × `width`, each of which becomes `scale` pixels.

        Raises:
            WanConfigError: a tile or stride that is not a multiple of `scale`, or a stride larger than the tile.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if value < scale or value % scale:
                raise WanConfigError(f"{field.name} = {value}: valid values are positive multiples of {scale}")
        for axis in ("height", "width"):
            tile, stride = getattr(self, f"tile_sample_min_{axis}"), getattr(self, f"tile_sample_stride_{axis}")
            if stride > tile:
                raise WanConfigError(
                    f"tile_sample_stride_{axis} = {stride} leaves gaps between tiles of tile_sample_min_{axis} = "
                    f"{tile}; valid values are {scale} to {tile}"
                )
        return TilePlan.for_size(
            height,
            width,
            tile=(self.tile_sample_min_height // scale, self.tile_sample_min_width // scale),
            stride=(self.tile_sample_stride_height // scale, self.tile_sample_stride_width // scale),
            scale=scale,
        )


class NeuronAutoencoderKLWan(nn.Module):
    """The VAE as far as text-to-video needs it: latents to video. Lives on the ranks that decode only.

    Args:
        config: sizes and the latents' statistics.

    Attributes:
        tiling: how `decode` cuts the video into tiles; None, as at first, decodes it whole. See `enable_tiling`.
    """

    def __init__(self, config: VaeConfig):
        super().__init__()
        self.config = config
        self.tiling: VaeTiling | None = None
        self.post_quant_conv = WanCausalConv3d(config.z_dim, config.z_dim, (1, 1, 1))
        self.decoder = NeuronWanDecoder3d(config)
        self.requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations."""
        return self.post_quant_conv.weight.dtype

    def enable_tiling(self, tiling: VaeTiling | None = None) -> None:
        """Decode tile by tile from now on, by default with diffusers' tiles of 256 pixels every 192."""
        self.tiling = tiling or VaeTiling()

    def denormalize(self, latents: torch.Tensor) -> torch.Tensor:
        """The DiT's unit-variance latents to the VAE's own: latents · std + mean, channel by channel."""
        statistics = torch.tensor([self.config.latents_mean, self.config.latents_std], dtype=torch.float32)
        mean, std = statistics.to(latents.device)[:, None, :, None, None, None].unbind(0)
        return (latents.float() * std + mean).to(self.dtype)

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
            latents: `[B, z, T, h, w]` in the VAE's own scale, whole and the same on every rank.
            tiling: instead of `self.tiling`. With neither, more than one rank in `group` means `VaeTiling()`.
            group: the ranks that share the tiles; collective over it. None: this process alone.

        Returns:
            The video `[B, 3, 4 T − 3, 8 h, 8 w]` within ±1, in `dtype`: on the latents' device if decoded whole, on the
            host if in tiles, on the first rank of the group that holds global rank 0. None on every other rank; those
            of other groups return at once.

        Raises:
            WanConfigError: a tiling that does not fit the VAE.
        """
        tiling, group = tiling or self.tiling, group or AxisGroup("vae_patch")
        if tiling is None and group.ranks == (0,):
            return torch.cat([frames.clamp(-1.0, 1.0) for frames in self._decode_frames(latents)], dim=2)
        frames, height, width = latents.shape[2:]
        video = run_tiles(
            # From the host, so that a tile reaches the device in one piece and of one layout.
            latents.cpu(),
            lambda tile: self._decode_frames(tile.to(latents.device)),
            (tiling or VaeTiling()).plan(height, width, self.config.scale_factor_spatial),
            channels=self.config.out_channels,
            frames=self.config.scale_factor_temporal * (frames - 1) + 1,
            dtype=self.dtype,
            group=group,
        )
        return None if video is None else video.clamp_(-1.0, 1.0)

    def _decode_frames(self, latents: torch.Tensor) -> Iterator[torch.Tensor]:
        """The frames of each latent frame in turn, not yet clamped."""
        hidden = self.post_quant_conv(latents)
        feature_cache = self.decoder.empty_feature_cache(hidden[:, :, :1])
        for index in range(hidden.shape[2]):
            # Contiguous: the strides of a slice depend on the number of frames, and other strides are another graph.
            frame = hidden[:, :, index : index + 1].contiguous()
            frames, feature_cache = self.decoder(frame, feature_cache, first_chunk=index == 0)
            yield frames
