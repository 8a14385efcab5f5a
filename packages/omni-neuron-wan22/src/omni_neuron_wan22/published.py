# SPDX-License-Identifier: Apache-2.0
"""The configurations of the published checkpoints, for what plans or lowers them without having them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omni_neuron_wan22.config import UMT5Config, VaeConfig, WanConfig


def _vae(z_dim: int, **changes: Any) -> VaeConfig:
    # The latents' statistics are the checkpoint's own and change no size.
    return VaeConfig(z_dim=z_dim, latents_mean=(0.0,) * z_dim, latents_std=(1.0,) * z_dim, **changes)


@dataclass(frozen=True)
class PublishedModel:
    """A checkpoint's configurations; its UMT5 is UMT5-XXL.

    Attributes:
        name: as `vllm-omni-neuron plan` and `lower` know it.
        experts: DiTs of this configuration.
        transformer, vae, text_encoder: sizes.
    """

    name: str
    experts: int
    transformer: WanConfig
    vae: VaeConfig
    text_encoder: UMT5Config = field(default_factory=UMT5Config)


T2V_A14B = PublishedModel("wan22-t2v-a14b", 2, WanConfig(), _vae(16))
I2V_A14B = PublishedModel("wan22-i2v-a14b", 2, WanConfig(in_channels=36), _vae(16))
TI2V_5B = PublishedModel(
    "wan22-ti2v-5b",
    1,
    WanConfig(in_channels=48, out_channels=48, num_attention_heads=24, ffn_dim=14336, num_layers=30),
    _vae(
        48,
        base_dim=160,
        decoder_base_dim=256,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
    ),
)
