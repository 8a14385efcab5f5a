# SPDX-License-Identifier: Apache-2.0
"""Groups in group order, groups by name, and the ring's permutation as one traced operation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import group_ranks
import parallel_ranks
import pytest
import torch
from parallel_ranks import random

from omni_neuron_parallel import (
    AXES,
    AxisGroup,
    RankPool,
    Topology,
    broadcast_from_first,
    destroy_parallel,
    get_group,
    get_topology,
    groups,
    initialize_parallel,
    install_groups,
    meshes,
    place_on_mesh,
    provider,
    register_group,
    register_replica_groups,
    vllm_omni_adapter,
)

# A small mesh like trn2's: rows (0, 3) and (1, 2), so that one of the two columns is descending.
TURNED = Topology(tp=2, cp=2, placement=(0, 3, 1, 2))


@pytest.fixture
def no_groups() -> Iterator[None]:
    yield
    destroy_parallel()


def test_descending_groups_keep_their_order(four_ranks: RankPool) -> None:
    results = four_ranks.run(parallel_ranks.with_topology, TURNED, group_ranks.in_group_order, "cp")
    for rank, seen in enumerate(results):
        group = [[0, 1], [0, 1], [3, 2], [3, 2]][rank]
        place, other = group.index(rank), group[group.index(rank) - 1]
        assert seen["group"] == tuple(group)
        assert seen["rank"] == seen["coordinate"] == place
        # What c10d gives is ascending, so it is swapped in the group (3, 2); ours is not.
        assert seen["raw gather"] == sorted(group)
        assert seen["gather"] == group
        assert seen["gather of columns"] == [group]
        assert seen["scatter"] == [2.0 * rank]
        assert seen["scatter of columns"] == [[2.0 * rank], [-2.0 * rank]]
        assert seen["rotate"] == [other]
        assert seen["gather to first"] == (None if place else [[float(r), float(-r)] for r in group])


def test_longer_groups_in_any_order(four_ranks: RankPool) -> None:
    """Four ranks in an order that is neither ascending nor descending: places and their inverse differ."""
    topology = Topology(cp=4, placement=(2, 0, 3, 1))
    for rank, seen in enumerate(
        four_ranks.run(parallel_ranks.with_topology, topology, group_ranks.in_group_order, "cp")
    ):
        group = [2, 0, 3, 1]
        assert seen["raw gather"] == [0, 1, 2, 3]
        assert seen["gather"] == group and seen["gather of columns"] == [group]
        assert seen["scatter"] == [4.0 * rank]
        assert seen["rotate"] == [group[group.index(rank) - 1]]
        assert seen["gather to first"] == ([[float(r), float(-r)] for r in group] if rank == 2 else None)


def test_groups_by_name(four_ranks: RankPool) -> None:
    results = four_ranks.run(parallel_ranks.with_topology, Topology(tp=2, cp=2), group_ranks.named_groups)
    for rank, seen in enumerate(results):
        group = [2, 0] if rank in (0, 2) else [1, 3]
        assert seen == [
            "pairs",
            tuple(group),
            group.index(rank),
            group,
            True,
            "group 'pairs' exists with the groups ((2, 0), (1, 3)); take another name for ((0, 1), (2, 3))",
            "'cp' is an axis, whose groups are ((0, 2), (1, 3))",
            "the groups of 'half' are no partition of a world of 4: missing ranks [2, 3]. Valid are groups of one size "
            "that hold each of the ranks 0..3 exactly once",
            "there is no group 'pairs': there are tp, cp, cfg, vae_patch",
        ]


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ([], r"missing ranks \[0\]"),
        ([[0, 0]], r"ranks in more than one place \[0\]"),
        ([[0], [3]], r"ranks outside the world \[3\]"),
        ([[0], []], r"groups of unequal sizes \[0, 1\]"),
    ],
)
def test_what_is_no_partition(partition: list[list[int]], message: str, no_groups: None) -> None:
    with pytest.raises(ValueError, match=rf"the groups of 'x' are no partition of a world of 1: {message}\."):
        register_group("x", partition)
    assert register_group("x", [[0]]) is register_group("x", [[0]]) is get_group("x")


def test_the_seam_gets_every_partition(monkeypatch: pytest.MonkeyPatch, no_groups: None) -> None:
    class Named:
        group_name = "7"

    told: list[Any] = []
    monkeypatch.setattr(groups, "register_process_group_replica_groups", lambda *arguments: told.append(arguments))
    topology = Topology(tp=2, cp=2, placement=(0, 3, 1, 2))
    group = AxisGroup("cp", (3, 2), 1, Named())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no group for tp; every axis of TP2×CP2×CFG1 with more than one rank has one"):
        install_groups(topology, {"cp": group})
    with pytest.raises(ValueError, match=r"\[2, 3\] is no cp group of TP2×CP2×CFG1: \(\(0, 1\), \(3, 2\)\)"):
        install_groups(topology, {"cp": AxisGroup("cp", (2, 3), 0, Named()), "tp": group})  # type: ignore[arg-type]
    tp = AxisGroup("tp", (1, 2), 1, Named())  # type: ignore[arg-type]
    install_groups(topology, {"tp": tp, "cp": group})
    assert told == [("7", ((0, 3), (1, 2))), ("7", ((0, 1), (3, 2)))]
    assert get_topology() == topology
    register_replica_groups(tp_size=2, cp_size=2)
    assert told[2:] == told[:2]
    with pytest.raises(ValueError, match=r"register_replica_groups\(tp_size=4, cp_size=8\): the topology is TP2×CP2"):
        register_replica_groups(4, 8)
    with pytest.raises(RuntimeError, match=r"parallel groups exist for TP2×CP2×CFG1; call destroy_parallel\(\) before"):
        initialize_parallel(Topology())


@pytest.mark.parametrize("in_force", [True, False])
def test_where_the_mesh_is_in_force_ranks_are_laid_on_it(
    in_force: bool, monkeypatch: pytest.MonkeyPatch, no_groups: None
) -> None:
    """One rank of 16, its process groups replaced: the partitions they are made from, and what the adapter is given."""

    class World:
        is_initialized = staticmethod(lambda: True)
        get_world_size = staticmethod(lambda: 16)

    made: dict[str, Any] = {}

    def make_group(axis: str, partition: Any, _timeout: float | None) -> AxisGroup:
        made[axis] = partition
        ranks = next(group for group in partition if 8 in group)
        return AxisGroup(axis, ranks, ranks.index(8), World() if len(ranks) > 1 else None)  # type: ignore[arg-type]

    adopted: list[Topology] = []
    monkeypatch.setattr(meshes, "mesh_is_in_force", lambda: in_force)
    monkeypatch.delenv("NEURON_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(groups, "dist", World)
    monkeypatch.setattr(groups, "make_group", make_group)
    monkeypatch.setattr(groups, "register_process_group_replica_groups", lambda *_: None)
    monkeypatch.setattr(World, "group_name", "7", raising=False)
    monkeypatch.setattr(vllm_omni_adapter, "adopt_vllm_omni_groups", adopted.append)
    topology = Topology(tp=8, cp=2, vae_patch=4)
    expected = place_on_mesh(topology) if in_force else topology
    initialize_parallel(topology)
    initialize_parallel(topology)
    assert get_topology() == expected
    assert made == {axis: expected.groups(axis) for axis in AXES}
    assert get_group("cp").ranks == ((12, 8) if in_force else (0, 8))
    assert provider.ParallelProvider().initialize_from_vllm_omni(tp=8, cp=2, cfg=1, vae_patch=4) == expected
    assert adopted == [expected]


def test_no_rank_leaves_the_making_of_a_group_early(two_ranks: RankPool) -> None:
    # It might end the group at once, and with it the connections that another rank is still making.
    assert two_ranks.run(group_ranks.left_making_early, Topology(tp=2)) == [False, False]


def test_device_tensors_are_not_put_in_order() -> None:
    group = AxisGroup("cp", (12, 8), 0, object())  # type: ignore[arg-type]
    assert group._places(torch.empty(0)) == [1, 0]
    assert group._places(torch.empty(0, device="meta")) == [0, 1]
    with pytest.raises(ValueError, match="gather_to_first takes host tensors, not one on meta"):
        group.gather_to_first(torch.empty(0, device="meta"))


def test_broadcast_of_what_only_rank_0_has(two_ranks: RankPool) -> None:
    expected = torch.arange(6, dtype=torch.bfloat16).view(2, 3).t()
    for received in two_ranks.run(parallel_ranks.with_topology, Topology(tp=2), group_ranks.broadcast):
        assert torch.equal(received, expected)
    assert torch.equal(broadcast_from_first(expected), expected)
    with pytest.raises(ValueError, match="rank 0 broadcasts a host tensor, not meta"):
        broadcast_from_first(torch.empty(0, device="meta"))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_ring_in_one_graph(backend: str, two_ranks: RankPool) -> None:
    q, k, v = (random(1, 10, 3, 16, seed=seed) for seed in range(3))
    for valid in (7, 4):  # the second leaves rank 1 without a valid key
        results = two_ranks.run(
            parallel_ranks.with_topology, Topology(cp=2), group_ranks.compiled_ring, backend, q, k, v, valid
        )
        for eager_ring, ring, eager_chain, chain in results:
            torch.testing.assert_close(ring, eager_ring, rtol=1e-5, atol=1e-6)
            assert torch.equal(chain, eager_chain)


def test_the_next_block_is_on_its_way_in_the_graph_too(two_ranks: RankPool) -> None:
    names = two_ranks.run(parallel_ranks.with_topology, Topology(cp=2), group_ranks.traced_ring)
    block = ["matmul", "matmul"]  # scores, values
    assert names == [["omni_neuron.collective_permute", *block, "_c10d_functional.wait_tensor", *block]] * 2
