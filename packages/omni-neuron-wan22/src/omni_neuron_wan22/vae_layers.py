# SPDX-License-Identifier: Apache-2.0
"""The layers that the encoder and the decoder of Wan's causal 3-D VAE share, and what they remember between calls.

Every causal convolution sees frames of its own past. Here that past is an explicit tensor of fixed shape, zero before
the first frame, which equals the zero padding that a convolution over the whole video would apply. So the first chunk
and all later ones take and return the same cache shapes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from omni_neuron_kernels import causal_conv3d, flash_attention


class FeatureCache:
    """The past of every causal convolution during one call, read and replaced in a fixed order."""

    def __init__(self, past: list[torch.Tensor]):
        self._past: Iterator[torch.Tensor] = iter(past)
        self.future: list[torch.Tensor] = []

    def exchange(self, frames: torch.Tensor) -> torch.Tensor:
        """The past of `frames` `[B, C, T, H, W]`: as many frames before them as the convolution remembers.

        The last so many frames are the next call's past.
        """
        past = next(self._past)
        remembered = past.shape[2]
        missing = remembered - frames.shape[2]
        # A copy with the strides of the first chunk's zeros: other strides are another graph to a compiler, also of
        # a dim of size 1, for which `contiguous` does nothing; and a view would keep all of `frames`.
        if missing > 0:
            latest = torch.cat([past[:, :, -missing:], frames], dim=2).contiguous()
        else:
            latest = frames[:, :, -remembered:].clone(memory_format=torch.contiguous_format)
        self.future.append(latest)
        return past

    def skip(self) -> None:
        """Hand one past on unused: the first chunk does not reach the temporal upsampling."""
        self.future.append(next(self._past))


class WanCausalConv3d(nn.Conv3d):
    """A 3-D convolution over past and present frames; spatial padding keeps height and width."""

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


class WanImageConv(nn.Conv2d):
    """A 3 × 3 convolution that keeps height and width: `[B, C, H, W]` to `[B, C', H, W]`."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__(in_channels, out_channels, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """See the class."""
        assert self.bias is not None
        return causal_conv3d(images.unsqueeze(2), self.weight.unsqueeze(2), self.bias, padding=(0, 1, 1)).squeeze(2)


class WanUpsample(nn.Module):
    """Nearest-neighbour doubling of height and width. Has no parameters; holds a place in diffusers' key names."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """`[B, C, H, W]` to `[B, C, 2 H, 2 W]`."""
        return images.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)


class WanDownsamplePad(nn.ZeroPad2d):
    """A zero row below and a zero column on the right, before a convolution that halves height and width."""

    def __init__(self) -> None:
        super().__init__((0, 1, 0, 1))


def on_images(images_to_images: nn.Module, frames: torch.Tensor) -> torch.Tensor:
    """Apply a module of images `[N, C, H, W]` to every frame of `[B, C, T, H, W]`."""
    b, c, t, h, w = frames.shape
    images = images_to_images(frames.transpose(1, 2).reshape(b * t, c, h, w))
    return images.view(b, t, *images.shape[1:]).transpose(1, 2)


def zero_feature_cache(module: nn.Module, first: torch.Tensor) -> list[torch.Tensor]:
    """The past before the first chunk: zeros for every convolution that remembers frames, in the order of the calls.

    Args:
        module: encoder or decoder, whose modules are registered in the order in which its `forward` calls them.
        first: an input of the module, `[B, C, T, H, W]`, for batch, height, width, dtype and device.
    """
    b, _, _, h, w = first.shape
    cache = []
    for layer in module.modules():
        if isinstance(layer, nn.Conv3d) and layer.kernel_size[0] > 1:
            # As many as its kernel reaches back from the first frame of the present ones.
            remembered = layer.kernel_size[0] - layer.stride[0]
            cache.append(first.new_zeros(b, layer.in_channels, remembered, h, w))
        elif isinstance(layer, WanUpsample):
            h, w = 2 * h, 2 * w
        elif isinstance(layer, WanDownsamplePad):
            h, w = h // 2, w // 2
    return cache


def patchify(frames: torch.Tensor, patch: int) -> torch.Tensor:
    """`[B, C, T, H, W]` to `[B, C · patch², T, H / patch, W / patch]`: channel, then column and row in the patch."""
    b, c, t, h, w = frames.shape
    cut = frames.reshape(b, c, t, h // patch, patch, w // patch, patch)
    return cut.permute(0, 1, 6, 4, 2, 3, 5).reshape(b, c * patch * patch, t, h // patch, w // patch)


def unpatchify(frames: torch.Tensor, patch: int) -> torch.Tensor:
    """The inverse of `patchify`."""
    b, c, t, h, w = frames.shape
    cut = frames.reshape(b, c // (patch * patch), patch, patch, t, h, w)
    return cut.permute(0, 1, 4, 5, 3, 6, 2).reshape(b, c // (patch * patch), t, h * patch, w * patch)
