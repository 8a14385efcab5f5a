# SPDX-License-Identifier: Apache-2.0
"""Sizes of the components, as their config.json names them. The defaults are those of a tiny model."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_omni_neuron.sdk import ModelConfig


@dataclass(frozen=True)
class TextEncoderConfig(ModelConfig):
    """Of the text encoder: tokens, their width, and the features between its two linear layers."""

    vocab_size: int = 192
    width: int = 32
    inner: int = 64


@dataclass(frozen=True)
class TransformerConfig(ModelConfig):
    """Of the DiT: attention, blocks, latent channels, pixels of a patch's side, width of the text."""

    num_heads: int = 4
    head_dim: int = 16
    num_layers: int = 2
    inner: int = 128
    channels: int = 4
    patch: int = 2
    text_width: int = 32
    eps: float = 1e-6

    @property
    def hidden(self) -> int:
        """Features of a token."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class VaeConfig(ModelConfig):
    """Of the decoder: latent channels, features between its convolutions, pixels a latent one becomes, each way."""

    channels: int = 4
    width: int = 16
    stride: int = 4
