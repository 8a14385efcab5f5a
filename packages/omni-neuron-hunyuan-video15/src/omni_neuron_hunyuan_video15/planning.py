# SPDX-License-Identifier: Apache-2.0
"""What `vllm-omni-neuron plan` must know of HunyuanVideo-1.5, from the package's own configurations. No vLLM needed."""

from __future__ import annotations

from pathlib import Path

import torch

from omni_neuron_hunyuan_video15.checkpoint import HunyuanVideo15Checkpoint
from omni_neuron_hunyuan_video15.config import HunyuanVideo15Config, VaeConfig
from omni_neuron_hunyuan_video15.embeddings import GLYPH_HIDDEN_SIZE, TIME_FREQUENCIES
from omni_neuron_hunyuan_video15.text import GLYPH_LENGTH, MAX_TEXT_LENGTH
from omni_neuron_parallel.planning import Linear, ModelSizes, Rows, Split, VaeSizes, Vector, Weights
from vllm_omni_neuron.sdk import VaeTiling


def t2v() -> ModelSizes:
    """The published text-to-video model, 480p or 720p, in bfloat16."""
    return model_sizes("hunyuan-video15-t2v", HunyuanVideo15Config(), VaeConfig())


def from_checkpoint(folder: str | Path) -> ModelSizes:
    """The model of a checkpoint folder, from its config.json files; no weights are read.

    Raises:
        ModelConfigError: a file is missing, or it is not a model that this package runs.
    """
    checkpoint = HunyuanVideo15Checkpoint(Path(folder))
    return model_sizes(checkpoint.path.resolve().name, checkpoint.transformer_config, checkpoint.vae_config)


def model_sizes(name: str, dit: HunyuanVideo15Config, vae: VaeConfig) -> ModelSizes:
    """HunyuanVideo-1.5 of these configurations, in bfloat16.

    The text encoders are on the host and take nothing of a device.
    """
    return ModelSizes(
        name=name,
        experts=1,
        layers=dit.num_layers,
        heads=dit.num_attention_heads,
        head_dim=dit.attention_head_dim,
        ffn=dit.ffn_dim,
        text_length=MAX_TEXT_LENGTH + GLYPH_LENGTH,
        patch=(1, 1, 1),
        branches=2,
        norm_across_heads=False,
        dit=_transformer(dit),
        text_encoder=Weights(()),
        vae=_vae(vae),
        joint_text=True,
    )


def _transformer(config: HunyuanVideo15Config) -> Weights:
    dim, layers, refiners = config.hidden_size, config.num_layers, config.num_refiner_layers
    attention, mlp, refiner, embeddings = "attention projections", "feed-forward", "token refiner", "embeddings"
    streams: tuple[Rows, Rows] = ("tokens", "joint")

    def qkv(name: str, count: int, rows: Rows) -> Linear:
        return Linear(name, dim, 3 * dim, count, "column", rows, multiple_of=3 * config.attention_head_dim)

    def refine(inputs: int, outputs: int, split: Split) -> Linear:
        return Linear(refiner, inputs, outputs, refiners, split, "joint")

    linears = (
        *(qkv(attention, layers, rows) for rows in streams),
        *(Linear(attention, dim, dim, layers, "row", rows) for rows in streams),
        *(Linear(mlp, dim, config.ffn_dim, layers, "column", rows) for rows in streams),
        *(Linear(mlp, config.ffn_dim, dim, layers, "row", rows) for rows in streams),
        Linear("modulation", dim, 6 * dim, 2 * layers, "column", "step"),
        qkv(refiner, refiners, "joint"),
        refine(dim, dim, "row"),
        refine(dim, 4 * dim, "column"),
        refine(4 * dim, dim, "row"),
        Linear(refiner, dim, 2 * dim, refiners, rows="step"),
        Linear(refiner, config.text_embed_dim, dim, rows="joint"),
        Linear(refiner, config.text_embed_dim, dim, rows="step"),
        Linear(refiner, dim, dim, rows="step"),
        *(Linear(embeddings, TIME_FREQUENCIES, dim, rows="step") for _ in range(2)),
        *(Linear(embeddings, dim, dim, rows="step") for _ in range(2)),
        Linear(embeddings, dim, 2 * dim, rows="step"),
        Linear(embeddings, config.text_embed_2_dim, GLYPH_HIDDEN_SIZE, rows="joint"),
        Linear(embeddings, GLYPH_HIDDEN_SIZE, GLYPH_HIDDEN_SIZE, rows="joint"),
        Linear(embeddings, GLYPH_HIDDEN_SIZE, dim, rows="joint"),
        Linear(embeddings, config.in_channels, dim, rows="all"),
        Linear(embeddings, dim, config.out_channels, rows="stream"),
    )
    vectors = (
        Vector(config.attention_head_dim, 4 * layers),  # gains of q and k in both streams
        Vector(dim, 4 * refiners),
        Vector(2 * config.text_embed_2_dim),
        Vector(3 * dim),  # kinds of tokens
    )
    return Weights(linears, vectors)


def _vae(config: VaeConfig) -> VaeSizes:
    """The decoder of diffusers' `AutoencoderKLHunyuanVideo15`, which takes all frames of a tile together.

    Its largest layer is a residual block (what is added at its end, the convolution's input before and after padding,
    its output) or an upsampling (its input, the convolution's output as it is and rearranged, the shortcut, their sum).
    """
    from diffusers import AutoencoderKLHunyuanVideo15

    with torch.device("meta"):
        decoder = AutoencoderKLHunyuanVideo15(**vars(config)).decoder
    channels = tuple(reversed(config.block_out_channels))
    spatial, temporal = config.spatial_compression_ratio, config.temporal_compression_ratio
    entering, positions, peak = channels[0], 1, 0
    for index, width in enumerate(channels):
        peak = max(peak, 4 * max(entering, width) * positions)
        if 2**index < spatial:
            factor, entering = 8 if 2**index < temporal else 4, channels[index + 1]
            peak = max(peak, (width + 4 * factor * entering) * positions)
            positions *= factor
    tiling = VaeTiling()
    return VaeSizes(
        parameters=sum(parameter.numel() for parameter in decoder.parameters()),
        latent_channels=config.latent_channels,
        spatial_stride=spatial,
        temporal_stride=temporal,
        cached_elements=0,
        peak_elements=peak,
        tile_pixels=tiling.tile_sample_min_height,
        tile_stride=tiling.tile_sample_stride_height,
        at_once=True,
    )
