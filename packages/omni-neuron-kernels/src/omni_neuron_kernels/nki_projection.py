# SPDX-License-Identifier: Apache-2.0
"""Launches of the fused projection kernels, and their limits."""

from __future__ import annotations

from typing import Any

import torch

from omni_neuron_kernels.nki_launch import CORES, dtype_limit, kernels_of, vector_row
from omni_neuron_kernels.reference_projection import norm_over_ranks

BANK_COLUMNS = 512


def qkv_projection(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `ops_projection.qkv_projection`."""
    if not one_launch(x, options):
        return finished(qkv_partial(x, weight, bias, **options), options)
    results = kernels_of("qkv").qkv_projection[CORES](*_arguments(x, weight, bias, options), *norm_arguments(options))
    return as_heads(results, x.shape[0], x.shape[1], options)


def qkv_partial(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `reference_projection.qkv_partial`."""
    results = kernels_of("qkv").qkv_partial[CORES](*_arguments(x, weight, bias, options))
    return with_sums(results, x.shape[0], x.shape[1], options)


def _arguments(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, options: dict[str, Any]
) -> tuple[Any, ...]:
    tensors = (x.reshape(-1, x.shape[2]).contiguous(), weight.contiguous(), bias_row(bias, weight.shape[1], x))
    return (*tensors, *qkv_arguments(x.shape[0], options))


def qkv_limits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **options: Any) -> str | None:
    """Why the kernel cannot take these."""
    return dtype_limit(x=x, weight=weight) or size_limit(x.shape[-1], x.element_size(), False, options)


def size_limit(width: int, item: int, fp8: bool, options: dict[str, Any]) -> str | None:
    """Heads that are wider than a PSUM bank, or a tile of tokens that SBUF cannot hold."""
    heads, head_dim = options["heads"], options["head_dim"]
    if head_dim > BANK_COLUMNS:
        return f"head dim {head_dim}, at most {BANK_COLUMNS}"
    columns = (heads[0] + 2 * heads[1]) * head_dim
    normed = sum(gain.shape[0] for gain in (options.get("query_gain"), options.get("key_gain")) if gain is not None)
    if kernels_of("qkv").token_tiles(width, normed, columns, item, fp8) < 1:
        return f"widths {width} and {columns}: not even 128 tokens fit into SBUF"
    return None


def bias_row(bias: torch.Tensor | None, columns: int, like: torch.Tensor) -> torch.Tensor:
    """A bias as kernels take it, float32 `[1, columns]`; zeros for none."""
    if bias is None:
        return torch.zeros(1, columns, dtype=torch.float32, device=like.device)
    return vector_row(bias)


def qkv_arguments(batch: int, options: dict[str, Any]) -> tuple[Any, ...]:
    """Heads, head dim, gains and rotation as the kernels take them."""
    gains = [gain for gain in (options["query_gain"], options["key_gain"]) if gain is not None]
    tables = options["rotation"] or ()
    return (
        options["heads"],
        options["head_dim"],
        tuple(vector_row(gain) for gain in gains),
        tuple(table.float().repeat(batch, 1) for table in tables),
    )


def norm_arguments(options: dict[str, Any]) -> tuple[Any, ...]:
    """Epsilon, ranks and replica groups as the kernels take them."""
    return options["epsilon"], options["ranks"], options["replica_groups"] or ()


def one_launch(x: torch.Tensor, options: dict[str, Any]) -> bool:
    """Whether the kernel can finish the norm: the heads are all here, or it may sum over the ranks itself.

    The simulator's launch is one process, and cannot meet other ranks in a collective.
    """
    normed = options["query_gain"] is not None or options["key_gain"] is not None
    fused = x.device.type == "neuron" and options["replica_groups"] is not None
    return not normed or options["ranks"] == 1 or fused


def with_sums(
    results: Any, batch: int, length: int, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a partial launch returned, its sums last, as `[B, S, N, D]` and `[B, S, n]`."""
    return (*as_heads(results[:-1], batch, length, options), results[-1].reshape(batch, length, -1))


def finished(
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A partial launch's results with the norm's factor, from the sums of all ranks."""
    query, key, value, sums = parts
    totals = options["all_reduce"](sums)
    return (*norm_over_ranks((query, key), totals, options["ranks"], options["epsilon"]), value)


def as_heads(
    results: Any, batch: int, length: int, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Results `[B · S, N D]` as `[B, S, N, D]`, those of no heads put back."""
    left = iter(results)
    shaped = []
    for count in (options["heads"][0], options["heads"][1], options["heads"][1]):
        flat = next(left) if count else results[0][:, :0]
        shaped.append(flat.reshape(batch, length, count, options["head_dim"]))
    return shaped[0], shaped[1], shaped[2]
