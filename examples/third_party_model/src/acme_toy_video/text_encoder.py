# SPDX-License-Identifier: Apache-2.0
"""The text encoder: a table of tokens, their positions, and one feed-forward layer, split over TP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from omni_neuron_parallel import (
    AxisGroup,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    sinusoidal_embedding,
)
from torch import nn
from vllm_omni_neuron.sdk import Mapping, ShardedComponent, with_biases

from .config import TextEncoderConfig


class TextEncoder(nn.Module):
    """Token ids to the rows that the DiT attends to.

    Args:
        config: sizes.
        group: the TP group.
    """

    def __init__(self, config: TextEncoderConfig, *, group: AxisGroup | None = None):
        super().__init__()
        self.embedding = VocabParallelEmbedding(config.vocab_size, config.width, group=group)
        self.up = ColumnParallelLinear(config.width, config.inner, group=group)
        self.down = RowParallelLinear(config.inner, config.width, group=group)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[B, L]` to `[B, L, width]`, the same on every rank."""
        embedded = self.embedding(token_ids)
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        embedded = embedded + sinusoidal_embedding(positions, embedded.shape[-1]).to(embedded.dtype)
        return embedded + self.down(F.gelu(self.up(embedded)))


def text_encoder_mapping(config: TextEncoderConfig) -> Mapping:
    """Parameter → key in `text_encoder/`."""
    return {"embedding.weight": "embedding.weight", **with_biases({"up": "up", "down": "down"})}


TEXT_ENCODER = ShardedComponent("text_encoder", TextEncoderConfig, TextEncoder, text_encoder_mapping)
