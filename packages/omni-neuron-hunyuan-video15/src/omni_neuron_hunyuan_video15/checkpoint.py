# SPDX-License-Identifier: Apache-2.0
"""A HunyuanVideo-1.5 checkpoint folder: its configurations, whether this package can run it, and its DiT."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from omni_neuron_hunyuan_video15.config import GuiderConfig, HunyuanVideo15Config, VaeConfig
from omni_neuron_hunyuan_video15.mapping import UNUSED_TRANSFORMER_KEYS, transformer_mapping
from omni_neuron_hunyuan_video15.transformer import HunyuanVideo15Transformer
from omni_neuron_parallel import AxisGroup
from vllm_omni_neuron.sdk import DiffusersCheckpoint, ModelConfigError, ShardedComponent

COMPONENTS = ("transformer", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "scheduler", "guider")
TRANSFORMER = ShardedComponent(
    "transformer", HunyuanVideo15Config, HunyuanVideo15Transformer, transformer_mapping, UNUSED_TRANSFORMER_KEYS
)


@dataclass(frozen=True)
class HunyuanVideo15Checkpoint(DiffusersCheckpoint):
    """A folder in the layout of diffusers' `HunyuanVideo15Pipeline`."""

    @cached_property
    def transformer_config(self) -> HunyuanVideo15Config:
        """Of the DiT."""
        return TRANSFORMER.config(self)

    @cached_property
    def vae_config(self) -> VaeConfig:
        """Of the VAE."""
        return self.config("vae", VaeConfig)

    @cached_property
    def guider_config(self) -> GuiderConfig:
        """Of guidance."""
        return GuiderConfig.from_file(self.path / "guider" / "guider_config.json")

    def check(self) -> None:
        """Refuse a checkpoint that cannot run; reads configurations and the headers of the DiT's weights.

        Raises:
            ModelConfigError: a missing folder, or sizes that do not fit each other.
            CheckpointError: weights that do not fit.
        """
        self.check_components(*COMPONENTS)
        channels, latents = self.transformer_config.out_channels, self.vae_config.latent_channels
        if channels != latents:
            raise ModelConfigError(
                f"transformer: out_channels = {channels}, but the VAE has latent_channels = {latents}"
            )
        TRANSFORMER.check(self, context_group=AxisGroup("cp"))
