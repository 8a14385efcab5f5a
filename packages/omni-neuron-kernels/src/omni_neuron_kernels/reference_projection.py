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
    query, key, value = projected.split([count * head_dim for count in (heads[0], heads[1], heads[1])], dim=-1)
    normed = [(n, gain) for n, gain in enumerate((query_gain, key_gain)) if gain is not None]
    parts = [query, key]
    if normed:
        wide = [_wide(parts[n]) for n, _ in normed]
        squares = torch.stack([tensor.square().sum(-1, keepdim=True) for tensor in wide])
        if all_reduce is not None:
            squares = all_reduce(squares)
        for (n, gain), tensor, total in zip(normed, wide, squares, strict=True):
            scale = torch.rsqrt(total / (tensor.shape[-1] * ranks) + epsilon)
            parts[n] = (tensor * scale * _wide(gain)).to(projected.dtype)
    query, key, value = (tensor.unflatten(-1, (-1, head_dim)) for tensor in (*parts, value))
    if rotation is not None:
        query, key = (rotate_pairs(tensor, *rotation) if tensor.shape[2] else tensor for tensor in (query, key))
    return query, key, value


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring channels of `[B, S, N, D]` by tables `[S, D / 2]`, in float32 at least."""
    cos, sin = cos[:, None], sin[:, None]
    wide = _wide(x).unflatten(-1, (-1, 2))
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        # One complex multiplication is vectorised on a CPU; every second channel is not.
        rotation = torch.complex(cos.to(wide.dtype), sin.to(wide.dtype))
        return torch.view_as_real(torch.view_as_complex(wide.contiguous()) * rotation).flatten(-2).to(x.dtype)
    even, odd = wide.unbind(-1)
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).to(x.dtype)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
