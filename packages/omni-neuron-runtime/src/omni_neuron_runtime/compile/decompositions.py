# SPDX-License-Identifier: Apache-2.0
"""How composite operations are taken apart before a graph is checked and lowered; the same for both backends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

_aten = torch.ops.aten

# Beyond torch's core set: torch-mlir lowers these only in parts.
_FURTHER = (
    _aten.native_group_norm,
    _aten.native_layer_norm,
    _aten.addmm,
    _aten.squeeze.dims,
    _aten._adaptive_avg_pool2d,
    _aten.logsumexp,
    _aten._softmax,
    _aten._log_softmax,
    _aten._to_copy,
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten.unfold,
    _aten.any.dims,
    _aten.fill,
    _aten.gelu,
    _aten.linalg_vector_norm,
)
# torch's own decompositions of these end in operations that StableHLO has no word for; torch-mlir has better ones, or
# the functions below are.
_KEPT = (_aten.empty_like, _aten.roll, _aten.all, _aten.isfinite, _aten.eye, _aten.rms_norm)


@functools.cache
def decompositions() -> dict[torch._ops.OperatorBase, Callable[..., Any]]:
    """The table for `aot_autograd`."""
    from torch._decomp import core_aten_decompositions, get_decompositions

    table = {
        op: function
        for op, function in core_aten_decompositions().items()
        if getattr(op, "_overloadpacket", None) not in _KEPT
    }
    table.update(get_decompositions(_FURTHER))
    table.update(
        {
            _aten.var.correction: _var,
            _aten.var_mean.correction: _var_mean,
            _aten.slice_scatter.default: _slice_scatter,
            _aten.empty_permuted.default: _empty_permuted,
            _aten.empty_strided.default: _empty_permuted,
            _aten.roll.default: _roll,
        }
    )
    return table


def _var_mean(
    tensor: torch.Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """In the tensor's own dtype: torch-mlir's way goes through float64, which Neuron has not."""
    dims = list(range(tensor.dim())) if dim is None else [axis % tensor.dim() for axis in dim]
    count = 1
    for axis in dims:
        count *= tensor.shape[axis]
    mean = tensor.sum(dims, keepdim=True) / count
    centred = tensor - mean
    variance = (centred * centred).sum(dims, keepdim=keepdim) / max(
        0, count - (1 if correction is None else correction)
    )
    return variance, mean if keepdim else mean.squeeze(dims)


def _var(
    tensor: torch.Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> torch.Tensor:
    return _var_mean(tensor, dim, correction=correction, keepdim=keepdim)[0]


def _slice_scatter(
    tensor: torch.Tensor,
    source: torch.Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> torch.Tensor:
    """By concatenation: torch-mlir's lowering of a strided one takes all memory there is."""
    dim %= tensor.dim()
    size = tensor.shape[dim]
    first = 0 if start is None else min(max(start + size if start < 0 else start, 0), size)
    last = size if end is None else min(max(end + size if end < 0 else end, first), size)
    source = source.expand([*tensor.shape[:dim], source.shape[dim], *tensor.shape[dim + 1 :]])
    if step == 1:
        parts = [tensor.narrow(dim, 0, first), source, tensor.narrow(dim, last, size - last)]
        return torch.cat([part for part in parts if part.shape[dim]], dim=dim)
    # Every row of the source `step` times over, from `first` on, and of those the ones that the slice names.
    rows = source.unsqueeze(dim + 1).expand([*source.shape[: dim + 1], step, *source.shape[dim + 1 :]])
    rows = rows.flatten(dim, dim + 1).narrow(dim, 0, min(source.shape[dim] * step, size - first))
    trailing = [0, 0] * (tensor.dim() - 1 - dim)
    rows = torch.nn.functional.pad(rows, [*trailing, first, size - first - rows.shape[dim]])
    place = torch.arange(size, device=tensor.device) - first
    named = (place >= 0) & (place < last - first) & (place % step == 0)
    return torch.where(named.view([-1] + [1] * (tensor.dim() - 1 - dim)), rows, tensor)


def _empty_permuted(size: Sequence[int], order: Sequence[int], **options: Any) -> torch.Tensor:
    return torch.full(size, 0, **{name: options.get(name) for name in ("dtype", "device")})


def _roll(tensor: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> torch.Tensor:
    if not dims:
        return _roll(tensor.flatten(), shifts, (0,)).view(tensor.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        size = tensor.shape[dim]
        cut = -shift % size if size else 0
        if cut:
            tensor = torch.cat([tensor.narrow(dim, cut, size - cut), tensor.narrow(dim, 0, cut)], dim=dim)
    return tensor
