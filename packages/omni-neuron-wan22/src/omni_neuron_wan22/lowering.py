# SPDX-License-Identifier: Apache-2.0
"""What `vllm-omni-neuron lower` must know of Wan2.2: a component without weights, and the inputs of one call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from omni_neuron_parallel import get_group
from omni_neuron_runtime import Component
from omni_neuron_wan22.checkpoint import WanCheckpoint
from omni_neuron_wan22.config import UMT5Config, VaeConfig, WanConfig, WanConfigError
from omni_neuron_wan22.published import I2V_A14B, T2V_A14B, TI2V_5B, PublishedModel
from omni_neuron_wan22.request import DEFAULT_MAX_SEQUENCE_LENGTH
from omni_neuron_wan22.text_encoder import NeuronTextEncoderWrapper
from omni_neuron_wan22.transformer import CrossAttentionKV, WanTransformer3DModel
from omni_neuron_wan22.vae_decoder import NeuronWanDecoder3d
from omni_neuron_wan22.vae_encoder import NeuronWanEncoder3d

COMPONENTS = get_args(Component)


@dataclass(frozen=True)
class WanComponents:
    """The components of these configurations, for `vllm-omni-neuron lower`; each is made where its caller asks.

    Attributes:
        transformer_config, text_encoder_config, vae_config: sizes.
    """

    transformer_config: WanConfig
    text_encoder_config: UMT5Config
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
        """One rank's module, empty, and the keyword arguments of one call; the ranks are those of the parallel groups.

        Weights and activations have torch's default dtype.

        Args:
            component: "transformer", "text_encoder", "vae" (the decoder of every latent frame but the first) or
                "vae_encoder" (the same of the encoder).
            height, width: pixels.
            frames: of the video.
            layers: this many blocks instead of all.
            sequence_parallel: as in `WanTransformer3DModel`.

        Raises:
            WanConfigError: no such component, or `layers` for the VAE.
        """
        if component not in COMPONENTS:
            raise WanConfigError(f"component = {component!r}: valid are {', '.join(COMPONENTS)}")
        if layers is not None and component.startswith("vae"):
            raise WanConfigError(f"layers = {layers}: the VAE is lowered whole")
        grid = self.vae_config.latent_size(height, width, frames)
        if component == "transformer":
            return self._transformer(grid, layers, sequence_parallel)
        if component == "text_encoder":
            return self._text_encoder(layers)
        return self._vae(grid) if component == "vae" else self._vae_encoder(height, width)

    def _transformer(
        self, grid: tuple[int, int, int], layers: int | None, sequence_parallel: bool
    ) -> tuple[nn.Module, dict[str, Any]]:
        config = self.transformer_config
        if layers is not None:
            config = replace(config, num_layers=layers)
        model = WanTransformer3DModel(config, sequence_parallel=sequence_parallel)
        heads = config.num_attention_heads // get_group("tp").size
        shape = (1, heads, DEFAULT_MAX_SEQUENCE_LENGTH, config.attention_head_dim)
        pairs = [(torch.empty(shape), torch.empty(shape)) for _ in range(config.num_layers)]
        if config.image_dim is not None:
            raise WanConfigError(
                f"image_dim = {config.image_dim}: a DiT with image embeddings is not lowered; those of Wan2.2 have none"
            )
        return model, {
            "hidden_states": torch.empty(1, config.in_channels, *grid),
            "timestep": torch.empty(1, dtype=torch.float32),
            "cross_attention_kv_cache": CrossAttentionKV(pairs),
            "return_dict": False,
        }

    def _text_encoder(self, layers: int | None) -> tuple[nn.Module, dict[str, Any]]:
        config = self.text_encoder_config
        if layers is not None:
            config = replace(config, num_layers=layers)
        tokens = torch.zeros(1, DEFAULT_MAX_SEQUENCE_LENGTH, dtype=torch.int64)
        return NeuronTextEncoderWrapper(config), {"input_ids": tokens, "attention_mask": tokens.clone()}

    def _vae(self, grid: tuple[int, int, int]) -> tuple[nn.Module, dict[str, Any]]:
        decoder = NeuronWanDecoder3d(self.vae_config)
        frame = torch.empty(1, self.vae_config.z_dim, 1, *grid[1:])
        return decoder.requires_grad_(False), {
            "latent_frame": frame,
            "feature_cache": decoder.empty_feature_cache(frame),
            "first_chunk": False,
        }

    def _vae_encoder(self, height: int, width: int) -> tuple[nn.Module, dict[str, Any]]:
        config = self.vae_config
        encoder = NeuronWanEncoder3d(config)
        frames = torch.empty(
            1, config.in_channels, config.scale_factor_temporal, height // config.patch, width // config.patch
        )
        return encoder.requires_grad_(False), {
            "chunk": frames,
            "feature_cache": encoder.empty_feature_cache(frames),
            "first_chunk": False,
        }


def t2v_a14b() -> WanComponents:
    """Wan2.2 T2V-A14B."""
    return _of(T2V_A14B)


def i2v_a14b() -> WanComponents:
    """Wan2.2 I2V-A14B."""
    return _of(I2V_A14B)


def ti2v_5b() -> WanComponents:
    """Wan2.2 TI2V-5B, without an image."""
    return _of(TI2V_5B)


def _of(model: PublishedModel) -> WanComponents:
    return WanComponents(model.transformer, model.text_encoder, model.vae)


def from_checkpoint(folder: str | Path) -> WanComponents:
    """The components of a checkpoint folder, from its config.json files; no weights are read.

    Raises:
        WanConfigError: a file is missing, or it is not a model that this package runs.
    """
    checkpoint = WanCheckpoint(Path(folder))
    if not checkpoint.experts:
        raise WanConfigError(f"{checkpoint.path / 'model_index.json'} lists no transformer")
    return WanComponents(
        checkpoint.transformer_config(checkpoint.experts[0]), checkpoint.text_encoder_config, checkpoint.vae_config
    )
