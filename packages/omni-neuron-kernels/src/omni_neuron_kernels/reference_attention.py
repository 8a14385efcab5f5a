# SPDX-License-Identifier: Apache-2.0
"""Attention in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

# Scores exist for a slice of the queries at a time: 16 MiB of float32, whatever the number of keys.
_SCORES_AT_ONCE = 1 << 22


class RingGroup(Protocol):
    """The ranks that share a sequence; omni-neuron-parallel's `AxisGroup` is one."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks in the order of their blocks, which is that of the ring."""

    @property
    def rank(self) -> int:
        """The place of this process in `ranks`."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The ranks' tensors, all of one shape, joined along `dim` in the order of `ranks`."""


class RingAttention(NamedTuple):
    """What `ring_attention` returns.

    Attributes:
        output: `[B, S_q, N, D]` in q's dtype.
        lse: float32 `[B, N, S_q]`, log Σ exp(scale · q·k); None unless asked for.
        lost_rows: int64 without dims, the rows of this rank whose softmax denominator is zero, infinite or not a
            number, and which therefore hold no result. Zero for finite scores, by proof.
    """

    output: torch.Tensor
    lse: torch.Tensor | None
    lost_rows: torch.Tensor


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    key_length: int,
    key_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ops_attention.flash_attention`."""
    k, v = k[:, :key_length], v[:, :key_length]
    mask = None if key_mask is None else key_mask[:, None, None, :key_length]
    if key_mask is not None:
        # A masked value counts for nothing, whatever it is; zero times infinity would not be nothing.
        chosen = key_mask[:, :key_length, None, None]
        k, v = torch.where(chosen, k, 0), torch.where(chosen, v, 0)
    return F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    ).transpose(1, 2)


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: RingGroup,
    replica_groups: Sequence[Sequence[int]],
    scale: float,
    key_length: int,
    key_mask: torch.Tensor | None,
    return_lse: bool,
    kv_prefetch_depth: int,
) -> RingAttention:
    """See `ops_attention.ring_attention`; nothing travels in a ring here, keys and values are gathered."""
    if group.size > 1:
        k, v = group.all_gather(torch.stack([k, v]), dim=2).unbind(0)
        key_mask = None if key_mask is None else group.all_gather(key_mask, dim=1)
    output = flash_attention(q, k, v, scale=scale, key_length=key_length, key_mask=key_mask)
    mask = None if key_mask is None else key_mask[:, :key_length]
    lse = log_sum_exp(q, k[:, :key_length], scale, mask)
    return RingAttention(output, lse if return_lse else None, (~lse.isfinite()).sum())


def ring_in_graph(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    key_mask: torch.Tensor | None,
    scale: float,
    replica_groups: tuple[tuple[int, ...], ...],
    kv_prefetch_depth: int,
) -> torch.Tensor:
    """See `nki_attention.ring_in_graph`; of a ring of one rank (`several_ranks`)."""
    refusal = several_ranks(q, k, v, replica_groups=replica_groups)
    if refusal is not None:
        raise ValueError(refusal)
    return flash_attention(q, k, v, scale=scale, key_length=k.shape[1], key_mask=key_mask)


def several_ranks(*tensors: torch.Tensor, replica_groups: tuple[tuple[int, ...], ...], **options: Any) -> str | None:
    """Why not `ring_in_graph`: a node holds its collectives, and a reference has none."""
    ranks = len(replica_groups[0])
    return None if ranks == 1 else f"a ring of {ranks} ranks in one node has no torch reference"


def log_sum_exp(q: torch.Tensor, k: torch.Tensor, scale: float, key_mask: torch.Tensor | None = None) -> torch.Tensor:
    """log Σ exp(scale · q·k) of every row, which torch's attention keeps to itself.

    Args:
        q: `[B, S_q, N, D]`.
        k: `[B, S_k, N_k, D]`, N a multiple of N_k.
        scale: factor of the scores.
        key_mask: bool `[B, S_k]`, true for keys that take part; None: all.

    Returns:
        float32 `[B, N, S_q]`.
    """
    queries, keys = q.transpose(1, 2).float() * scale, k.transpose(1, 2).float()
    keys = keys.repeat_interleave(q.shape[2] // k.shape[2], 1)
    batch, heads, rows, _ = queries.shape
    step = max(1, _SCORES_AT_ONCE // max(1, batch * heads * keys.shape[2]))
    parts = []
    for first in range(0, rows, step):
        scores = queries[:, :, first : first + step] @ keys.mT
        if key_mask is not None:
            scores = scores.masked_fill(~key_mask[:, None, None], -torch.inf)
        parts.append(scores.logsumexp(-1))
    return torch.cat(parts, dim=-1)
