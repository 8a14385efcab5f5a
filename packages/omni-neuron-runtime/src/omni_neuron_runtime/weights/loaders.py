# SPDX-License-Identifier: Apache-2.0
"""What a parameter takes from the checkpoint: loaders that turn tensors of the checkpoint into one rank's shard.

A loader gets `TensorSlice`s, which read nothing until they are indexed, and this process's rank. It may run more than
once: the pipelined load first runs it on meta tensors, until each slice was indexed once, to learn which bytes to
prefetch. A loader for which that fails still works, without the prefetch.

Tensors come in the checkpoint's dtype; the result is cast to the parameter's dtype afterwards, parameter by parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class TensorSlice(Protocol):
    """One tensor of a checkpoint, unread. Indexing it with slices, integers or `...` reads that part of it.

    The result may lie in the mapped file: copy before changing it in place.
    """

    def get_shape(self) -> list[int]:
        """The whole tensor's shape."""
        ...

    def get_dtype(self) -> str:
        """The dtype as safetensors writes it, such as "BF16"."""
        ...

    def __getitem__(self, index: Any) -> Tensor: ...


Transform = Callable[[Sequence[TensorSlice], int], Tensor]


class SafetensorsWeightLoader:
    """Makes one parameter from tensors of the checkpoint.

    Args:
        transform: `(slices, rank) -> Tensor`; None takes exactly one tensor, whole.
    """

    def __init__(self, transform: Transform | None = None) -> None:
        self.transform = transform

    def load(self, slices: Sequence[TensorSlice], rank: int) -> Tensor:
        """This rank's parameter, contiguous, in the dtype that the transform gives.

        Raises:
            ValueError: the slices are not what the loader needs.
        """
        if self.transform is not None:
            return self.transform(slices, rank).contiguous()
        [whole] = _exactly(slices, 1, "a parameter that is not sharded")
        return whole[...].contiguous()


_IDENTITY = SafetensorsWeightLoader()


def set_weight_loader(parameter: Tensor, loader: SafetensorsWeightLoader) -> None:
    """Let `loader` make `parameter` when a checkpoint is loaded (attribute `weight_loader`)."""
    parameter.weight_loader = loader  # type: ignore[attr-defined]


def get_weight_loader(parameter: Tensor) -> SafetensorsWeightLoader:
    """The loader of `parameter`; without one, the loader that takes exactly one tensor, whole."""
    loader: SafetensorsWeightLoader = getattr(parameter, "weight_loader", _IDENTITY)
    return loader


def sharding_weight_loader(
    shard_dim: int,
    shard_size: int,
    num_shards: int,
    is_storage_transposed: bool = False,
    pad_shard: bool = False,
    *,
    full_size: int | None = None,
) -> SafetensorsWeightLoader:
    """One tensor, cut along one dim; shard `rank % num_shards` is read.

    Args:
        shard_dim: dim of the parameter that is cut: 0 for a column-parallel weight `[out, in]` or bias, 1 for a
            row-parallel weight.
        shard_size: this rank's size along that dim.
        num_shards: how many ranks share the tensor.
        is_storage_transposed: the checkpoint holds the transpose, `[in, out]`; tensors of at most two dims.
        pad_shard: the tensor may be smaller than `shard_size * num_shards`; zeros fill the last shards. Otherwise the
            sizes must agree exactly.
        full_size: the tensor's own size along that dim, where it is known: it must be exactly that, and what is missing
            to `shard_size * num_shards` is filled with zeros. Prefer it to `pad_shard`, which takes a short tensor for
            one that needs padding.
    """

    def transform(slices: Sequence[TensorSlice], rank: int) -> Tensor:
        [whole] = _exactly(slices, 1, "a sharded parameter")
        return _shard(
            whole, rank % num_shards, shard_dim, shard_size, num_shards, is_storage_transposed, pad_shard, full_size
        )

    return SafetensorsWeightLoader(transform)


def fused_qkv_weight_loader(
    q_size: int,
    kv_size: int,
    shard_dim: int,
    num_shards: int,
    is_storage_transposed: bool = False,
) -> SafetensorsWeightLoader:
    """Exactly three tensors, query, key and value: this rank's shard of each, concatenated along `shard_dim`.

    Args:
        q_size: this rank's size of the query along `shard_dim`.
        kv_size: this rank's size of the key, and of the value.
        shard_dim: dim of the parameter that is cut and concatenated (0 for weight `[out, in]` and bias).
        num_shards: how many ranks share the tensors.
        is_storage_transposed: the checkpoint holds the transposes; tensors of at most two dims.
    """

    def transform(slices: Sequence[TensorSlice], rank: int) -> Tensor:
        parts = _exactly(slices, 3, "a fused QKV parameter (query, key, value)")
        sizes = (q_size, kv_size, kv_size)
        shards = [
            _shard(part, rank % num_shards, shard_dim, size, num_shards, is_storage_transposed, pad=False)
            for part, size in zip(parts, sizes, strict=True)
        ]
        return torch.cat(shards, dim=shard_dim)

    return SafetensorsWeightLoader(transform)


def scaled_bias_loader(scale: float, padded_size: int | None = None) -> SafetensorsWeightLoader:
    """A whole bias `[size]` times `scale`: 1/tp where every rank adds it before a sum over the ranks.

    The product is taken in float32 (float64 for a float64 bias), so that it is rounded once, to the parameter's dtype.

    Args:
        scale: the factor.
        padded_size: size of the parameter where it is larger than the bias; zeros fill the end.
    """

    def transform(slices: Sequence[TensorSlice], rank: int) -> Tensor:
        [whole] = _exactly(slices, 1, "a scaled bias")
        [size] = _dims(whole, 1, "a scaled bias")
        if padded_size is not None and padded_size < size:
            raise ValueError(f"a bias of {size} does not fit into the padded size {padded_size}")
        bias = whole[...]
        scaled = bias.to(torch.promote_types(bias.dtype, torch.float32)) * scale
        return scaled if padded_size is None else F.pad(scaled, (0, padded_size - size))

    return SafetensorsWeightLoader(transform)


def _shard(
    whole: TensorSlice,
    index: int,
    dim: int,
    shard_size: int,
    num_shards: int,
    transposed: bool,
    pad: bool,
    full_size: int | None = None,
) -> Tensor:
    shape = whole.get_shape()
    if transposed and len(shape) > 2:
        raise ValueError(f"a tensor stored transposed has at most two dims, found shape {shape}")
    if not 0 <= dim < len(shape):
        raise ValueError(f"there is no dim {dim} to shard in shape {shape}")
    stored_dim = len(shape) - 1 - dim if transposed else dim
    size, needed = shape[stored_dim], shard_size * num_shards
    fits = size == full_size if full_size is not None else size == needed or (pad and 0 < size < needed)
    if not fits or size > needed:
        expected = str(full_size) if full_size is not None else f"at most {needed}" if pad else str(needed)
        raise ValueError(
            f"dim {stored_dim} of shape {shape} holds {size}, expected {expected} ({num_shards} shards of {shard_size})"
        )
    # A shard that begins past the end of the tensor is all padding.
    start, stop = (min(shard_size * edge, size) for edge in (index, index + 1))
    shard = whole[(slice(None),) * stored_dim + (slice(start, stop),)]
    shard = shard.t() if transposed else shard
    missing = shard_size - (stop - start)
    return F.pad(shard, (0, 0) * (len(shape) - 1 - dim) + (0, missing)) if missing else shard


def _exactly(slices: Sequence[TensorSlice], count: int, purpose: str) -> Sequence[TensorSlice]:
    if len(slices) != count:
        raise ValueError(f"{purpose} takes exactly {count} checkpoint tensor(s), got {len(slices)}")
    return slices


def _dims(whole: TensorSlice, count: int, purpose: str) -> list[int]:
    shape = whole.get_shape()
    if len(shape) != count:
        raise ValueError(f"{purpose} is made from a tensor of {count} dim(s), found shape {shape}")
    return shape
