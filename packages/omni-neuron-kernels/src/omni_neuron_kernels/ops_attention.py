# SPDX-License-Identifier: Apache-2.0
"""Public attention functions: arguments are checked here, whoever computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from omni_neuron_kernels import reference_attention
from omni_neuron_kernels.op_support import expect_shape, run_op
from omni_neuron_kernels.reference_attention import RingAttention, RingGroup


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    key_length: int | None = None,
    key_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale · q kᵀ) v over the first `key_length` keys and those of `key_mask`.

    The kernels accumulate in float32; the reference is torch's `scaled_dot_product_attention`.

    Args:
        q: `[B, S_q, N, D]`.
        k: `[B, S_k, N_k, D]`; N is a multiple of N_k, and head n attends to key head n // (N / N_k).
        v: shape as `k`.
        scale: factor of the scores; None for 1 / √D.
        key_length: the number of valid keys; those from there on take no part, whatever they hold. None: all.
        key_mask: bool `[B, S_k]`, true for keys that take part, at least one of them within `key_length` for every
            batch element; None: all.

    Returns:
        Shape and dtype of `q`.

    Raises:
        ValueError: shapes that do not fit, a `key_length` outside 1 to S_k, or a mask that is not bool.
    """
    _check(q, k, v, key_mask)
    length = k.shape[1] if key_length is None else key_length
    if not 1 <= length <= k.shape[1]:
        raise ValueError(f"key_length = {length}: valid are 1..{k.shape[1]}")
    factor = q.shape[3] ** -0.5 if scale is None else scale
    return run_op(reference_attention.flash_attention, q, k, v, scale=factor, key_length=length, key_mask=key_mask)


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: RingGroup,
    replica_groups: Sequence[Sequence[int]] | None = None,
    scale: float | None = None,
    key_length: int | None = None,
    key_mask: torch.Tensor | None = None,
    return_lse: bool = False,
    kv_prefetch_depth: int = 1,
) -> RingAttention:
    """softmax(scale · q kᵀ) v of this rank's queries over the keys of every rank of `group`. Collective over `group`.

    The kernel passes blocks of keys and values round a ring while others are computed; the reference gathers them.
    In compiled code, where a kernel takes the arguments (`ring_refusal`), it is one node with a running maximum for all
    heads, without `return_lse`, and rows that are lost are not counted; else the reference is traced.

    Args:
        q: `[B, S_q, N, D]`, this rank's queries.
        k: `[B, S_local, N_k, D]`, this rank's keys: rows [rank · S_local, (rank + 1) · S_local) of the padded sequence.
            N is a multiple of N_k, and head n attends to key head n // (N / N_k).
        v: shape as `k`.
        group: the ranks that share the sequence, such as an `AxisGroup` of omni-neuron-parallel.
        replica_groups: the partition of the world that `group` is one of, each group in ring order: one program runs on
            every rank. None: the group is the world.
        scale: factor of the scores; None for 1 / √D.
        key_length: the number of valid keys of the whole sequence; those from there on are pads and take no part,
            whatever they hold, so blocks may be pads only. None: all.
        key_mask: bool `[B, S_local]`, true for this rank's keys that take part; on every rank or on none, and at least
            one of all for every batch element.
        return_lse: also return the logarithm of each row's softmax denominator.
        kv_prefetch_depth: blocks on their way while one is computed; `kv_prefetch_depth` + 1 are held.

    Returns:
        The output in q's shape and dtype, lse, and the number of rows that were lost, which is zero for finite scores.

    Raises:
        ValueError: shapes that do not fit, a `key_length` that leaves no key or names too many, replica groups without
            this group, or a `kv_prefetch_depth` below one.
    """
    _check(q, k, v, key_mask)
    total = k.shape[1] * group.size
    length = total if key_length is None else key_length
    if not 1 <= length <= total:
        raise ValueError(f"key_length = {length}: valid are 1..{total} ({group.size} ranks of {k.shape[1]} keys each)")
    groups = tuple(tuple(ranks) for ranks in (replica_groups or [group.ranks]))
    if tuple(group.ranks) not in groups or len({len(ranks) for ranks in groups}) > 1:
        raise ValueError(f"replica_groups = {groups}: valid are groups of one size, {tuple(group.ranks)} among them")
    if kv_prefetch_depth < 1:
        raise ValueError(f"kv_prefetch_depth = {kv_prefetch_depth}: valid are 1 and more")
    return run_op(
        reference_attention.ring_attention,
        q,
        k,
        v,
        group=group,
        replica_groups=groups,
        scale=q.shape[3] ** -0.5 if scale is None else scale,
        key_length=length,
        key_mask=key_mask,
        return_lse=return_lse,
        kv_prefetch_depth=kv_prefetch_depth,
    )


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None) -> None:
    if q.dim() != 4 or k.dim() != 4 or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} are not [B, S, heads, D] of one B and D")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"q has {q.shape[2]} heads, k {k.shape[2]}; valid is a multiple")
    expect_shape("v", v, tuple(k.shape))
    if key_mask is not None:
        expect_shape("key_mask", key_mask, tuple(k.shape[:2]))
        if key_mask.dtype != torch.bool:
            raise ValueError(f"key_mask is {key_mask.dtype}; valid is torch.bool")
