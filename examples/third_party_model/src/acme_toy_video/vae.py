# SPDX-License-Identifier: Apache-2.0
"""The decoder: latents to frames, on the output rank alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from vllm_omni_neuron.sdk import Mapping

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
    """What holds the decoder, which is compiled by itself; a model that takes images would have an `encoder`, too."""

    def __init__(self, config: VaeConfig):
        super().__init__()
        self.decoder = Decoder(config)


def vae_mapping() -> Mapping:
    """Parameter → key in `vae/`."""
    names = [f"decoder.{layer}.{kind}" for layer in ("conv_in", "conv_out") for kind in ("weight", "bias")]
    return {name: name for name in names}
