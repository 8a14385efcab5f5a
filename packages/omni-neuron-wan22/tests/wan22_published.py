# SPDX-License-Identifier: Apache-2.0
"""The published models on the meta device for the conformance kit: our modules, and the keys of diffusers' classes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from diffusers import AutoencoderKLWan
from diffusers import WanTransformer3DModel as DiffusersTransformer
from torch import nn
from transformers import UMT5Config, UMT5EncoderModel

from omni_neuron_testkit.conformance import Published
from omni_neuron_wan22 import (
    NeuronAutoencoderKLWan,
    NeuronTextEncoderWrapper,
    WanTransformer3DModel,
    text_encoder_mapping,
    transformer_mapping,
    vae_mapping,
)
from omni_neuron_wan22.mapping import UNUSED_TEXT_ENCODER_KEYS, UNUSED_VAE_PREFIXES
from omni_neuron_wan22.published import PublishedModel

# config.json of the text encoder, which all published models share.
UMT5_XXL = {
    "vocab_size": 256384,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}


@functools.cache
def shapes_of(make: Callable[[], nn.Module]) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {key: tuple(value.shape) for key, value in make().state_dict().items()}


def umt5() -> nn.Module:
    return UMT5EncoderModel(UMT5Config(**UMT5_XXL))


def vae_2_1() -> nn.Module:
    return AutoencoderKLWan(latents_mean=[0.0] * 16, latents_std=[1.0] * 16)


def published(
    model: PublishedModel, transformer: Callable[[], nn.Module] = DiffusersTransformer, *, encoder: bool = False
) -> dict[str, Published]:
    """The components of `model`.

    Args:
        model: our configurations.
        transformer: makes diffusers' DiT from what the published config.json says.
        encoder: whether the VAE encodes, too.
    """
    mapping = transformer_mapping(model.transformer)
    with torch.device("meta"):
        experts = [WanTransformer3DModel(model.transformer) for _ in range(model.experts)]
        text_encoder = NeuronTextEncoderWrapper(model.text_encoder)
        vae = NeuronAutoencoderKLWan(model.vae, encoder=encoder)
    of_vae = shapes_of(vae_2_1)
    return {
        **{
            name: Published(expert, mapping, shapes_of(transformer))
            for name, expert in zip(("transformer", "transformer_2"), experts, strict=False)
        },
        "text_encoder": Published(
            text_encoder, text_encoder_mapping(model.text_encoder), shapes_of(umt5), UNUSED_TEXT_ENCODER_KEYS
        ),
        "vae": Published(vae, vae_mapping(model.vae, encoder=encoder), of_vae, () if encoder else UNUSED_VAE_PREFIXES),
    }
