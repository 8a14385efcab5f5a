# SPDX-License-Identifier: Apache-2.0
"""The UMT5 encoder, tensor-parallel: heads, feed-forward and vocabulary split over TP.

Sizes that TP does not divide are padded with zero heads, features and rows, which change nothing; so any TP size that
the DiT accepts suits the encoder too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from omni_neuron_parallel import (
    AxisGroup,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    get_group,
    shard_size,
)
from omni_neuron_runtime import set_weight_loader, sharding_weight_loader
from omni_neuron_wan22.config import UMT5Config


class TextEncoderOutput(NamedTuple):
    """What the encoder returns: `last_hidden_state` `[B, L, d_model]`, zero at padded positions."""

    last_hidden_state: torch.Tensor


class UMT5LayerNorm(nn.Module):
    """RMS norm with a gain over the last dim; the arithmetic is float32, dtype as given."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """See the class."""
        widened = hidden.float()
        scaled = widened * torch.rsqrt(widened.square().mean(-1, keepdim=True) + self.eps)
        return (scaled * self.weight.float()).to(hidden.dtype)


def relative_position_buckets(num_buckets: int, max_distance: int) -> torch.Tensor:
    """The bucket (int64) of every distance from −max_distance to max_distance, keys after the query being positive.

    Half of the buckets are for keys after the query. In each half the first half are exact distances, the rest grow
    logarithmically; from `max_distance` on it is the last one (Raffel et al. 2020, section 2.1). A table, so that the
    logarithm is taken on the CPU and once.
    """
    distance = torch.arange(-max_distance, max_distance + 1, device="cpu")
    half = num_buckets // 2
    exact = half // 2
    magnitude = distance.abs()
    # clamp: log(0) is not used, but its conversion to an integer is undefined
    growth = torch.log(magnitude.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (half - exact)
    far = (exact + growth.long()).clamp(max=half - 1)
    return torch.where(magnitude < exact, magnitude, far) + (distance > 0) * half


class UMT5RelativePositionBias(nn.Module):
    """A learned bias for every bucket and head, split over TP by head. UMT5 has one a layer, T5 one in all."""

    def __init__(self, config: UMT5Config, group: AxisGroup):
        super().__init__()
        heads = shard_size(config.num_heads, group.size)
        self.weight = nn.Parameter(torch.empty(config.relative_attention_num_buckets, heads), requires_grad=False)
        loader = sharding_weight_loader(1, heads, group.size, full_size=config.num_heads)
        set_weight_loader(self.weight, loader)

    def forward(self, buckets: torch.Tensor) -> torch.Tensor:
        """Buckets `[L, L]` to `[1, N / tp, L, L]`."""
        return F.embedding(buckets, self.weight).permute(2, 0, 1).unsqueeze(0)


class UMT5SelfAttention(nn.Module):
    """Self-attention with unscaled scores plus the relative-position bias; heads split over TP."""

    def __init__(self, config: UMT5Config, group: AxisGroup):
        super().__init__()
        self.head_dim = config.d_kv
        inner, head = config.num_heads * config.d_kv, config.d_kv
        self.q = ColumnParallelLinear(config.d_model, inner, bias=False, multiple_of=head, group=group)
        self.k = ColumnParallelLinear(config.d_model, inner, bias=False, multiple_of=head, group=group)
        self.v = ColumnParallelLinear(config.d_model, inner, bias=False, multiple_of=head, group=group)
        self.o = RowParallelLinear(inner, config.d_model, bias=False, multiple_of=head, group=group)
        self.relative_attention_bias = UMT5RelativePositionBias(config, group)

    def forward(self, hidden: torch.Tensor, buckets: torch.Tensor, mask_bias: torch.Tensor) -> torch.Tensor:
        """`[B, L, d_model]` to the same; `mask_bias` `[B, 1, 1, L]`, float32, is added to the scores."""
        query, key, value = (
            projection(hidden).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        # Not torch's attention: its mask would be in the graph, which Lite does not legalise.
        bias = self.relative_attention_bias(buckets).float() + mask_bias
        weights = ((query @ key.mT).float() + bias).softmax(-1).to(value.dtype)
        return self.o((weights @ value).transpose(1, 2).flatten(2))


class UMT5GatedFeedForward(nn.Module):
    """`wo(gelu(wi_0 x) · wi_1 x)` with the tanh-approximated GELU; inner features split over TP."""

    def __init__(self, config: UMT5Config, group: AxisGroup):
        super().__init__()
        self.wi_0 = ColumnParallelLinear(config.d_model, config.d_ff, bias=False, group=group)
        self.wi_1 = ColumnParallelLinear(config.d_model, config.d_ff, bias=False, group=group)
        self.wo = RowParallelLinear(config.d_ff, config.d_model, bias=False, group=group)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[B, L, d_model]` to the same."""
        return self.wo(F.gelu(self.wi_0(hidden), approximate="tanh") * self.wi_1(hidden))


class UMT5Block(nn.Module):
    """Self-attention and feed-forward, each after a norm and added to the stream."""

    def __init__(self, config: UMT5Config, group: AxisGroup):
        super().__init__()
        self.attention_norm = UMT5LayerNorm(config.d_model, config.layer_norm_epsilon)
        self.attention = UMT5SelfAttention(config, group)
        self.ffn_norm = UMT5LayerNorm(config.d_model, config.layer_norm_epsilon)
        self.ffn = UMT5GatedFeedForward(config, group)

    def forward(self, hidden: torch.Tensor, buckets: torch.Tensor, mask_bias: torch.Tensor) -> torch.Tensor:
        """`[B, L, d_model]` to the same."""
        hidden = hidden + self.attention(self.attention_norm(hidden), buckets, mask_bias)
        return hidden + self.ffn(self.ffn_norm(hidden))


class NeuronTextEncoderWrapper(nn.Module):
    """UMT5 encoder of one rank of a TP group; parameters are empty until loaded (`load_text_encoder`).

    Args:
        config: sizes.
        group: the TP group; this process's by default.
    """

    def __init__(self, config: UMT5Config, *, group: AxisGroup | None = None):
        super().__init__()
        group = group or get_group("tp")
        self.config = config
        self.embedding = VocabParallelEmbedding(config.vocab_size, config.d_model, group=group)
        self.blocks = nn.ModuleList(UMT5Block(config, group) for _ in range(config.num_layers))
        self.final_norm = UMT5LayerNorm(config.d_model, config.layer_norm_epsilon)
        self.max_distance = config.relative_attention_max_distance
        table = relative_position_buckets(config.relative_attention_num_buckets, self.max_distance)
        self.register_buffer("buckets", table, persistent=False)
        self.buckets: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations."""
        return self.final_norm.weight.dtype

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> TextEncoderOutput:
        """Encode a padded batch.

        Args:
            input_ids: `[B, L]` int64.
            attention_mask: `[B, L]`, 1 for text, 0 for padding.

        Returns:
            The hidden states; those of padded positions are set to zero inside the graph, as Wan expects them.
        """
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        distance = positions[None, :] - positions[:, None]
        buckets = self.buckets[distance.clamp(-self.max_distance, self.max_distance) + self.max_distance]
        keep = attention_mask.to(self.dtype)
        mask_bias = (1.0 - keep.float())[:, None, None, :] * torch.finfo(torch.float32).min
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden, buckets, mask_bias)
        return TextEncoderOutput(self.final_norm(hidden) * keep.unsqueeze(-1))
