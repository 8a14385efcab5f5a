# SPDX-License-Identifier: Apache-2.0
"""What `vllm-omni-neuron lower` must know of HunyuanVideo-1.5: the DiT without weights, and the inputs of one call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omni_neuron_hunyuan_video15.checkpoint import HunyuanVideo15Checkpoint
from omni_neuron_hunyuan_video15.config import HunyuanVideo15Config, VaeConfig
from omni_neuron_hunyuan_video15.text import GLYPH_LENGTH, MAX_TEXT_LENGTH
from omni_neuron_hunyuan_video15.transformer import HunyuanVideo15Transformer
from vllm_omni_neuron.sdk import ModelConfigError


@dataclass(frozen=True)
class HunyuanVideo15Components:
    """The DiT of these configurations.

    Attributes:
        transformer_config, vae_config: sizes.
    """

    transformer_config: HunyuanVideo15Config
    vae_config: VaeConfig

    def make(
        self,
        component: str,
        *,
        height: int,
        width: int,
        frames: int,
        layers: int | None = None,
        sequence_parallel: bool = False,
    ) -> tuple[nn.Module, dict[str, Any]]:
        """One rank's DiT, empty, and the keyword arguments of one call, in torch's default dtype.

        Args:
            component: "transformer"; the text encoders are on the host, and the VAE is diffusers' own.
            height, width: pixels.
            frames: of the video.
            layers: this many blocks instead of all.
            sequence_parallel: as in `HunyuanVideo15Transformer`.

        Raises:
            ModelConfigError: another component.
        """
        if component != "transformer":
            raise ModelConfigError(f"component = {component!r}: of HunyuanVideo-1.5 only 'transformer' is lowered")
        config = replace(self.transformer_config, num_layers=layers or self.transformer_config.num_layers)
        grid = self.vae_config.latent_size(height, width, frames)
        text, glyphs = (torch.ones(1, length, dtype=torch.int64) for length in (MAX_TEXT_LENGTH, GLYPH_LENGTH))
        return HunyuanVideo15Transformer(config, sequence_parallel=sequence_parallel), {
            "hidden_states": torch.empty(1, config.in_channels, *grid),
            "timestep": torch.empty(1, dtype=torch.float32),
            "encoder_hidden_states": torch.empty(*text.shape, config.text_embed_dim),
            "encoder_attention_mask": text,
            "encoder_hidden_states_2": torch.empty(*glyphs.shape, config.text_embed_2_dim),
            "encoder_attention_mask_2": glyphs,
        }


def t2v() -> HunyuanVideo15Components:
    """The published text-to-video model, 480p or 720p."""
    return HunyuanVideo15Components(HunyuanVideo15Config(), VaeConfig())


def from_checkpoint(folder: str | Path) -> HunyuanVideo15Components:
    """The DiT of a checkpoint folder, from its config.json files; no weights are read.

    Raises:
        ModelConfigError: a file is missing, or it is not a model that this package runs.
    """
    checkpoint = HunyuanVideo15Checkpoint(Path(folder))
    return HunyuanVideo15Components(checkpoint.transformer_config, checkpoint.vae_config)
