# SPDX-License-Identifier: Apache-2.0
"""The decoder: latents to frames, on the output rank alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from omni_neuron_parallel import AxisGroup
from torch import nn
from vllm_omni_neuron.sdk import Mapping, ShardedComponent, with_biases

from .config import VaeConfig


class Decoder(nn.Module):
    """Two convolutions with an upsampling between; no rank shares them."""

    def __init__(self, config: VaeConfig):
        super().__init__()
        self.stride = config.stride
        self.conv_in = nn.Conv3d(config.channels, config.width, 3, padding=1)
        self.conv_out = nn.Conv3d(config.width, 3, 3, padding=1)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """`[B, C, T, h, w]` to frames `[B, 3, T, stride · h, stride · w]` within ±1."""
        hidden = F.silu(self.conv_in(latents.to(self.conv_in.weight.dtype)))
        hidden = hidden.repeat_interleave(self.stride, 3).repeat_interleave(self.stride, 4)
        return torch.tanh(self.conv_out(hidden))


class Vae(nn.Module):
    """What holds the decoder, which is compiled by itself; a model that takes images would have an `encoder`, too.

    Args:
        config: sizes.
        group: the ranks that would share its weights; each that decodes has all of them.
    """

    def __init__(self, config: VaeConfig, *, group: AxisGroup | None = None):
        super().__init__()
        self.decoder = Decoder(config)


def vae_mapping(config: VaeConfig) -> Mapping:
    """Parameter → key in `vae/`."""
    return with_biases({layer: layer for layer in ("decoder.conv_in", "decoder.conv_out")})


VAE = ShardedComponent("vae", VaeConfig, Vae, vae_mapping)
