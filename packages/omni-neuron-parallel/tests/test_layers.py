# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel layers against the same layer on one rank, also at sizes that TP does not divide."""

from __future__ import annotations

import parallel_ranks
import pytest
import torch

from omni_neuron_parallel import (
    AxisGroup,
    QKVParallelLinear,
    RankPool,
    Topology,
    rms_norm_across_heads,
    shard_size,
)


def same_everywhere(pool: RankPool, function: object, *arguments: object) -> torch.Tensor:
    results = pool.run(parallel_ranks.with_topology, Topology(tp=pool.world_size), function, *arguments)
    assert all(torch.equal(result, results[0]) for result in results)
    return results[0]


def alone(function: object, *arguments: object) -> torch.Tensor:
    return parallel_ranks.with_topology(Topology(), function, *arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("pool", ["two_ranks", "four_ranks"])
@pytest.mark.parametrize("inner", [8, 7, 5])
def test_column_then_row(pool: str, inner: int, request: pytest.FixtureRequest) -> None:
    parallel = same_everywhere(request.getfixturevalue(pool), parallel_ranks.column_then_row, inner)
    torch.testing.assert_close(parallel, alone(parallel_ranks.column_then_row, inner), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pool", ["two_ranks", "four_ranks"])
def test_norm_spans_the_heads_of_all_ranks(pool: str, request: pytest.FixtureRequest) -> None:
    parallel = same_everywhere(request.getfixturevalue(pool), parallel_ranks.attention_heads)
    torch.testing.assert_close(parallel, alone(parallel_ranks.attention_heads), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pool", ["two_ranks", "four_ranks"])
@pytest.mark.parametrize("vocabulary", [8, 9, 11])
def test_embedding(pool: str, vocabulary: int, request: pytest.FixtureRequest) -> None:
    parallel = same_everywhere(request.getfixturevalue(pool), parallel_ranks.embedding, vocabulary)
    assert torch.equal(parallel, alone(parallel_ranks.embedding, vocabulary))


def test_norm_of_several_tensors_is_that_of_each() -> None:
    tensors = [parallel_ranks.random(2, 3, 8, seed=seed) for seed in (1, 2)]
    gains = [parallel_ranks.random(8, seed=seed) for seed in (3, 4)]
    for result, tensor, gain in zip(
        rms_norm_across_heads(tensors, gains, 8, 1e-6, AxisGroup("tp")), tensors, gains, strict=True
    ):
        expected = tensor / (tensor.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain
        torch.testing.assert_close(result, expected.float())


def test_heads_that_cannot_be_split() -> None:
    class Three(AxisGroup):
        def __post_init__(self) -> None:
            pass

    with pytest.raises(ValueError, match="4 attention heads cannot be split over 3"):
        QKVParallelLinear(6, 4, 2, group=Three("tp", (0, 1, 2)))


def test_shard_size_rounds_up() -> None:
    assert [shard_size(13824, shards) for shards in (1, 4, 5)] == [13824, 3456, 2765]
