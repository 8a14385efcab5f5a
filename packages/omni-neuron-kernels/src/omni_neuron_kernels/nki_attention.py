# SPDX-License-Identifier: Apache-2.0
"""Launching the attention kernels: what is decided before, and what they do not take."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch._guards import detect_fake_mode

from omni_neuron_kernels.nki_launch import CORES, dtype_limit, kernels_of
from omni_neuron_kernels.reference_attention import RingAttention, RingGroup
from omni_neuron_kernels.softmax_regimes import (
    KeyStatistics,
    Regime,
    joined_statistics,
    key_statistics,
    softmax_regimes,
    unpacked_statistics,
)

FLASH_HEAD_DIM = 384
RING_HEAD_DIM = 128
# What the queries and sums of one key head may take per partition while its ring goes round.
RING_SBUF_BYTES = 96 * 1024


class Prepared(NamedTuple):
    """Arguments of the kernels.

    Attributes:
        tensors: q, k and v as `[B · heads, S, D]`.
        regimes: of each of these heads, the same on every rank of the group.
        masks: none, or one `[B, S_k]` of k's dtype.
        biases: none, or one `[B · N, tiles]`, if any rank of the group shifts a head.
    """

    tensors: tuple[torch.Tensor, ...]
    regimes: tuple[Regime, ...]
    masks: tuple[torch.Tensor, ...]
    biases: tuple[torch.Tensor, ...]


def prepared(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    statistics: KeyStatistics,
    scale: float,
    group: RingGroup | None = None,
) -> Prepared:
    """Decide each head's regime, for all ranks of a group as one, and put masked keys out of the way.

    A masked key becomes a copy of one that takes part, so that it can raise no maximum and break no bound, with a zero
    for its value and a zero for its weight in the denominator: the kernels then compute it like any other.
    """
    if mask is not None:
        chosen = mask[:, :, None, None]
        k = torch.where(chosen, k, statistics.example[:, None].to(k.dtype))
        v = torch.where(chosen, v, 0)
    regime: Regime = "running_maximum"
    flat = (regime,) * (q.shape[0] * q.shape[2])
    biases: tuple[torch.Tensor, ...] = ()
    if detect_fake_mode((q, k, v)) is None:
        # The regimes are part of the kernel that is compiled, so they are read back here. In a graph there is nothing
        # to read yet, and one graph serves all data: every head keeps the running maximum.
        regimes, shifts = softmax_regimes(q, statistics, scale=scale, group=group)
        flat = tuple(regime for heads in regimes for regime in heads)
        biases = (-shifts.flatten(0, 1),) if "tile_shift" in flat else ()
    masks = () if mask is None else (mask.to(k.dtype),)
    return Prepared(_by_heads(q, k, v), flat, masks, biases)


def _by_heads(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`[B, S, heads, D]` to `[B · heads, S, D]`."""
    return tuple(tensor.transpose(1, 2).flatten(0, 1).contiguous() for tensor in tensors)


def _by_tokens(tensor: torch.Tensor, batch: int) -> torch.Tensor:
    """`[B · heads, S, D]` to `[B, S, heads, D]`, the inverse of `_by_heads`."""
    return tensor.unflatten(0, (batch, -1)).transpose(1, 2)


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
    keys, values = k[:, :key_length], v[:, :key_length]
    mask = None if key_mask is None else key_mask[:, :key_length]
    given = prepared(q, keys, values, mask, key_statistics(keys, values, mask), scale)
    kernel = kernels_of("attention").flash_attention[CORES]
    result = kernel(*given.tensors, scale, key_length, given.regimes, given.masks, given.biases)
    return _by_tokens(result, q.shape[0])


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: RingGroup,
    replica_groups: tuple[tuple[int, ...], ...],
    scale: float,
    key_length: int,
    key_mask: torch.Tensor | None,
    return_lse: bool,
    kv_prefetch_depth: int,
) -> RingAttention:
    """See `ops_attention.ring_attention`."""
    mask = ring_mask(k, group.rank, group.size, key_length, key_mask)
    own = key_statistics(k, v, mask).packed()
    gathered = group.all_gather(own[None], dim=0) if group.size > 1 else own[None]
    statistics = joined_statistics([unpacked_statistics(packed) for packed in gathered])
    given = prepared(q, k, v, mask, statistics, scale, group)
    kernel = kernels_of("ring_attention").ring_attention[CORES]
    results = kernel(
        *given.tensors, scale, given.regimes, replica_groups, kv_prefetch_depth, return_lse, given.masks, given.biases
    )
    batch = q.shape[0]
    lse = results[1].unflatten(0, (batch, -1)) if return_lse else None
    return RingAttention(_by_tokens(results[0], batch), lse, results[-1].sum())


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
    """The kernel of `ring_attention` as a node of a graph: one program for all data, with a running maximum.

    Args:
        q, k, v: as for `ring_attention`; a key that takes no part raises no maximum by more than rounding, and its
            value is zero (`graph_ops` sees to both).
        key_mask: bool `[B, S_local]`, this rank's keys that take part; None: all of every rank.
        scale, replica_groups, kv_prefetch_depth: as for `ring_attention`.

    Returns:
        Shape and dtype of `q`.
    """
    regime: Regime = "running_maximum"
    regimes = (regime,) * (q.shape[0] * q.shape[2])
    masks = () if key_mask is None else (key_mask.to(k.dtype),)
    kernel = kernels_of("ring_attention").ring_attention[CORES]
    results = kernel(*_by_heads(q, k, v), scale, regimes, replica_groups, kv_prefetch_depth, False, masks, ())
    return _by_tokens(results[0], q.shape[0])


def ring_mask(
    k: torch.Tensor, rank: int, size: int, key_length: int, key_mask: torch.Tensor | None
) -> torch.Tensor | None:
    """Bool `[B, S_local]`: this rank's keys that take part; None where every rank's do."""
    batch, rows = k.shape[:2]
    if key_length == rows * size:
        return key_mask
    valid = torch.arange(rows, device=k.device) + rank * rows < key_length
    return valid.expand(batch, rows) if key_mask is None else valid & key_mask


def flash_limits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> str | None:
    """Why not `flash_attention`."""
    return _limits(FLASH_HEAD_DIM, q, k, v, options)


def ring_limits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> str | None:
    """Why not `ring_attention`."""
    share = q.shape[2] // k.shape[2]
    tiles = math.ceil(math.ceil(q.shape[1] / 128) * share / CORES)
    needed = tiles * (4 * (q.shape[3] + 1) + 128 * q.element_size())
    if needed > RING_SBUF_BYTES:
        queries = f"{q.shape[1]} queries of {share} heads"
        return f"{queries} need {needed} bytes of SBUF per partition in {q.dtype}, at most {RING_SBUF_BYTES}"
    return _limits(RING_HEAD_DIM, q, k, v, options)


def ring_limits_in_simulator(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, group: RingGroup, **options: Any
) -> str | None:
    """Why not `ring_attention` in the simulator, whose ranks are threads of one process."""
    return _several(group.size) or ring_limits(q, k, v, **options)


def graph_limits_in_simulator(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, replica_groups: tuple[tuple[int, ...], ...], **options: Any
) -> str | None:
    """Why not `ring_in_graph` in the simulator."""
    return _several(len(replica_groups[0])) or ring_limits(q, k, v, **options)


def _several(ranks: int) -> str | None:
    if ranks == 1:
        return None
    return (
        f"a ring of {ranks} ranks, each a process of its own; the simulator runs all ranks in one "
        "(omni_neuron_nkisim.run_spmd)"
    )


def _limits(head_dim: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> str | None:
    if q.shape[-1] > head_dim:
        return f"head dim {q.shape[-1]}, at most {head_dim}"
    scale = options.get("scale")
    if scale is not None and not 0 < scale < math.inf:
        return f"scale {scale}, has to be above zero"
    return dtype_limit(q=q, k=k, v=v)
