# SPDX-License-Identifier: Apache-2.0
"""The fused projections in plain torch: as fast on a CPU as the separate steps they stand for."""

from __future__ import annotations

from collections.abc import Callable

import torch

AllReduce = Callable[[torch.Tensor], torch.Tensor]


def qkv_projection(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    heads: tuple[int, int],
    head_dim: int,
    query_gain: torch.Tensor | None,
    key_gain: torch.Tensor | None,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    epsilon: float,
    ranks: int,
    all_reduce: AllReduce | None,
    replica_groups: tuple[tuple[int, ...], ...] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `ops_projection.qkv_projection`. What is normalised or rotated is rounded to x's dtype before."""
    projected = torch.nn.functional.linear(x, weight.t(), None if bias is None else bias.to(x.dtype))
    return finish_qkv(
        projected, heads, head_dim, query_gain, key_gain, rotation, epsilon=epsilon, ranks=ranks, all_reduce=all_reduce
    )


def qkv_partial(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    heads: tuple[int, int],
    head_dim: int,
    query_gain: torch.Tensor | None,
    key_gain: torch.Tensor | None,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`qkv_projection` with gains, up to the norm's factor, which needs the heads of other ranks.

    The factor is one number per token, so gain and rotation can come first.

    Returns:
        Queries and keys `[B, S, N, D]` times their gains and rotated, values, and the float32 sums of squares before
        that, `[B, S, n]`, of those of the first two that there are.
    """
    projected = torch.nn.functional.linear(x, weight.t(), None if bias is None else bias.to(x.dtype))
    return partial_qkv(projected, heads, head_dim, query_gain, key_gain, rotation)


def partial_qkv(
    projected: torch.Tensor,
    heads: tuple[int, int],
    head_dim: int,
    query_gain: torch.Tensor | None,
    key_gain: torch.Tensor | None,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `qkv_partial` returns, of the projection `[B, S, (N_q + 2 N_k) D]`."""
    *parts, value = _split(projected, heads, head_dim)
    sums = [part.float().square().sum(-1) for part in parts if part.shape[-1]]
    gained = [
        part if gain is None else (widened(part) * widened(gain)).to(projected.dtype)
        for part, gain in zip(parts, (query_gain, key_gain), strict=True)
    ]
    return *_rotated_heads(gained, value, head_dim, rotation), torch.stack(sums, dim=-1)


def norm_over_ranks(
    parts: tuple[torch.Tensor, torch.Tensor], sums: torch.Tensor, ranks: int, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm's factor for queries and keys of `qkv_partial`, from the sums of all ranks (Zhang & Sennrich 2019)."""
    totals = iter(sums.unbind(-1))
    done = []
    for part in parts:
        if part.shape[2]:
            mean = next(totals) / (part.shape[2] * part.shape[3] * ranks)
            part = (widened(part) * torch.rsqrt(mean + epsilon)[:, :, None, None]).to(part.dtype)
        done.append(part)
    return done[0], done[1]


def finish_qkv(
    projected: torch.Tensor,
    heads: tuple[int, int],
    head_dim: int,
    query_gain: torch.Tensor | None,
    key_gain: torch.Tensor | None,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    epsilon: float,
    ranks: int,
    all_reduce: AllReduce | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split `[B, S, (N_q + 2 N_k) D]`, normalise queries and keys, rotate them."""
    *parts, value = _split(projected, heads, head_dim)
    normed = [(n, gain) for n, gain in enumerate((query_gain, key_gain)) if gain is not None]
    if normed:
        wide = [widened(parts[n]) for n, _ in normed]
        squares = torch.stack([tensor.square().sum(-1, keepdim=True) for tensor in wide])
        if all_reduce is not None:
            squares = all_reduce(squares)
        for (n, gain), tensor, total in zip(normed, wide, squares, strict=True):
            scale = torch.rsqrt(total / (tensor.shape[-1] * ranks) + epsilon)
            parts[n] = (tensor * scale * widened(gain)).to(projected.dtype)
    return _rotated_heads(parts, value, head_dim, rotation)


def _split(projected: torch.Tensor, heads: tuple[int, int], head_dim: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values `[B, S, N D]` of a projection."""
    return projected.split([count * head_dim for count in (heads[0], heads[1], heads[1])], dim=-1)


def _rotated_heads(
    parts: list[torch.Tensor],
    value: torch.Tensor,
    head_dim: int,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys (`parts`), rotated, and values as `[B, S, N, D]`."""
    query, key, value = (tensor.unflatten(-1, (-1, head_dim)) for tensor in (*parts, value))
    if rotation is not None:
        query, key = (rotate_pairs(tensor, *rotation) if tensor.shape[2] else tensor for tensor in (query, key))
    return query, key, value


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring channels of `[B, S, N, D]` by tables `[S, D / 2]`, in float32 at least."""
    cos, sin = cos[:, None], sin[:, None]
    wide = widened(x).unflatten(-1, (-1, 2))
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        # One complex multiplication is vectorised on a CPU; every second channel is not.
        rotation = torch.complex(cos.to(wide.dtype), sin.to(wide.dtype))
        return torch.view_as_real(torch.view_as_complex(wide.contiguous()) * rotation).flatten(-2).to(x.dtype)
    even, odd = wide.unbind(-1)
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).to(x.dtype)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """In float32; float64 stays."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
