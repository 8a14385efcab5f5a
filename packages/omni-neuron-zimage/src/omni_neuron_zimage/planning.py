# SPDX-License-Identifier: Apache-2.0
"""What `vllm-omni-neuron plan` must know of Z-Image, derived from the configurations. No vLLM needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from omni_neuron_parallel.planning import Linear, ModelSizes, Rows, Split, VaeSizes, Vector, Weights
from omni_neuron_zimage.config import TIMESTEP_FEATURES, TIMESTEP_HIDDEN, ZImageConfig
from vllm_omni_neuron.sdk import DiffusersCheckpoint, VaeTiling

CAPTION_TOKENS = 512  # as the pipeline pads it where a request does not say otherwise
# The autoencoder of the published checkpoints, as far as it has sizes.
PUBLISHED_VAE: Mapping[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


def z_image() -> ModelSizes:
    """Z-Image or Z-Image-Turbo, which have one size, in bfloat16."""
    return model_sizes("z-image", ZImageConfig(), PUBLISHED_VAE)


def from_checkpoint(folder: str | Path) -> ModelSizes:
    """The model of a checkpoint folder, from its config.json files; no weights are read.

    Raises:
        ModelConfigError: a file is missing, or it is not a model that this package runs.
    """
    checkpoint = DiffusersCheckpoint(Path(folder))
    config = checkpoint.config("transformer", ZImageConfig)
    return model_sizes(checkpoint.path.resolve().name, config, checkpoint.raw_config("vae"))


def model_sizes(name: str, config: ZImageConfig, vae: Mapping[str, Any]) -> ModelSizes:
    """Z-Image of these configurations, in bfloat16.

    The noise refiner's layers count as any other, although the caption does not pass through them. The text encoder is
    on the host and takes nothing of a device.
    """
    return ModelSizes(
        name=name,
        experts=1,
        layers=config.n_layers + config.n_refiner_layers,
        heads=config.n_heads,
        head_dim=config.head_dim,
        ffn=config.ffn_dim,
        text_length=CAPTION_TOKENS,
        patch=(1, config.patch_size, config.patch_size),
        branches=2,
        norm_across_heads=False,
        dit=Weights(tuple(_linears(config)), tuple(_vectors(config))),
        text_encoder=Weights(()),
        vae=_vae(vae),
        single_stream=True,
    )


def _linears(config: ZImageConfig) -> Iterator[Linear]:
    dim, inner = config.dim, config.ffn_dim

    def block(count: int, rows: Rows, suffix: str = "") -> Iterator[Linear]:
        def part(name: str, inputs: int, outputs: int, split: Split, alike: int = 1, multiple_of: int = 1) -> Linear:
            return Linear(
                name + suffix, inputs, outputs, alike * count, split, rows, bias=False, multiple_of=multiple_of
            )

        yield part("attention projections", dim, 3 * dim, "column", multiple_of=3 * config.head_dim)
        yield part("attention projections", dim, dim, "row")
        yield part("feed-forward", dim, inner, "column", 2)
        yield part("feed-forward", inner, dim, "row")

    modulated = config.n_layers + config.n_refiner_layers
    yield from block(modulated, "tokens")
    yield from block(config.n_refiner_layers, "text", " of the caption's refiner")
    embeddings = "embeddings, modulation and output"
    yield Linear(embeddings, config.timestep_dim, 4 * dim, modulated, rows="step")
    yield Linear(embeddings, config.timestep_dim, dim, rows="step")
    yield Linear(embeddings, TIMESTEP_FEATURES, TIMESTEP_HIDDEN, rows="step")
    yield Linear(embeddings, TIMESTEP_HIDDEN, config.timestep_dim, rows="step")
    yield Linear(embeddings, config.patch_channels, dim, rows="all")
    yield Linear(embeddings, dim, config.patch_channels, rows="stream")
    yield Linear(embeddings, config.cap_feat_dim, dim, rows="text")


def _vectors(config: ZImageConfig) -> Iterator[Vector]:
    blocks = config.n_layers + 2 * config.n_refiner_layers
    yield Vector(config.dim, 4 * blocks)
    yield Vector(config.head_dim, 2 * blocks)
    yield Vector(config.cap_feat_dim)
    yield Vector(config.dim, 2)  # the pads


def _vae(config: Mapping[str, Any]) -> VaeSizes:
    from diffusers import AutoencoderKL

    with torch.device("meta"):
        model = AutoencoderKL.from_config(dict(config))
    parts = [part for part in (model.decoder, model.post_quant_conv) if part is not None]
    # Of the layers at one resolution the first needs most: shortcut and input as wide as the block before, and output.
    channels = [*reversed(config["block_out_channels"])]
    peaks = [
        (2 * entering + leaving) * 4**index
        for index, (entering, leaving) in enumerate(pairwise([channels[0], *channels]))
    ]
    tiling = VaeTiling()
    return VaeSizes(
        parameters=sum(parameter.numel() for part in parts for parameter in part.parameters()),
        latent_channels=config["latent_channels"],
        spatial_stride=2 ** (len(channels) - 1),
        temporal_stride=1,
        cached_elements=0,
        peak_elements=max(peaks),
        tile_pixels=tiling.tile_sample_min_height,
        tile_stride=tiling.tile_sample_stride_height,
    )
