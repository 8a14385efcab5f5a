# SPDX-License-Identifier: Apache-2.0
"""The rank layout, and the groups that are built from it."""

from __future__ import annotations

import itertools

import parallel_ranks
import pytest

from omni_neuron_parallel import AXES, RankPool, Topology, register_replica_groups, valid_tensor_parallel_sizes

LAYOUTS = [
    Topology(tp, cp, cfg)
    for tp, cp, cfg in itertools.product((1, 2, 3, 4, 5, 8), (1, 2, 4, 8), (1, 2))
    if tp * cp * cfg <= 64
]


@pytest.mark.parametrize("topology", LAYOUTS, ids=str)
def test_every_axis_partitions_the_world(topology: Topology) -> None:
    for axis in AXES:
        groups = topology.groups(axis)
        assert sorted(itertools.chain.from_iterable(groups)) == list(range(topology.world_size))
        assert {len(group) for group in groups} == {topology.size(axis)}
        for group in groups:
            # Along its axis a group differs in nothing else, and stands in the order of that coordinate.
            coordinates = [topology.coordinates(rank) for rank in group]
            assert [place.pop(axis) for place in coordinates] == list(range(len(group)))
            assert all(place == coordinates[0] for place in coordinates)


def test_tensor_parallel_ranks_are_neighbours() -> None:
    topology = Topology(tp=4, cp=8, cfg=2)
    assert topology.groups("tp")[1] == (4, 5, 6, 7)
    assert topology.groups("cp")[1] == (1, 5, 9, 13, 17, 21, 25, 29)
    assert topology.groups("cfg")[0] == (0, 32)
    assert topology.rank(tp=3, cp=2, cfg=1) == 43
    assert topology.coordinates(43) == {"tp": 3, "cp": 2, "cfg": 1}
    assert str(topology) == "TP4×CP8×CFG2"


def test_errors() -> None:
    with pytest.raises(ValueError, match="cp = 0"):
        Topology(cp=0)
    with pytest.raises(ValueError, match=r"rank 8 is outside a world of 8 \(TP4×CP2×CFG1\)"):
        Topology(4, 2).coordinates(8)
    with pytest.raises(ValueError, match=r"tp coordinate 4 is outside 0..3"):
        Topology(4, 2).rank(tp=4)
    with pytest.raises(ValueError, match=r"register_replica_groups\(tp_size=4, cp_size=8\): the topology is TP1"):
        register_replica_groups(4, 8)


def test_valid_sizes_for_the_heads_of_a14b() -> None:
    assert valid_tensor_parallel_sizes(40) == [1, 2, 4, 5, 8, 10, 20, 40]


@pytest.mark.parametrize("topology", [Topology(tp=4), Topology(tp=2, cp=2), Topology(tp=2, cfg=2)], ids=str)
def test_collectives_stay_in_their_group_and_order(topology: Topology, four_ranks: RankPool) -> None:
    for axis in AXES:
        gathered = four_ranks.run(parallel_ranks.with_topology, topology, parallel_ranks.gathered_ranks, axis)
        reduced = four_ranks.run(parallel_ranks.with_topology, topology, parallel_ranks.reduced_ranks, axis)
        for rank in range(4):
            assert gathered[rank] == list(topology.group_of(axis, rank))
            assert reduced[rank] == sum(topology.group_of(axis, rank))


def test_a_topology_that_is_not_the_worlds(two_ranks: RankPool) -> None:
    messages = two_ranks.run(parallel_ranks.wrong_topology)
    assert set(messages) == {"TP3×CP1×CFG1 is a world of 3 ranks, torch.distributed has 2"}
