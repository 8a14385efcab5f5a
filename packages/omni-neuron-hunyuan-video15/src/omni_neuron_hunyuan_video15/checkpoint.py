# SPDX-License-Identifier: Apache-2.0
"""A HunyuanVideo-1.5 checkpoint folder: its configurations, and whether this package can run it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from omni_neuron_hunyuan_video15.config import GuiderConfig, HunyuanVideo15Config, VaeConfig
from omni_neuron_hunyuan_video15.mapping import UNUSED_TRANSFORMER_KEYS, transformer_mapping
from omni_neuron_hunyuan_video15.transformer import HunyuanVideo15Transformer
from omni_neuron_parallel import AxisGroup
from vllm_omni_neuron.sdk import DiffusersCheckpoint, ModelConfigError

COMPONENTS = ("transformer", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "scheduler", "guider")


@dataclass(frozen=True)
class HunyuanVideo15Checkpoint(DiffusersCheckpoint):
    """A folder in the layout of diffusers' `HunyuanVideo15Pipeline`."""

    @cached_property
    def transformer_config(self) -> HunyuanVideo15Config:
        """Of the DiT."""
        return self.config("transformer", HunyuanVideo15Config)

    @cached_property
    def vae_config(self) -> VaeConfig:
        """Of the VAE."""
        return self.config("vae", VaeConfig)

    @cached_property
    def guider(self) -> GuiderConfig:
        """Of guidance."""
        return GuiderConfig.from_file(self.path / "guider" / "guider_config.json")

    def check(self) -> None:
        """Refuse a checkpoint that cannot run; reads configurations and the headers of the DiT's weights.

        Raises:
            ModelConfigError: a missing folder, or configurations that this package cannot run.
            CheckpointError: weights that do not fit.
        """
        self.check_components(*COMPONENTS)
        self.guider  # noqa: B018  # reads and checks it
        channels, latents = self.transformer_config.out_channels, self.vae_config.latent_channels
        if channels != latents:
            raise ModelConfigError(
                f"transformer: out_channels = {channels} but the VAE has latent_channels = {latents}"
            )

        def make(group: AxisGroup) -> HunyuanVideo15Transformer:
            return HunyuanVideo15Transformer(self.transformer_config, group=group, context_group=AxisGroup("cp"))

        self.check_weights("transformer", make, transformer_mapping(self.transformer_config), UNUSED_TRANSFORMER_KEYS)

    def load_transformer(
        self, *, dtype: torch.dtype, device: torch.device | str, group: AxisGroup | None = None, **options: Any
    ) -> HunyuanVideo15Transformer:
        """The DiT, this rank's shards only; `options` are those of `HunyuanVideo15Transformer`."""
        config = self.transformer_config
        return self.load(
            "transformer",
            lambda group: HunyuanVideo15Transformer(config, group=group, **options),
            transformer_mapping(config),
            dtype=dtype,
            device=device,
            group=group,
            unused=UNUSED_TRANSFORMER_KEYS,
        )

    def patches(self, height: int, width: int, num_frames: int) -> tuple[int, int, int]:
        """The grid of patches (frames, rows, columns) of a video; their number is that of the DiT's video tokens."""
        vae, (p_t, p_h, p_w) = self.vae_config, self.transformer_config.patch
        t, h, w = vae.latent_size(height, width, num_frames)
        return t // p_t, h // p_h, w // p_w

    def num_tokens(self, height: int, width: int, num_frames: int) -> int:
        """Video tokens of the DiT."""
        return math.prod(self.patches(height, width, num_frames))
