# SPDX-License-Identifier: Apache-2.0
"""The physical mesh of trn2.48xlarge: which layouts lie on its fabric, and where each rank then stands.

The machine has 16 chips in a 4×4 torus and four logical cores a chip (two physical cores each), 64 ranks; chip =
rank // 4. Source of the table and of the rules: the documentation of AWS's plugin and of vllm-neuron, as recorded; no
run on a device has confirmed them here. The table's places are cores that follow each other from a multiple of 16;
where the engine's cores are others, `place_on_fabric` finds out what routes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from omni_neuron_parallel.topology import AXES, Axis, Topology
from omni_neuron_runtime import NeuronPackageError, env, is_cpu_mode, platform_target, visible_cores

CORES_PER_CHIP = 4
TORUS_SIDE = 4
ROW_LENGTH = 8


def _trn2_rows() -> tuple[tuple[int, ...], ...]:
    """The documented 8×8 table: a pair of rows holds the four chips of one row of the torus.

    The outer two chips (a pair by wrap-around) and the inner two make a row each, so that a row is a pair of
    neighbours, and a column of rows is a rectangle of chips.
    """
    outer, inner = (0, 1, 2, 3, 12, 13, 14, 15), (4, 5, 6, 7, 8, 9, 10, 11)
    return tuple(tuple(first + core for core in row) for first in range(0, 64, 16) for row in (outer, inner))


TRN2_ROWS = _trn2_rows()


def has_physical_mesh(topology: Topology) -> bool:
    """Whether the layout lies on the mesh of trn2.48xlarge.

    A: CP 8 and TP · CFG = 8: a column of the table is a CP group, a row is CFG blocks of TP cores.
    B: TP 8 and CP > 1 on an even number of rows, at most eight: a row is a TP group, and the rows of a column are CP
    groups with CFG varying fastest. (An odd number of rows would end in the middle of a row of chips.)
    """
    if topology.cp == ROW_LENGTH and topology.tp * topology.cfg == ROW_LENGTH:
        return True
    rows = topology.cp * topology.cfg
    return topology.tp == ROW_LENGTH and topology.cp > 1 and rows <= len(TRN2_ROWS) and rows % 2 == 0


def place_on_mesh(topology: Topology) -> Topology:
    """The topology with each rank at its place on the mesh of trn2.48xlarge; rank 0 stays at (0, 0, 0).

    Unchanged where the layout does not lie on the mesh (`has_physical_mesh`), or has a placement already.
    """
    if topology.placement is not None or not has_physical_mesh(topology):
        return topology
    whole_rows = topology.tp == ROW_LENGTH
    placement: list[int] = []
    for cfg in range(topology.cfg):
        for cp in range(topology.cp):
            row = TRN2_ROWS[cp * topology.cfg + cfg if whole_rows else cp]
            first = 0 if whole_rows else cfg * topology.tp
            placement += row[first : first + topology.tp]
    return dataclasses.replace(topology, placement=tuple(placement))


def mesh_is_in_force() -> bool:
    """Whether this process runs where ranks are laid on the mesh: on a trn2, VLLM_NEURON_SWITCH_CC unset or 0.

    Not in CPU mode, and not where the chip cannot be told.

    Raises:
        EnvironmentVariableError: VLLM_NEURON_SWITCH_CC is neither 0 nor 1.
    """
    if env.get("VLLM_NEURON_SWITCH_CC") or is_cpu_mode():
        return False
    try:
        return platform_target() == "trn2"
    except NeuronPackageError:
        return False


def routes_on_trn2(ranks: Sequence[int]) -> bool:
    """Whether a collective over these ranks can be routed on trn2.48xlarge, by the fabric rule that is documented.

    Each chip contributes the same core offsets, and the chips are one chip, two neighbours (wrap-around included), a
    full row or column of the torus, or a rectangle of at least two rows and columns.
    """
    offsets: dict[int, set[int]] = {}
    for rank in ranks:
        offsets.setdefault(rank // CORES_PER_CHIP, set()).add(rank % CORES_PER_CHIP)
    if len({frozenset(cores) for cores in offsets.values()}) > 1:
        return False
    rows, columns = ({place[axis] for place in (divmod(chip, TORUS_SIDE) for chip in offsets)} for axis in (0, 1))
    if len(offsets) != len(rows) * len(columns):
        return False
    line = max(rows, columns, key=len)
    if len(line) == len(offsets):  # the chips of one row or column
        return len(line) in (1, TORUS_SIDE) or (len(line) == 2 and max(line) - min(line) in (1, TORUS_SIDE - 1))
    return all(max(side) - min(side) + 1 == len(side) for side in (rows, columns))


def unroutable_groups(topology: Topology, cores: Sequence[int] | None = None) -> dict[Axis, list[tuple[int, ...]]]:
    """The groups of each axis that `routes_on_trn2` refuses; empty where all of them route.

    Args:
        topology: whose groups.
        cores: the core of each rank; None for the rank's own number.
    """
    places = range(topology.world_size) if cores is None else cores
    refused = {
        axis: [group for group in topology.groups(axis) if not routes_on_trn2([places[rank] for rank in group])]
        for axis in AXES
    }
    return {axis: groups for axis, groups in refused.items() if groups}


def place_on_fabric(topology: Topology) -> Topology:
    """The topology with each rank at a place from which its collectives can be routed, where a mesh is in force.

    On the mesh's places (`place_on_mesh`) if those route from the cores that the ranks are on, else in the order of the
    ranks. The cores are the visible ones, in their order, if there are as many as ranks, else 0, 1, ….

    Raises:
        ValueError: neither routes; the message names the groups, their cores and what to choose.
        EnvironmentVariableError: NEURON_VISIBLE_DEVICES is not a list of cores.
    """
    if topology.world_size == 1 or not mesh_is_in_force():
        return topology
    visible = visible_cores() or []
    cores = visible if len(visible) == topology.world_size else list(range(topology.world_size))
    for candidate in (place_on_mesh(topology), topology):
        refused = unroutable_groups(candidate, cores)
        if not refused:
            return candidate
    listed = "; ".join(f"{axis} {[cores[rank] for rank in groups[0]]}" for axis, groups in refused.items())
    raise ValueError(
        f"{topology} on the cores {','.join(map(str, cores))}: collectives over these cores cannot be routed on trn2: "
        f"{listed}. A group takes the same cores of one chip (core // {CORES_PER_CHIP}), two neighbours, a row, a "
        f"column or a rectangle of the torus. List cores that follow each other from a multiple of 16 in "
        f"NEURON_VISIBLE_DEVICES, or choose another layout; VLLM_NEURON_SWITCH_CC=1 is for collectives through a switch"
    )
