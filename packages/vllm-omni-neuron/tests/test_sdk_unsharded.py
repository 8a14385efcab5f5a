# SPDX-License-Identifier: Apache-2.0
"""Components that run whole: loaded by the class that the checkpoint names, run on one rank for all."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_neuron_parallel import RankPool
from omni_neuron_runtime import CheckpointError
from vllm_omni_neuron.sdk import (
    DiffusersCheckpoint,
    ModelConfigError,
    load_transformers,
    on_output_rank,
    write_model_index,
)

sys.path.insert(0, str(Path(__file__).parent))  # spawned ranks inherit it

import unsharded_ranks


def same(found: Any, expected: Any) -> bool:
    (ids, nothing), states, length = found["ids"], found["states"], found["length"]
    assert type(found["ids"]) is unsharded_ranks.Encoded
    tensors = zip((ids, *states), (expected["ids"][0], *expected["states"]), strict=True)
    return nothing is None and length == 6 and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in tensors)


def test_one_rank_computes_for_all() -> None:
    expected = unsharded_ranks.made()
    assert same(on_output_rank(unsharded_ranks.made), expected)
    with RankPool(2) as pool:
        assert all(same(found, expected) for found in pool.run(unsharded_ranks.broadcast, "cpu"))
        # Its error is everybody's, at once.
        assert pool.run(unsharded_ranks.failing) == [
            "ValueError: no such prompt",
            "RuntimeError: rank 0, which computes for every rank, failed: ValueError: no such prompt",
        ]


def test_a_text_encoder(tmp_path: Path) -> None:
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    config = T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    theirs = T5EncoderModel(config).eval()
    theirs.save_pretrained(tmp_path / "text_encoder")
    checkpoint = DiffusersCheckpoint(tmp_path)
    write_model_index(tmp_path, "SomePipeline", {"text_encoder": ("transformers", "T5EncoderModel")})
    ours = load_transformers(checkpoint, "text_encoder", dtype=torch.float32)
    assert type(ours) is T5EncoderModel and not ours.training
    assert not any(parameter.requires_grad for parameter in ours.parameters())
    ids = torch.arange(5)[None]
    assert torch.equal(ours(ids).last_hidden_state, theirs(ids).last_hidden_state)
    assert load_transformers(checkpoint, "text_encoder", dtype=torch.bfloat16).dtype == torch.bfloat16

    file = tmp_path / "text_encoder" / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-64])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*bytes"):
        load_transformers(checkpoint, "text_encoder", dtype=torch.float32)
    file.write_bytes(whole.replace(b"final_layer_norm.weight", b"final_layer_norm.height"))
    with pytest.raises(CheckpointError, match=r"missing 1 tensor\(s\) of T5EncoderModel: encoder\.final_layer_norm"):
        load_transformers(checkpoint, "text_encoder", dtype=torch.float32)
    for entry, message in (
        (("diffusers", "AutoencoderKL"), "valid is a class of transformers"),
        (("transformers", "NoSuchModel"), "has no NoSuchModel"),
    ):
        write_model_index(tmp_path, "SomePipeline", {"text_encoder": entry})
        with pytest.raises(ModelConfigError, match=message):
            load_transformers(DiffusersCheckpoint(tmp_path), "text_encoder", dtype=torch.float32)
    # Without an index entry config.json names the class.
    file.write_bytes(whole)
    write_model_index(tmp_path, "SomePipeline", {})
    loaded = load_transformers(DiffusersCheckpoint(tmp_path), "text_encoder", dtype=torch.float32)
    assert type(loaded) is T5EncoderModel
