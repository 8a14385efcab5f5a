# SPDX-License-Identifier: Apache-2.0
"""Public functions of the fused projections in front of an attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from omni_neuron_kernels import reference_projection
from omni_neuron_kernels.op_support import expect_shape, run_op
from omni_neuron_kernels.reference_projection import AllReduce


def qkv_projection(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    heads: tuple[int, int],
    head_dim: int,
    query_gain: torch.Tensor | None = None,
    key_gain: torch.Tensor | None = None,
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None,
    epsilon: float = 1e-6,
    ranks: int = 1,
    all_reduce: AllReduce | None = None,
    replica_groups: Sequence[Sequence[int]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of one input; the first two RMS-normalised across all heads, then rotated.

    With heads split over ranks the norm needs the sum of squares of all of them. A device kernel takes it from a
    collective of its own where `replica_groups` are given; else, and everywhere else, one call of `all_reduce` sums the
    float32 squares of queries and keys.

    Args:
        x: `[B, S, H]`.
        weight: `[H, (N_q + 2 N_k) D]`, the transpose of `nn.Linear`'s: this rank's queries, keys, values side by
            side. A kernel copies one that is not contiguous, at each call.
        bias: `[(N_q + 2 N_k) D]`; None for none.
        heads: this rank's (N_q, N_k). One may be 0: queries alone, or keys and values alone.
        head_dim: D.
        query_gain: `[N_q D]`, this rank's part; None for no norm. Queries and keys have gains both or neither.
        key_gain: `[N_k D]`.
        rotation: cosines and sines `[S, D / 2]`, float32: (x₀, x₁) → (x₀ cos − x₁ sin, x₀ sin + x₁ cos) for
            neighbouring channels (Su et al. 2021, eq. 34). None for none.
        epsilon: added to the mean square (Zhang & Sennrich 2019, eq. 4).
        ranks: over how many ranks the heads are split, equally many on each.
        all_reduce: sums a tensor over those ranks and returns it; with gains and more than one rank.
        replica_groups: disjoint groups of global rank ids which cover all ranks of the job.

    Returns:
        `[B, S, N_q, D]` and twice `[B, S, N_k, D]` in x's dtype; products are summed in float32.

    Raises:
        ValueError: shapes that do not fit, or a norm over ranks without `all_reduce`.
    """
    options = check_qkv(x, heads, head_dim, query_gain, key_gain, rotation, epsilon, ranks, all_reduce, replica_groups)
    expect_shape("weight", weight, (x.shape[-1], (heads[0] + 2 * heads[1]) * head_dim))
    if bias is not None:
        expect_shape("bias", bias, (weight.shape[1],))
    return run_op(reference_projection.qkv_projection, x, weight, bias, **options)


def check_qkv(
    x: torch.Tensor,
    heads: tuple[int, int],
    head_dim: int,
    query_gain: torch.Tensor | None,
    key_gain: torch.Tensor | None,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    epsilon: float,
    ranks: int,
    all_reduce: AllReduce | None,
    replica_groups: Sequence[Sequence[int]] | None,
) -> dict[str, Any]:
    """Check what `qkv_projection` and its FP8 form share, and return it as the options of a provider.

    Raises:
        ValueError: something does not fit.
    """
    if x.dim() != 3:
        raise ValueError(f"x has shape {tuple(x.shape)}; valid is [B, S, H]")
    for name, value in (("head_dim", head_dim), ("ranks", ranks)):
        if value < 1:
            raise ValueError(f"{name} = {value}; valid is 1 or more")
    if len(heads) != 2 or min(heads) < 0 or max(heads) < 1:
        raise ValueError(f"heads = {heads}; valid are (queries, keys), one of them at least 1")
    gains = [gain for gain, count in ((query_gain, heads[0]), (key_gain, heads[1])) if count]
    if any(gain is None for gain in gains) and any(gain is not None for gain in gains):
        raise ValueError("query_gain and key_gain go together; one of them is None")
    for name, gain, count in (("query_gain", query_gain, heads[0]), ("key_gain", key_gain, heads[1])):
        if gain is not None:
            expect_shape(name, gain, (count * head_dim,))
    if rotation is not None:
        if len(rotation) != 2:
            raise ValueError(f"rotation has {len(rotation)} tables; valid are two, cosines and sines")
        if head_dim % 2:
            raise ValueError(f"head_dim = {head_dim}: a rotation takes pairs of channels, an even number")
        for name, table in zip(("cosines", "sines"), rotation, strict=True):
            expect_shape(f"rotation's {name}", table, (x.shape[1], head_dim // 2))
    normalised = gains[0] is not None
    if normalised and ranks > 1 and all_reduce is None:
        raise ValueError(f"ranks = {ranks} with gains: the norm over all heads needs all_reduce")
    if replica_groups is not None and any(len(group) != ranks for group in replica_groups):
        raise ValueError(f"replica_groups = {replica_groups}: valid are groups of ranks = {ranks}")
    return {
        "heads": tuple(heads),
        "head_dim": head_dim,
        "query_gain": query_gain if heads[0] else None,
        "key_gain": key_gain if heads[1] else None,
        "rotation": rotation,
        "epsilon": epsilon,
        "ranks": ranks,
        "all_reduce": all_reduce if ranks > 1 else None,
        "replica_groups": tuple(tuple(group) for group in replica_groups) if replica_groups and ranks > 1 else None,
    }
