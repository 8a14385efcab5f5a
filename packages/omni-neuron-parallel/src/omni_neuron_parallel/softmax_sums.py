# SPDX-License-Identifier: Apache-2.0
"""Attention as sums over blocks of keys that are divided at the end, with or without a running maximum."""

from __future__ import annotations

from collections.abc import Iterator

import torch

# Scores exist for a slice of the queries at a time: 16 MiB of float32, whatever the number of keys.
_SCORES_AT_ONCE = 1 << 22


class HeadSums:
    """Attention of some heads over the blocks added so far, not yet divided: Σ exp(s − peak)·v and Σ exp(s − peak).

    Bounded heads have no peak (it is zero), and their blocks merge by addition. The others carry the running maximum;
    the three numbers are a partial result in log-sum-exp space, lse = peak + log Σ (Milakov & Gimelshein 2018).

    Args:
        q: `[B, S_q, N, D]`, the queries of all heads.
        scale: factor of the scores.
        heads: int64 indices of the heads to sum.
        bounded: no peak; only for heads that `bounded_softmax_is_safe` has proven safe.
    """

    def __init__(self, q: torch.Tensor, scale: float, heads: torch.Tensor, bounded: bool):
        self.heads, self.bounded = heads, bounded
        self._all_heads = len(heads) == q.shape[2]
        self._queries = self._select(q) * scale
        batch, count, rows, dim = self._queries.shape
        self._peak = None if bounded else q.new_full((batch, count, rows, 1), -torch.inf, dtype=torch.float32)
        self._weights = q.new_zeros(batch, count, rows, 1, dtype=torch.float32)
        self._values = q.new_zeros(batch, count, rows, dim, dtype=torch.float32)

    def _select(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[B, S, N, D]` to this object's heads, float32 `[B, heads, S, D]`."""
        chosen = tensor if self._all_heads else tensor.index_select(2, self.heads)
        return chosen.transpose(1, 2).float()

    def add(self, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Attend to a block of at least one key: `[B, S_block, N, D]` each.

        `mask`, bool `[B, S_block]`, is true for those that take part; it may leave none. The others hold finite values.
        """
        keys, values = self._select(k), self._select(v)
        for rows in _row_slices(self._queries, keys):
            scores = self._queries[:, :, rows] @ keys.mT
            if mask is not None:
                scores.masked_fill_(~mask[:, None, None], -torch.inf)
            if self._peak is not None:
                peak = torch.maximum(self._peak[:, :, rows], scores.amax(-1, keepdim=True))
                # Without a key so far the peak is −∞, and −∞ − −∞ is not a number.
                shift = peak if mask is None else peak.masked_fill(peak == -torch.inf, 0)
                decay = (self._peak[:, :, rows] - shift).exp()
                self._weights[:, :, rows] *= decay
                self._values[:, :, rows] *= decay
                self._peak[:, :, rows] = peak
                scores -= shift
            scores.exp_()
            self._weights[:, :, rows] += scores.sum(-1, keepdim=True)
            self._values[:, :, rows] += scores @ values

    def output(self) -> torch.Tensor:
        """float32 `[B, heads, S_q, D]`."""
        return self._values / self._weights

    def log_sum_exp(self) -> torch.Tensor:
        """float32 `[B, heads, S_q]`; not finite exactly where the denominator is zero or not finite."""
        lse = self._weights.log()
        return (lse if self._peak is None else lse + self._peak).squeeze(-1)


def _row_slices(queries: torch.Tensor, keys: torch.Tensor) -> Iterator[slice]:
    batch, heads, rows, _ = queries.shape
    step = max(1, _SCORES_AT_ONCE // max(1, batch * heads * keys.shape[2]))
    return (slice(first, first + step) for first in range(0, rows, step))
