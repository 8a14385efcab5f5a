# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism against tensor parallelism without it and against one process; what it communicates."""

from __future__ import annotations

import parallel_ranks
import pytest
import sequence_parallel_ranks
import torch

from omni_neuron_parallel import AxisGroup, RankPool, SequenceParallel, Topology

# With and without a remainder over 2 and 4 ranks, a rank with pads only, and fewer tokens than ranks.
TOKENS = [8, 9, 6, 5, 3, 1]


@pytest.fixture(params=["two_ranks", "four_ranks"])
def pool(request: pytest.FixtureRequest) -> RankPool:
    return request.getfixturevalue(request.param)


def block(pool: RankPool, tokens: int, sequence_parallel: bool) -> list:
    topology = Topology(tp=pool.world_size)
    return pool.run(parallel_ranks.with_topology, topology, sequence_parallel_ranks.block, tokens, sequence_parallel)


@pytest.mark.parametrize("tokens", TOKENS)
def test_on_equals_off_equals_one_process(pool: RankPool, tokens: int) -> None:
    expected, _, issued = parallel_ranks.with_topology(Topology(), sequence_parallel_ranks.block, tokens, True)
    assert issued == []
    on, off = (block(pool, tokens, sequence_parallel) for sequence_parallel in (True, False))
    for (with_it, part, _), (without, _, _) in zip(on, off, strict=True):
        assert part.shape[1] == -(-tokens // pool.world_size)
        torch.testing.assert_close(with_it, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(with_it, without, rtol=1e-5, atol=1e-5)
        assert torch.equal(with_it, on[0][0])


@pytest.mark.parametrize("tokens", [8, 9])
def test_no_all_reduce_over_hidden_states(pool: RankPool, tokens: int) -> None:
    tp, hidden = pool.world_size, sequence_parallel_ranks.HIDDEN
    part = -(-tokens // tp)
    norms = [("all_reduce", (1, 2, tokens, 1))] * 2
    gather = ("all_gather", (2, part, hidden))
    scatter = ("reduce_scatter", (2, part * tp, hidden))
    for _, _, issued in block(pool, tokens, True):
        assert issued == [gather, *norms, scatter, gather, scatter]
    for _, _, issued in block(pool, tokens, False):
        assert issued == [*norms, *[("all_reduce", (2, tokens, hidden))] * 2]


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_reduce_scatter_sums_and_pads(pool: RankPool, dim: int) -> None:
    topology = Topology(tp=pool.world_size)
    results = pool.run(parallel_ranks.with_topology, topology, sequence_parallel_ranks.rows_of_a_sum, 5, dim)
    for scattered, expected in results:
        torch.testing.assert_close(scattered, expected)


def test_off_is_the_identity() -> None:
    hidden = torch.ones(1, 3, 2)
    sequence = SequenceParallel(3, AxisGroup("tp"))
    for result in (sequence.split(hidden), sequence.gather(hidden), sequence.reduce_scatter(hidden)):
        assert result.data_ptr() == hidden.data_ptr()
        assert result.shape == hidden.shape
