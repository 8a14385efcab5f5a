# SPDX-License-Identifier: Apache-2.0
"""Real configurations on the meta device: every parameter and checkpoint key exactly once, shapes agreeing.

Those of T2V-A14B and I2V-A14B are in the conformance kit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers import WanTransformer3DModel as DiffusersTransformer
from torch import nn

from omni_neuron_parallel import AxisGroup
from omni_neuron_wan22 import (
    NeuronAutoencoderKLWan,
    VaeConfig,
    WanConfig,
    WanConfigError,
    WanTransformer3DModel,
    transformer_mapping,
    vae_mapping,
)
from omni_neuron_wan22.published import TI2V_5B
from vllm_omni_neuron.sdk import mapping_coverage

A14B = WanConfig()


class FakeGroup(AxisGroup):
    """A TP group of any size without processes: only construction needs it."""

    def __post_init__(self) -> None:
        pass


def group_of(size: int, rank: int = 0) -> AxisGroup:
    return FakeGroup("tp", tuple(range(size)), rank)


def check_coverage(
    module: nn.Module, mapping: dict[str, str | list[str]], reference: dict[str, torch.Tensor], size: int
) -> None:
    shapes = {key: value.shape for key, value in reference.items()}
    assert not mapping_coverage(module, mapping, shapes, size=size).problems


# What transformer/config.json has unlike T2V-A14B's.
OTHERS: dict[str, dict[str, Any]] = {
    "Wan2.1-FLF2V-14B": {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120, "pos_embed_seq_len": 514},
    "Wan2.2-TI2V-5B": {
        "in_channels": 48,
        "out_channels": 48,
        "num_attention_heads": 24,
        "ffn_dim": 14336,
        "num_layers": 30,
    },
}


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("name", OTHERS)
def test_transformer(name: str, size: int) -> None:
    with torch.device("meta"):
        reference = DiffusersTransformer(**OTHERS[name])
        config = WanConfig.from_dict(dict(reference.config))
        model = WanTransformer3DModel(config, group=group_of(size))
    check_coverage(model, transformer_mapping(config), dict(reference.state_dict()), size)
    if name == "Wan2.2-TI2V-5B":
        assert config == TI2V_5B.transformer


# vae/config.json of Wan2.2-TI2V-5B, which ships VAE 2.2.
TI2V_5B_VAE = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
}


def test_vae() -> None:
    statistics = {"latents_mean": [0.0] * 48, "latents_std": [1.0] * 48}
    with torch.device("meta"):
        reference = AutoencoderKLWan(**TI2V_5B_VAE, **statistics)
        config = VaeConfig.from_dict(dict(reference.config))
        decoder, both = NeuronAutoencoderKLWan(config), NeuronAutoencoderKLWan(config, encoder=True)
    state = reference.state_dict()
    check_coverage(both, vae_mapping(config, encoder=True), state, 1)
    of_decoder = {key: value for key, value in state.items() if not key.startswith(("encoder.", "quant_conv."))}
    check_coverage(decoder, vae_mapping(config), of_decoder, 1)


@pytest.mark.parametrize("size", [3, 6, 16, 0])
def test_tensor_parallel_sizes_that_do_not_divide_the_heads(size: int) -> None:
    with pytest.raises(WanConfigError, match=rf"tensor_parallel_size = {size}.*40 attention heads.*1, 2, 4, 5, 8, 10"):
        A14B.check_tensor_parallel(size)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in_channels": 12}, "in_channels = 12, out_channels = 16"),
        ({"image_dim": 1280}, "image_dim = 1280, added_kv_proj_dim = None"),
        ({"image_dim": 1280, "added_kv_proj_dim": 1280}, "added_kv_proj_dim = 1280: .* 5120"),
        ({"qk_norm": None}, "rms_norm_across_heads"),
    ],
)
def test_other_wan_models_are_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(WanConfigError, match=message):
        WanConfig.from_dict({"num_layers": 2, **change})
