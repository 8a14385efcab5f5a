# SPDX-License-Identifier: Apache-2.0
"""The attention backend against a softmax written out."""

from __future__ import annotations

import pytest
import torch
from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata

from vllm_omni_neuron import NeuronSDPABackend, NeuronSDPAImpl

BATCH, QUERIES, KEYS, HEADS, HEAD_DIM = 2, 5, 7, 4, 8


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *, causal: bool = False
) -> torch.Tensor:
    """Attention of `[batch, sequence, heads, head_dim]` in float64; `mask` is `[batch, keys]`, true where valid."""
    repeat = query.shape[2] // key.shape[2]
    key, value = (tensor.repeat_interleave(repeat, dim=2).double() for tensor in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query.double(), key) / HEAD_DIM**0.5
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None, :].bool(), float("-inf"))
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value).float()


def tensors(kv_heads: int = HEADS, keys: int = KEYS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(BATCH, QUERIES, HEADS, HEAD_DIM, generator=generator)
    key = torch.randn(BATCH, keys, kv_heads, HEAD_DIM, generator=generator)
    return query, key, torch.randn(key.shape, generator=generator)


def implementation(*, causal: bool = False) -> NeuronSDPAImpl:
    assert NeuronSDPABackend.get_impl_cls() is NeuronSDPAImpl
    return NeuronSDPAImpl(num_heads=HEADS, head_size=HEAD_DIM, softmax_scale=HEAD_DIM**-0.5, causal=causal)


@pytest.mark.parametrize("kv_heads", [HEADS, 2, 1])
@pytest.mark.parametrize("dtype", [None, torch.bool, torch.int64])
def test_key_mask_and_grouped_heads(kv_heads: int, dtype: torch.dtype | None) -> None:
    query, key, value = tensors(kv_heads)
    mask = None
    if dtype is not None:
        mask = torch.tensor([[1] * KEYS, [1, 1, 1, 0, 0, 0, 0]]).to(dtype)
    output = implementation().forward(query, key, value, AttentionMetadata(attn_mask=mask))
    assert output.shape == query.shape
    torch.testing.assert_close(output, attend(query, key, value, mask), rtol=1e-5, atol=1e-6)


def test_without_metadata_and_causal() -> None:
    query, key, value = tensors(keys=QUERIES)
    torch.testing.assert_close(implementation().forward(query, key, value), attend(query, key, value, None))
    torch.testing.assert_close(
        implementation(causal=True).forward(query, key, value), attend(query, key, value, None, causal=True)
    )


def test_masked_keys_do_not_count() -> None:
    query, key, value = tensors()
    mask = torch.ones(BATCH, KEYS, dtype=torch.bool)
    mask[:, 4:] = False
    metadata = AttentionMetadata(attn_mask=mask)
    before = implementation().forward(query, key, value, metadata)
    key[:, 4:], value[:, 4:] = 1e4, -1e4
    torch.testing.assert_close(implementation().forward(query, key, value, metadata), before, rtol=0, atol=0)
