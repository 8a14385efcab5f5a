# SPDX-License-Identifier: Apache-2.0
"""The real configurations on the meta device: every parameter and checkpoint key exactly once, shapes agreeing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers import WanTransformer3DModel as DiffusersTransformer
from torch import nn
from transformers import UMT5Config as ReferenceUMT5Config
from transformers import UMT5EncoderModel

from omni_neuron_parallel import AxisGroup, shard_size
from omni_neuron_runtime import get_weight_loader
from omni_neuron_wan22 import (
    NeuronAutoencoderKLWan,
    NeuronTextEncoderWrapper,
    UMT5Config,
    VaeConfig,
    WanConfig,
    WanConfigError,
    WanTransformer3DModel,
    text_encoder_mapping,
    transformer_mapping,
    vae_mapping,
)
from omni_neuron_wan22.published import I2V_A14B, TI2V_5B

A14B = WanConfig()
UMT5_XXL = UMT5Config()


class FakeGroup(AxisGroup):
    """A TP group of any size without processes: only construction needs it."""

    def __post_init__(self) -> None:
        pass


def group_of(size: int, rank: int = 0) -> AxisGroup:
    return FakeGroup("tp", tuple(range(size)), rank)


class MetaSlice:
    """A safetensors slice without data: loaders see its shape and cut meta tensors out of it."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype):
        self._tensor = torch.empty(shape, dtype=dtype, device="meta")
        self.elements_read = 0

    @property
    def numel(self) -> int:
        return self._tensor.numel()

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: object) -> torch.Tensor:
        part = self._tensor[index]  # type: ignore[index]
        self.elements_read += part.numel()
        return part


def check_coverage(
    module: nn.Module, mapping: dict[str, str | list[str]], reference: dict[str, torch.Tensor], size: int
) -> None:
    parameters = dict(module.named_parameters())
    assert set(mapping) == set(parameters)
    used = Counter(key for keys in mapping.values() for key in ([keys] if isinstance(keys, str) else keys))
    assert set(used.values()) == {1}
    assert set(used) == set(reference)
    for name, keys in mapping.items():
        slices = [MetaSlice(reference[key].shape, torch.float32) for key in ([keys] if isinstance(keys, str) else keys)]
        for rank in range(size):
            shard = get_weight_loader(parameters[name]).load(slices, rank)
            assert shard.shape == parameters[name].shape, (name, rank)
        for part in slices:
            # Either the ranks share the tensor without gap or overlap, or every rank reads all of it.
            assert part.elements_read in (part.numel, size * part.numel), (name, part.elements_read)


@pytest.fixture(scope="module")
def a14b_state() -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        return dict(DiffusersTransformer().state_dict())


@pytest.mark.parametrize("size", [1, 2, 4, 5, 8])
def test_both_experts(a14b_state: dict[str, torch.Tensor], size: int) -> None:
    # A14B's experts share this configuration and these keys; each is loaded from a folder of its own.
    with torch.device("meta"):
        model = WanTransformer3DModel(A14B, group=group_of(size))
    check_coverage(model, transformer_mapping(A14B), a14b_state, size)
    assert model.blocks[0].attn1.qkv.weight.shape == (3 * 5120 // size, 5120)  # type: ignore[union-attr]
    assert model.blocks[0].ffn.up.weight.shape == (shard_size(13824, size), 5120)  # type: ignore[union-attr]


# What transformer/config.json of the other checkpoints has unlike T2V-A14B's.
OTHERS: dict[str, dict[str, Any]] = {
    "Wan2.2-I2V-A14B": {"in_channels": 36},
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
def test_image_to_video_and_ti2v(name: str, size: int) -> None:
    with torch.device("meta"):
        reference = DiffusersTransformer(**OTHERS[name])
        config = WanConfig.from_dict(dict(reference.config))
        model = WanTransformer3DModel(config, group=group_of(size))
    check_coverage(model, transformer_mapping(config), dict(reference.state_dict()), size)
    published = {"Wan2.2-I2V-A14B": I2V_A14B, "Wan2.2-TI2V-5B": TI2V_5B}
    if name in published:
        assert config == published[name].transformer


@pytest.mark.parametrize("size", [1, 2, 4, 5, 8])
def test_text_encoder(size: int) -> None:
    config = ReferenceUMT5Config(
        vocab_size=256384,
        d_model=4096,
        d_kv=64,
        d_ff=10240,
        num_layers=24,
        num_heads=64,
        feed_forward_proj="gated-gelu",
    )
    with torch.device("meta"):
        reference = dict(UMT5EncoderModel(config).state_dict())
        model = NeuronTextEncoderWrapper(UMT5_XXL, group=group_of(size))
    reference.pop("encoder.embed_tokens.weight", None)
    check_coverage(model, text_encoder_mapping(UMT5_XXL), reference, size)


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


@pytest.mark.parametrize("changes", [{}, TI2V_5B_VAE], ids=["2.1", "2.2"])
def test_vae(changes: dict[str, Any]) -> None:
    z_dim = changes.get("z_dim", 16)
    statistics = {"latents_mean": [0.0] * z_dim, "latents_std": [1.0] * z_dim}
    with torch.device("meta"):
        reference = AutoencoderKLWan(**changes, **statistics)
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
