# SPDX-License-Identifier: Apache-2.0
"""The ring on real ranks: transfers start before the compute that hides them, and move no byte more than they must."""

from __future__ import annotations

import overlap_ranks
import parallel_ranks
import pytest
import torch

from omni_neuron_parallel import RankPool, Topology

TOKENS, HEADS, DIM = 64, 3, 8


@pytest.fixture(params=["two_ranks", "four_ranks"])
def pool(request: pytest.FixtureRequest) -> RankPool:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_order_and_bytes(pool: RankPool, dtype: torch.dtype) -> None:
    cp = pool.world_size
    received = 2 * (cp - 1) * TOKENS * HEADS * DIM * dtype.itemsize // cp
    # The proof of the bounded softmax: two float32 numbers a head from every other rank. Keys are never gathered.
    proof = [("gather", (cp - 1) * 2 * HEADS * 4), ("wait", 0)]
    step = [("start", received // (cp - 1)), ("compute", 0), ("wait", 0)]
    for events in pool.run(
        parallel_ranks.with_topology, Topology(cp=cp), overlap_ranks.ring_events, TOKENS, HEADS, DIM, dtype
    ):
        assert events == [*proof, *step * (cp - 1), ("compute", 0)]
        assert sum(size for what, size in events if what == "start") == received
