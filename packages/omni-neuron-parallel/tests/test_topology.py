# SPDX-License-Identifier: Apache-2.0
"""The rank layout: every axis partitions the world, and sizes that do not fit are named."""

from __future__ import annotations

import itertools
import re

import parallel_ranks
import pytest

from omni_neuron_parallel import (
    AXES,
    MESH_AXES,
    RankPool,
    Topology,
    expand_to_partition,
    place_on_mesh,
    valid_tensor_parallel_sizes,
)

WORLD = 64
SIZES = [
    (tp, cp, cfg)
    for tp in range(1, WORLD + 1)
    for cp in range(1, WORLD // tp + 1)
    for cfg in range(1, WORLD // (tp * cp) + 1)
]


def check(topology: Topology) -> None:
    in_order = list(range(topology.world_size))
    coordinates = [topology.coordinates(rank) for rank in in_order]
    assert [topology.rank(**place) for place in coordinates] == in_order
    for axis in AXES:
        groups = topology.groups(axis)
        assert sorted(itertools.chain.from_iterable(groups)) == in_order
        assert {len(group) for group in groups} == {topology.size(axis)}
    for axis in MESH_AXES:
        for group in topology.groups(axis):
            # Along its axis a group differs in nothing else, and stands in the order of that coordinate.
            places = [dict(coordinates[rank]) for rank in group]
            assert [place.pop(axis) for place in places] == list(range(len(group)))
            assert all(place == places[0] for place in places)


def test_every_axis_partitions_the_world() -> None:
    """Every (TP, CP, CFG) of up to 64 ranks, in order and on the mesh of trn2."""
    for sizes in SIZES:
        topology = Topology(*sizes)
        check(topology)
        placed = place_on_mesh(topology)
        if placed is not topology:
            check(placed)


def test_every_vae_group_partitions_the_world() -> None:
    for sizes in SIZES:
        world = sizes[0] * sizes[1] * sizes[2]
        for vae_patch in range(1, world + 1):
            if world % vae_patch:
                continue
            topology = place_on_mesh(Topology(*sizes, vae_patch))
            groups = topology.groups("vae_patch")
            assert list(itertools.chain.from_iterable(groups)) == list(range(world))
            assert {len(group) for group in groups} == {vae_patch}
            assert [rank for rank in range(world) if topology.decodes(rank)] == list(groups[0])


def test_tensor_parallel_ranks_are_neighbours() -> None:
    topology = Topology(tp=4, cp=8, cfg=2, vae_patch=16)
    assert topology.groups("tp")[1] == (4, 5, 6, 7)
    assert topology.groups("cp")[1] == (1, 5, 9, 13, 17, 21, 25, 29)
    assert topology.groups("cfg")[0] == (0, 32)
    assert topology.groups("vae_patch")[3] == tuple(range(48, 64))
    assert topology.rank(tp=3, cp=2, cfg=1) == 43
    assert topology.coordinates(43) == {"tp": 3, "cp": 2, "cfg": 1}
    assert (str(topology), str(Topology(4, 8, 2))) == ("TP4×CP8×CFG2, VAE patch 16", "TP4×CP8×CFG2")


def test_placement() -> None:
    turned = Topology(tp=2, cp=2, placement=(0, 3, 1, 2))
    assert turned.groups("tp") == ((0, 3), (1, 2))
    assert turned.groups("cp") == ((0, 1), (3, 2))
    assert turned.coordinates(3) == {"tp": 1, "cp": 0, "cfg": 0}
    assert turned.rank(tp=1, cp=1) == 2
    check(turned)
    assert Topology(tp=2, cp=2, placement=(0, 1, 2, 3)) == Topology(tp=2, cp=2) != turned


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cp": 0}, "cp = 0: the size of a parallel axis is at least 1"),
        ({"vae_patch": 0}, "vae_patch = 0: the size"),
        (
            {"tp": 4, "cp": 3, "vae_patch": 5},
            "vae_patch = 5 does not divide the world of 12 ranks (tp 4 · cp 3 · cfg 1); valid are 1, 2, 3, 4, 6, 12",
        ),
        ({"vae_patch": 2}, "vae_patch = 2 does not divide the world of 1 ranks"),
        ({"tp": 2, "placement": (0, 0)}, "placement (0, 0) does not hold each of the ranks 0..1 exactly once"),
    ],
)
def test_sizes_that_cannot_be(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Topology(**arguments)


def test_ranks_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"rank 8 is outside a world of 8 \(TP4×CP2×CFG1\)"):
        Topology(4, 2).coordinates(8)
    with pytest.raises(ValueError, match=r"tp coordinate 4 is outside 0..3"):
        Topology(4, 2).rank(tp=4)


def test_validity_against_a_model_and_a_machine() -> None:
    Topology(4, 8, 2).check(num_heads=40, num_tokens=3645, num_devices=64)
    Topology(16).check()
    with pytest.raises(ValueError, match=r"^TP16×CP1×CFG1: tp = 16 does not divide 40 attention heads: use 1, 2, 4, 5"):
        Topology(16).check(num_heads=40)
    assert Topology(16, 8).problems(num_heads=40, num_tokens=7, num_devices=64) == [
        "tp = 16 does not divide 40 attention heads: use 1, 2, 4, 5, 8, 10, 20, 40",
        "cp = 8 is more than the 7 tokens of the sequence: use 1 to 7",
        "tp 16 · cp 8 · cfg 1 = 128 ranks are more than the 64 devices: use sizes whose product is at most 64",
    ]


def test_valid_sizes_for_the_heads_of_a14b() -> None:
    assert valid_tensor_parallel_sizes(40) == [1, 2, 4, 5, 8, 10, 20, 40]


def test_one_group_expands_to_a_partition() -> None:
    assert expand_to_partition(range(16), 64) == Topology(64, vae_patch=16).groups("vae_patch")
    assert expand_to_partition((0, 4), 8) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert expand_to_partition((7, 3), 8) == ((7, 3), (4, 0), (5, 1), (6, 2))
    assert expand_to_partition((0, 3), 6) == ((0, 3), (1, 4), (2, 5))
    assert expand_to_partition((0, 5), 6) == ((0, 5), (1, 2), (3, 4))  # no copy fits
    assert expand_to_partition((2,), 3) == ((2,), (0,), (1,))
    for ranks in itertools.permutations(range(6), 3):
        groups = expand_to_partition(ranks, 6)
        assert groups[0] == ranks
        assert sorted(itertools.chain.from_iterable(groups)) == list(range(6))
        assert {len(group) for group in groups} == {3}
    with pytest.raises(ValueError, match="group of 3 ranks cannot be one of equal groups in a world of 8; valid sizes"):
        expand_to_partition((0, 1, 2), 8)
    for wrong in ((), (0, 0), (0, 8)):
        with pytest.raises(ValueError, match="are not one or more different ranks of a world of 8"):
            expand_to_partition(wrong, 8)


@pytest.mark.parametrize(
    "topology",
    [
        Topology(tp=4, vae_patch=2),
        Topology(tp=2, cp=2),
        Topology(tp=2, cfg=2, vae_patch=4),
        Topology(tp=2, cp=2, vae_patch=2, placement=(0, 3, 1, 2)),
    ],
    ids=str,
)
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
