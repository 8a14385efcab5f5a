# SPDX-License-Identifier: Apache-2.0
"""The physical mesh of trn2.48xlarge: its table, the layouts on it, the groups they make and the rule of its fabric."""

from __future__ import annotations

import pytest

from omni_neuron_parallel import (
    AXES,
    TRN2_ROWS,
    Topology,
    has_physical_mesh,
    mesh_is_in_force,
    meshes,
    place_on_fabric,
    place_on_mesh,
    routes_on_trn2,
    unroutable_groups,
)
from omni_neuron_runtime import NeuronPackageError

# Descending groups by axis, counted from the published table; every other group of these layouts is ascending.
ON_THE_MESH = {
    Topology(tp=8, cp=2): {"cp": 4},
    Topology(tp=8, cp=4): {"cp": 4},
    Topology(tp=8, cp=8): {"cp": 4},
    Topology(tp=4, cp=8, cfg=2, vae_patch=16): {"cp": 4},
    Topology(tp=8, cp=4, cfg=2, vae_patch=32): {"cfg": 16},
}
IN_ORDER = [Topology(tp=4), Topology(tp=4, cp=4), Topology(tp=4, cp=8, vae_patch=16), Topology(tp=8)]


def test_the_table() -> None:
    assert TRN2_ROWS[0] == (0, 1, 2, 3, 12, 13, 14, 15)
    assert TRN2_ROWS[1] == (4, 5, 6, 7, 8, 9, 10, 11)
    assert TRN2_ROWS[7] == (52, 53, 54, 55, 56, 57, 58, 59)
    assert sorted(rank for row in TRN2_ROWS for rank in row) == list(range(64))


@pytest.mark.parametrize(("topology", "descending"), ON_THE_MESH.items(), ids=str)
def test_descending_groups(topology: Topology, descending: dict[str, int]) -> None:
    placed = place_on_mesh(topology)
    # c10d sorts the ranks of a group, so these are the groups whose order it loses.
    counted = {axis: sum(list(group) != sorted(group) for group in placed.groups(axis)) for axis in AXES}
    assert {axis: count for axis, count in counted.items() if count} == descending
    assert placed.coordinates(0) == {"tp": 0, "cp": 0, "cfg": 0}
    assert placed.groups("vae_patch") == topology.groups("vae_patch")
    assert place_on_mesh(placed) is placed


def test_groups_on_the_mesh() -> None:
    two = place_on_mesh(Topology(tp=8, cp=2))
    assert two.groups("tp") == TRN2_ROWS[:2]
    assert two.groups("cp") == tuple(zip(*TRN2_ROWS[:2], strict=True))
    assert two.groups("cp")[4] == (12, 8)
    blocks = place_on_mesh(Topology(tp=4, cp=8, cfg=2))
    assert blocks.groups("tp")[8] == (12, 13, 14, 15)
    assert blocks.groups("cp")[0] == (0, 4, 16, 20, 32, 36, 48, 52)
    assert blocks.groups("cp")[4] == (12, 8, 28, 24, 44, 40, 60, 56)
    assert blocks.groups("cfg")[0] == (0, 12)
    fastest = place_on_mesh(Topology(tp=8, cp=4, cfg=2))
    assert fastest.groups("cp")[:8] == tuple(zip(*TRN2_ROWS[0::2], strict=True))
    assert fastest.groups("cfg")[4] == (12, 8)


def test_which_layouts_lie_on_it() -> None:
    assert all(has_physical_mesh(topology) for topology in ON_THE_MESH)
    assert has_physical_mesh(Topology(tp=2, cp=8, cfg=4)) and has_physical_mesh(Topology(tp=8, cp=3, cfg=2))
    # TP 8 on more than eight rows, on an odd number of rows, without CP; and what is in neither rule.
    others = [Topology(8, 8, 2), Topology(8, 16), Topology(8, 3), Topology(8, 1, 2), Topology(4, 8), Topology(2, 8, 2)]
    for topology in [*others, *IN_ORDER]:
        assert not has_physical_mesh(topology)
        assert place_on_mesh(topology) is topology


@pytest.mark.parametrize("topology", [*map(place_on_mesh, ON_THE_MESH), *IN_ORDER], ids=str)
def test_every_group_of_a_documented_layout_can_be_routed(topology: Topology) -> None:
    assert unroutable_groups(topology) == {}


def test_the_same_layouts_in_rank_order_cannot() -> None:
    refused = {str(topology): sorted(unroutable_groups(topology)) for topology in ON_THE_MESH}
    assert refused == {
        "TP8×CP2×CFG1": ["cp"],
        "TP8×CP4×CFG1": ["cp"],
        "TP8×CP8×CFG1": ["cp"],
        "TP4×CP8×CFG2, VAE patch 16": ["cfg"],
        "TP8×CP4×CFG2, VAE patch 32": ["cfg", "cp"],
    }


@pytest.mark.parametrize(
    ("ranks", "routes"),
    [
        ((0, 1, 2, 3), True),  # one chip
        ((0, 4), True),
        ((0, 12), True),  # neighbours by wrap-around, in a row
        ((0, 48), True),  # and in a column
        ((0, 8), False),  # two chips that are no neighbours
        ((0, 20), False),  # diagonal
        ((0, 5), False),  # another core of the other chip
        ((0, 4, 5), False),
        ((0, 4, 8), False),  # three of a row
        ((0, 4, 8, 12), True),
        ((0, 16, 32, 48), True),
        ((0, 4, 16, 20), True),
        ((0, 4, 32, 36), False),  # two rows that are no neighbours
        ((0, 4, 16), False),
        (range(64), True),
    ],
)
def test_the_rule_of_the_fabric(ranks: tuple[int, ...], routes: bool) -> None:
    assert routes_on_trn2(ranks) is routes


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}, True),
        ({"NEURON_PLATFORM_TARGET_OVERRIDE": "trn2", "VLLM_NEURON_SWITCH_CC": "0"}, True),
        ({"NEURON_PLATFORM_TARGET_OVERRIDE": "trn2", "VLLM_NEURON_SWITCH_CC": "1"}, False),
        ({"NEURON_PLATFORM_TARGET_OVERRIDE": "trn2", "VLLM_NEURON_CPU_MODE": "1"}, False),
        ({"NEURON_PLATFORM_TARGET_OVERRIDE": "trn3"}, False),
    ],
)
def test_when_the_mesh_is_in_force(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: bool) -> None:
    for name in ("NEURON_PLATFORM_TARGET_OVERRIDE", "VLLM_NEURON_SWITCH_CC", "VLLM_NEURON_CPU_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert mesh_is_in_force() is expected


def test_an_unknown_chip_has_no_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    def untold() -> str:
        raise NeuronPackageError("libtorch_neuronx_lite is not installed")

    monkeypatch.delenv("VLLM_NEURON_CPU_MODE", raising=False)
    monkeypatch.delenv("VLLM_NEURON_SWITCH_CC", raising=False)
    monkeypatch.setattr(meshes, "platform_target", untold)
    assert mesh_is_in_force() is False


@pytest.fixture
def on_trn2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meshes, "mesh_is_in_force", lambda: True)
    for name in ("NEURON_VISIBLE_DEVICES", "NEURON_RT_VISIBLE_CORES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("on_trn2")
@pytest.mark.parametrize("cores", [None, "0-15", "16-31", "48-63"])
def test_ranks_are_laid_on_the_mesh_where_their_cores_are_its(
    cores: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cores is not None:
        monkeypatch.setenv("NEURON_VISIBLE_DEVICES", cores)
    topology = Topology(tp=8, cp=2)
    assert place_on_fabric(topology) == place_on_mesh(topology) != topology


@pytest.mark.usefixtures("on_trn2")
def test_ranks_stay_in_order_where_only_that_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = Topology(tp=8, cp=2)
    # Chips 0 and 1 above 4 and 5: in order TP is a pair of neighbours, on the mesh's places it would be 0 and 5.
    monkeypatch.setenv("NEURON_VISIBLE_DEVICES", "0-7,16-23")
    assert list(unroutable_groups(place_on_mesh(topology), [*range(8), *range(16, 24)])) == ["tp"]
    assert place_on_fabric(topology) is topology
    monkeypatch.setenv("NEURON_VISIBLE_DEVICES", "8-15")
    assert place_on_fabric(Topology(tp=4, cp=2)) == Topology(tp=4, cp=2)


@pytest.mark.usefixtures("on_trn2")
def test_cores_from_which_nothing_routes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_VISIBLE_DEVICES", "8-23")
    with pytest.raises(ValueError, match=r"TP8×CP2×CFG1 on the cores 8,9,.*: cp \[8, 16\]\. .*NEURON_VISIBLE_DEVICES"):
        place_on_fabric(Topology(tp=8, cp=2))
    monkeypatch.setattr(meshes, "mesh_is_in_force", lambda: False)
    assert place_on_fabric(Topology(tp=8, cp=2)) == Topology(tp=8, cp=2)
