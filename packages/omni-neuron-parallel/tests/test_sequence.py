# SPDX-License-Identifier: Apache-2.0
"""Shards of a sequence: cut and joined again, for every small length and world."""

from __future__ import annotations

from typing import Any

import context_ranks
import parallel_ranks
import pytest
import torch

from omni_neuron_parallel import AxisGroup, RankPool, SequenceShard, SplitTokens, Topology


@pytest.mark.parametrize("world", range(1, 9))
def test_split_and_join_is_identity(world: int) -> None:
    for length in range(1, 65):
        shards = [SequenceShard(length, world, rank) for rank in range(world)]
        hidden = parallel_ranks.random(2, length, 3, seed=length)
        rope = parallel_ranks.random(1, length, 1, 4, seed=length + 1)
        for whole, dim in ((hidden, 1), (hidden, -2), (rope, 1), (hidden.mT, 2)):
            parts = [shard.split(whole, dim) for shard in shards]
            assert {part.shape[dim] for part in parts} == {shards[0].shard_length}
            joined = torch.cat(parts, dim)
            assert torch.equal(joined.narrow(dim, 0, length), whole)
            assert not joined.narrow(dim, length, joined.shape[dim] - length).any()
        tokens = [token for shard in shards for token in range(shard.start, shard.end)]
        assert tokens == list(range(length))
        mask = torch.cat([shard.pad_mask() for shard in shards])
        assert mask.tolist() == [row >= length for row in range(world * shards[0].shard_length)]
        for shard in shards:
            assert shard.valid_lengths == tuple(other.end - other.start for other in shards)
            assert shard.valid_length + shard.num_pad == shard.shard_length
            assert int(shard.pad_mask().sum()) == shard.num_pad


@pytest.mark.parametrize("length", [1, 3, 4, 13])
def test_gather_on_ranks(length: int, four_ranks: RankPool) -> None:
    whole = parallel_ranks.random(2, length, 3, seed=0)
    for joined in four_ranks.run(parallel_ranks.with_topology, Topology(cp=4), context_ranks.gathered_shard, length):
        assert all(torch.equal(tensor, whole) for tensor in joined)


def test_lengths_of_a_sequence_that_ranks_do_not_divide() -> None:
    assert SequenceShard(3645, 8).valid_lengths == (456,) * 7 + (453,)
    assert SequenceShard(56700, 8).valid_lengths == (7088,) * 7 + (7084,)
    assert SequenceShard(9, 8, 7) == SequenceShard(9, 8, 7)
    assert SequenceShard(9, 8, 7).valid_lengths == (2, 2, 2, 2, 1, 0, 0, 0)


def test_errors() -> None:
    shard = SequenceShard(5, 2, 1)
    with pytest.raises(ValueError, match="0 tokens over 2 ranks"):
        SequenceShard(0, 2)
    with pytest.raises(ValueError, match=r"rank 2 is outside 0\.\.1"):
        SequenceShard(5, 2, 2)
    with pytest.raises(ValueError, match=r"dim 1 of a tensor \(1, 6\) has 6 rows, not 5 \(the whole sequence\)"):
        shard.split(torch.zeros(1, 6), 1)
    with pytest.raises(ValueError, match=r"the shard is 1 of 2, this rank is 0 of 1 in the cp group"):
        shard.gather(torch.zeros(1, 3), 1, AxisGroup("cp"))
    with pytest.raises(ValueError, match=r"dim 0 of a tensor \(2,\) has 2 rows, not 5 \(one shard\)"):
        SequenceShard(5).gather(torch.zeros(2), 0, AxisGroup("cp"))


def test_what_a_transformer_knows_of_its_place() -> None:
    unused: Any = object()  # no collective runs
    tp, cp = AxisGroup("tp", (4, 5), 1, unused), AxisGroup("cp", (1, 5, 9), 1, unused)
    model = SplitTokens(tp, cp, sequence_parallel=True)
    context, sequence = model.shards_of(10)
    assert (context.shard_length, context.start, sequence.shard.shard_length, sequence.group) == (4, 4, 2, tp)
    assert SplitTokens(tp, cp).sequence_group.size == 1
    # Eager code may use the numbers; a graph reads the places, the same graph on every rank.
    assert model.places() == (None, None)
    assert (model.context_place.tolist(), model.sequence_place.tolist()) == ([1], [1])
    assert not model.state_dict()
