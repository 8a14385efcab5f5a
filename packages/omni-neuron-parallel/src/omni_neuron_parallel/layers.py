# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel layers from raw parameters; each parameter carries the loader that reads this rank's shard of it.

A layer is written for one rank and says in its class docstring how it is sharded. Sizes that TP does not divide are
rounded up and the surplus is zero: zero weights, zero biases, hence zero activations and zero contributions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from omni_neuron_kernels import rms_norm
from omni_neuron_parallel.groups import AxisGroup, get_group
from omni_neuron_parallel.sequence import SequenceParallel
from omni_neuron_runtime import (
    SafetensorsWeightLoader,
    fused_qkv_weight_loader,
    scaled_bias_loader,
    set_weight_loader,
    sharding_weight_loader,
)


def shard_size(size: int, shards: int, multiple_of: int = 1) -> int:
    """The rows or columns that each of `shards` ranks holds of `size`: rounded up, the last shards zero-padded.

    Args:
        size: of the whole dim.
        shards: ranks.
        multiple_of: what must stay together, such as the channels of a head; divides `size`.
    """
    return -(-size // multiple_of // shards) * multiple_of


def group_place(group: AxisGroup) -> torch.Tensor:
    """This rank's place in `group` as a buffer, int64 `[1]`: a graph that reads it is the same on every rank."""
    # On the CPU by name: modules are made on the meta device, and this is no weight that is loaded later.
    return torch.tensor([group.rank], device="cpu")


def _empty(*shape: int) -> nn.Parameter:
    # Never initialised: every parameter comes from a checkpoint (or a test), and A14B's would take minutes to fill.
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class _ParallelLinear(nn.Module):
    """`x Wᵀ + b` with one rank's part of W `[out_features, in_features]`, and the loaders of that part."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight_loader: SafetensorsWeightLoader,
        bias_loader: SafetensorsWeightLoader | None,
    ):
        super().__init__()
        self.weight = _empty(out_features, in_features)
        set_weight_loader(self.weight, weight_loader)
        self.bias = None if bias_loader is None else _empty(out_features)
        if self.bias is not None and bias_loader is not None:
            set_weight_loader(self.bias, bias_loader)

    def _product(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weight, self.bias)


class ColumnParallelLinear(_ParallelLinear):
    """`y = x Wᵀ + b` with the rows of W (the output features) split over TP. No communication.

    Input `[..., in_features]`, replicated; output `[..., ceil(out_features / tp)]`, this rank's features, in whole
    units of `multiple_of`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        multiple_of: int = 1,
        group: AxisGroup | None = None,
    ):
        group = group or get_group("tp")
        rows = shard_size(out_features, group.size, multiple_of)
        loader = sharding_weight_loader(0, rows, group.size, full_size=out_features)
        super().__init__(in_features, rows, loader, loader if bias else None)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self._product(hidden)


class RowParallelLinear(_ParallelLinear):
    """`y = x Wᵀ + b` with the columns of W (the input features) split over TP; partial results are summed over TP.

    Input `[..., ceil(in_features / tp)]`, this rank's features, in whole units of `multiple_of`; output
    `[..., out_features]`, replicated. The bias is loaded as b / tp and added on every rank before the sum, so that one
    fused operation does both.

    With `sequence_parallel` the sum is scattered: input `[..., S, features]`, output this rank's tokens
    `[..., ceil(S / tp), out_features]` as `SequenceParallel` splits them.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        multiple_of: int = 1,
        group: AxisGroup | None = None,
        sequence_parallel: bool = False,
    ):
        group = group or get_group("tp")
        columns = shard_size(in_features, group.size, multiple_of)
        weight_loader = sharding_weight_loader(1, columns, group.size, full_size=in_features)
        super().__init__(columns, out_features, weight_loader, scaled_bias_loader(1.0 / group.size) if bias else None)
        self.group, self.sequence_parallel = group, sequence_parallel

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self.sum_over_ranks(self._product(hidden))

    def sum_over_ranks(self, partial: torch.Tensor) -> torch.Tensor:
        """The layer's output from this rank's `x Wᵀ + b / tp`, for callers that compute that themselves."""
        if self.sequence_parallel:
            return SequenceParallel(partial.shape[-2], self.group).reduce_scatter(partial, dim=-2)
        return self.group.all_reduce(partial)


class QKVParallelLinear(_ParallelLinear):
    """Query, key and value projections of the same input as one matrix, split over TP by heads. No communication.

    Input `[..., in_features]`, replicated; output three tensors `[..., num_heads / tp * head_dim]`. In the checkpoint
    they are three matrices; map the parameter to the list of their three keys.

    Raises:
        ValueError: TP does not divide `num_heads`.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        head_dim: int,
        *,
        bias: bool = True,
        group: AxisGroup | None = None,
    ):
        group = group or get_group("tp")
        if num_heads % group.size:
            raise ValueError(f"{num_heads} attention heads cannot be split over {group.size} tensor-parallel ranks")
        rows = num_heads // group.size * head_dim
        loader = fused_qkv_weight_loader(rows, rows, 0, group.size)
        super().__init__(in_features, 3 * rows, loader, loader if bias else None)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See the class."""
        query, key, value = self._product(hidden).chunk(3, dim=-1)
        return query, key, value


def rms_norm_across_heads(
    inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], hidden_size: int, eps: float, group: AxisGroup
) -> list[torch.Tensor]:
    """RMS-normalise several tensors over features that are split over TP, with one collective for all of them.

    y = x / sqrt(Σ x² / hidden_size + eps) · weight, the sum taken over every rank's features (Zhang & Sennrich 2019,
    eq. 4). A collective's cost on Trn2 is mostly fixed per call, hence one for queries and keys together.

    Args:
        inputs: tensors `[..., hidden_size / tp]` of one leading shape.
        weights: a gain `[hidden_size / tp]` for each.
        hidden_size: features over all ranks.
        eps: added to the mean square.
        group: the TP group.

    Returns:
        The normalised tensors, shapes and dtypes as given; the arithmetic is float32.
    """
    widened = [tensor.float() for tensor in inputs]
    if group.size == 1 and len(inputs) == 1:
        squares = widened[0].square().sum(-1, keepdim=True).unsqueeze(0)
    else:
        squares = group.all_reduce(torch.stack([tensor.square().sum(-1, keepdim=True) for tensor in widened]))
    scales = torch.rsqrt(squares / hidden_size + eps)
    return [
        (tensor * scale * weight.float()).to(original.dtype)
        for tensor, scale, weight, original in zip(widened, scales.unbind(0), weights, inputs, strict=True)
    ]


class RMSNorm(nn.Module):
    """RMS norm with a gain over the last dim, whole on every rank. No communication.

    Of a token's features, or of each head by itself: a gain of one head's dim then serves all heads, and a TP rank
    normalises those that it has. `DistributedRMSNorm` is the norm across heads.
    """

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = _empty(size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[…, size]` to the same; float32 inside."""
        return rms_norm(hidden, self.weight, epsilon=self.eps)


class DistributedRMSNorm(nn.Module):
    """RMS norm over all heads while the heads are split over TP: the sum of squares is all-reduced over TP.

    Input and output `[..., hidden_size / tp]`; the gain is split like the features.
    """

    def __init__(self, hidden_size: int, eps: float, *, group: AxisGroup | None = None):
        super().__init__()
        self.group = group or get_group("tp")
        self.hidden_size = hidden_size
        self.eps = eps
        rows = shard_size(hidden_size, self.group.size)
        self.weight = _empty(rows)
        set_weight_loader(self.weight, sharding_weight_loader(0, rows, self.group.size, full_size=hidden_size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """See the class."""
        [normalised] = rms_norm_across_heads([hidden], [self.weight], self.hidden_size, self.eps, self.group)
        return normalised


class VocabParallelEmbedding(nn.Module):
    """An embedding table with its rows (the vocabulary) split over TP; ranks without a token add zero, then the sum.

    Input `[...]` int64 token ids; output `[..., embedding_dim]`, replicated.
    """

    def __init__(self, vocab_size: int, embedding_dim: int, *, group: AxisGroup | None = None):
        super().__init__()
        self.group = group or get_group("tp")
        self.rows = shard_size(vocab_size, self.group.size)
        self.weight = _empty(self.rows, embedding_dim)
        set_weight_loader(self.weight, sharding_weight_loader(0, self.rows, self.group.size, full_size=vocab_size))
        self.register_buffer("place", group_place(self.group), persistent=False)
        self.place: torch.Tensor

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See the class."""
        if self.group.size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.place * self.rows
        mine = (local >= 0) & (local < self.rows)
        embedded = F.embedding(local.clamp(0, self.rows - 1), self.weight) * mine.unsqueeze(-1).to(self.weight.dtype)
        return self.group.all_reduce(embedded)
