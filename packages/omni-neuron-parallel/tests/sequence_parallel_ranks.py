# SPDX-License-Identifier: Apache-2.0
"""A transformer block with and without sequence parallelism. Importable by spawned processes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from cfg_ranks import Collectives
from parallel_ranks import load, random

from omni_neuron_parallel import (
    AxisGroup,
    ColumnParallelLinear,
    DistributedRMSNorm,
    QKVParallelLinear,
    RowParallelLinear,
    SequenceParallel,
    get_group,
)

HIDDEN, HEADS, HEAD_DIM, INNER = 24, 4, 6, 10


def block(tokens: int, sequence_parallel: bool) -> tuple[torch.Tensor, torch.Tensor, list[tuple[str, tuple[int, ...]]]]:
    """Attention and feed-forward with residuals: all tokens, this rank's part of them, and the collectives between.

    The part's pads hold NaN before the gather, so a pad that reached a token would be seen.
    """
    group = get_group("tp")
    qkv = QKVParallelLinear(HIDDEN, HEADS, HEAD_DIM)
    norm = DistributedRMSNorm(HEADS * HEAD_DIM, 1e-6)
    attention_out = RowParallelLinear(HEADS * HEAD_DIM, HIDDEN, sequence_parallel=sequence_parallel)
    up, down = (
        ColumnParallelLinear(HIDDEN, INNER),
        RowParallelLinear(INNER, HIDDEN, sequence_parallel=sequence_parallel),
    )
    square = [random(HIDDEN, HIDDEN, seed=seed) / 5 for seed in range(4)]
    load(qkv, group.rank, weight=square[:3], bias=[random(HIDDEN, seed=10 + seed) for seed in range(3)])
    load(norm, group.rank, weight=random(HIDDEN, seed=20))
    load(attention_out, group.rank, weight=square[3], bias=random(HIDDEN, seed=21))
    load(up, group.rank, weight=random(INNER, HIDDEN, seed=22) / 5, bias=random(INNER, seed=23))
    load(down, group.rank, weight=random(HIDDEN, INNER, seed=24) / 3, bias=random(HIDDEN, seed=25))

    sequence = SequenceParallel(tokens, group if sequence_parallel else AxisGroup("tp"))
    hidden = sequence.split(random(2, tokens, HIDDEN, seed=30))
    with Collectives() as collectives:
        query, key, value = qkv(sequence.gather(F.layer_norm(hidden, (HIDDEN,))))
        query, key, value = (t.unflatten(2, (-1, HEAD_DIM)).transpose(1, 2) for t in (norm(query), norm(key), value))
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        hidden = hidden + attention_out(attended)
        hidden = hidden + down(torch.tanh(up(sequence.gather(F.layer_norm(hidden, (HIDDEN,))))))
    part = hidden.clone()
    hidden[:, sequence.shard.valid_length :] = torch.nan
    issued = list(zip(collectives.names, collectives.shapes, strict=True))
    return sequence.gather(hidden), part, issued


def rows_of_a_sum(tokens: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`reduce_scatter` of tensors that differ between the ranks, and the rows that it should be."""
    group = get_group("tp")
    sequence = SequenceParallel(tokens, group)
    of_ranks = [random(2, tokens, 3, seed=rank).movedim(1, dim) for rank in range(group.size)]
    scattered = sequence.reduce_scatter(of_ranks[group.rank], dim)
    return scattered, sequence.split(torch.stack(of_ranks).sum(0), dim)
