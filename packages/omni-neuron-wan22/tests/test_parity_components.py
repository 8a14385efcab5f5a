# SPDX-License-Identifier: Apache-2.0
"""Every component against diffusers or transformers on the same checkpoint, at TP 1, 2 and 4."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import UMT5EncoderModel
from wan22_reference import dit_inputs, on_ranks, relative_l2, run_text_encoder, run_transformer

from omni_neuron_parallel import RankPool
from omni_neuron_wan22 import WanCheckpoint, load_transformer, load_vae
from omni_neuron_wan22.transformer import fold_padding

TP_SIZES = pytest.mark.parametrize("pool", [1, 2, 4], indirect=True, ids=["tp1", "tp2", "tp4"])


@TP_SIZES
@pytest.mark.parametrize("expert", ["transformer", "transformer_2"])
def test_transformer_float32(tiny: Path, pool: RankPool | None, expert: str) -> None:
    reference = WanTransformer3DModel.from_pretrained(tiny / expert)
    expected = reference(**dit_inputs(), return_dict=False)[0]
    for actual in on_ranks(pool, run_transformer, str(tiny), expert, torch.float32):
        assert relative_l2(actual, expected) <= 1e-5


@TP_SIZES
def test_transformer_bfloat16_is_as_near_to_float32_as_diffusers(tiny: Path, pool: RankPool | None) -> None:
    expected = WanTransformer3DModel.from_pretrained(tiny / "transformer")(**dit_inputs(), return_dict=False)[0]
    low = WanTransformer3DModel.from_pretrained(tiny / "transformer", torch_dtype=torch.bfloat16)
    inputs = {name: value if name == "timestep" else value.bfloat16() for name, value in dit_inputs().items()}
    theirs = relative_l2(low(**inputs, return_dict=False)[0], expected)
    for actual in on_ranks(pool, run_transformer, str(tiny), "transformer", torch.bfloat16):
        assert actual.dtype is torch.bfloat16
        assert relative_l2(actual, expected) <= 1.25 * theirs


@pytest.mark.parametrize("length", [0, 1, 13, 31, 32])
def test_folded_padding_is_the_same_attention(tiny: Path, length: int) -> None:
    """512 padded rows or one with log 512 added to its score: Wan's cross-attention has no mask."""
    model = load_transformer(WanCheckpoint(tiny), "transformer", dtype=torch.float32)
    inputs = dit_inputs()
    text = inputs.pop("encoder_hidden_states")
    text[:, length:] = 0
    reference = WanTransformer3DModel.from_pretrained(tiny / "transformer")
    expected = reference(**inputs, encoder_hidden_states=text, return_dict=False)[0]
    folded, bias = fold_padding(text, length)
    assert folded.shape[1] == min(length + 1, 32)
    cache = model.project_cross_attention_kv(folded, bias)
    assert relative_l2(model(**inputs, cross_attention_kv_cache=cache).sample, expected) <= 1e-5


@TP_SIZES
def test_text_encoder(tiny: Path, pool: RankPool | None) -> None:
    ids = torch.randint(3, 190, (2, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 23:] = 0
    mask[1, 1:] = 0
    reference = UMT5EncoderModel.from_pretrained(tiny / "text_encoder")
    expected = reference(ids, mask).last_hidden_state * mask[:, :, None]
    low = UMT5EncoderModel.from_pretrained(tiny / "text_encoder", dtype=torch.bfloat16)
    theirs = relative_l2(low(ids, mask).last_hidden_state * mask[:, :, None], expected)
    for actual in on_ranks(pool, run_text_encoder, str(tiny), torch.float32, ids, mask):
        assert relative_l2(actual, expected) <= 1e-5
        assert not actual[mask == 0].any()
    for actual in on_ranks(pool, run_text_encoder, str(tiny), torch.bfloat16, ids, mask):
        assert relative_l2(actual, expected) <= 1.25 * theirs


@pytest.mark.parametrize("frames", [1, 2, 5])
def test_vae_decode(tiny: Path, frames: int) -> None:
    latents = torch.randn(1, 16, frames, 6, 10, generator=torch.Generator().manual_seed(2))
    reference = AutoencoderKLWan.from_pretrained(tiny / "vae")
    expected = reference.decode(latents, return_dict=False)[0]
    actual = load_vae(WanCheckpoint(tiny), dtype=torch.float32).decode(latents)
    assert actual.shape == expected.shape == (1, 3, 4 * frames - 3, 48, 80)
    assert relative_l2(actual, expected) <= 1e-4


def test_vae_decode_bfloat16(tiny: Path) -> None:
    latents = torch.randn(1, 16, 2, 6, 10, generator=torch.Generator().manual_seed(2))
    expected = AutoencoderKLWan.from_pretrained(tiny / "vae").decode(latents, return_dict=False)[0]
    low = AutoencoderKLWan.from_pretrained(tiny / "vae", torch_dtype=torch.bfloat16)
    theirs = relative_l2(low.decode(latents.bfloat16(), return_dict=False)[0], expected)
    actual = load_vae(WanCheckpoint(tiny), dtype=torch.bfloat16).decode(latents.bfloat16())
    assert relative_l2(actual, expected) <= 1.25 * theirs


def test_feature_cache_shapes_are_the_same_for_first_and_later_chunks(tiny: Path) -> None:
    decoder = load_vae(WanCheckpoint(tiny), dtype=torch.float32).decoder
    frame = torch.randn(1, 16, 1, 4, 4)
    cache = decoder.empty_feature_cache(frame)
    shapes = [tensor.shape for tensor in cache]
    first, cache = decoder(frame, cache, first_chunk=True)
    assert [tensor.shape for tensor in cache] == shapes
    later, cache = decoder(frame, cache, first_chunk=False)
    assert [tensor.shape for tensor in cache] == shapes
    assert (first.shape[2], later.shape[2]) == (1, 4)
