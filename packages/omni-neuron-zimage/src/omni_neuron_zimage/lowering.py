# SPDX-License-Identifier: Apache-2.0
"""What `vllm-omni-neuron lower` must know of Z-Image: the transformer without weights, and the inputs of one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omni_neuron_zimage.config import ZImageConfig
from omni_neuron_zimage.planning import CAPTION_TOKENS, PUBLISHED_VAE
from omni_neuron_zimage.transformer import Caption, ZImageTransformer2DModel
from vllm_omni_neuron.sdk import DiffusersCheckpoint, ModelConfigError


@dataclass(frozen=True)
class ZImageComponents:
    """The transformer of these configurations.

    Attributes:
        config: sizes.
        vae: the VAE's config.json.
    """

    config: ZImageConfig
    vae: Mapping[str, Any]

    def make(
        self,
        component: str,
        *,
        height: int,
        width: int,
        frames: int = 1,
        layers: int | None = None,
        sequence_parallel: bool = False,
    ) -> tuple[nn.Module, dict[str, Any]]:
        """One rank's transformer, empty, and the keyword arguments of one call, in torch's default dtype.

        Args:
            component: "transformer"; the text encoder is on the host, and the VAE is diffusers' own.
            height, width: pixels.
            frames: 1, of an image.
            layers: this many layers behind the refiners instead of all.
            sequence_parallel: as in `ZImageTransformer2DModel`.

        Raises:
            ModelConfigError: another component.
        """
        if component != "transformer":
            raise ModelConfigError(f"component = {component!r}: of Z-Image only 'transformer' is lowered")
        config = replace(self.config, n_layers=layers or self.config.n_layers)
        pixels = 2 ** (len(self.vae["block_out_channels"]) - 1)
        caption = Caption(
            torch.empty(1, CAPTION_TOKENS, config.dim),
            torch.ones(1, CAPTION_TOKENS, dtype=torch.bool),
            torch.ones(1, dtype=torch.int64),
        )
        return ZImageTransformer2DModel(config, sequence_parallel=sequence_parallel), {
            "hidden_states": torch.empty(1, config.in_channels, height // pixels, width // pixels),
            "timestep": torch.empty(1, dtype=torch.float32),
            "caption": caption,
        }


def z_image() -> ZImageComponents:
    """Z-Image or Z-Image-Turbo, which have one size."""
    return ZImageComponents(ZImageConfig(), PUBLISHED_VAE)


def from_checkpoint(folder: str | Path) -> ZImageComponents:
    """The transformer of a checkpoint folder, from its config.json files; no weights are read.

    Raises:
        ModelConfigError: a file is missing, or it is not a model that this package runs.
    """
    checkpoint = DiffusersCheckpoint(Path(folder))
    return ZImageComponents(checkpoint.config("transformer", ZImageConfig), checkpoint.raw_config("vae"))
