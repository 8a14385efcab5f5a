# SPDX-License-Identifier: Apache-2.0
"""docs/planning.md says what the planner computes: figures, results and JSON keys."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from omni_neuron_parallel.planning import (
    GIB,
    MEASURED,
    METHODS,
    TARGETS,
    Case,
    Figure,
    Layout,
    VideoShape,
    plan,
    plan_as_json,
    suggest,
    suggestions_as_json,
)
from omni_neuron_wan22.planning import t2v_a14b

PAGE = Path(__file__).parents[1] / "docs" / "planning.md"
LAYOUTS = ((4, 8, 2), (4, 8, 1), (8, 4, 1), (8, 4, 2))
SHAPES = (VideoShape(480, 832, 81), VideoShape(720, 1280, 81))


def figures() -> str:
    """The table of hardware figures."""
    rows = ["| | target | value | source |", "|---|---|---|---|"]
    names = [field.name for field in dataclasses.fields(TARGETS["trn2"]) if field.name != "name"]
    for name in names:
        for target in TARGETS.values():
            figure: Figure = getattr(target, name)
            rows.append(f"| `{name}` | {target.name} | {figure.value:.4g} {figure.unit} | {figure.source} |")
    return "\n".join(rows)


def results() -> str:
    """The table of the documented layouts."""
    rows = [
        "| layout | size | K and V | GiB, of 24 | fits | by formulas alone | step, ms | compute | exposed | hidden |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for sizes in LAYOUTS:
        for shape in SHAPES:
            for method in METHODS:
                found = plan(Case(t2v_a14b(), Layout(*sizes, vae_patch=16, method=method), shape), TARGETS["trn2"])
                memory = found.memory
                alone = max(memory.formula_total("denoising"), memory.formula_total("decoding"))
                times = (found.step_seconds, found.compute_seconds, found.exposed_seconds, found.hidden_seconds)
                rows.append(
                    f"| {found.case.layout} | {shape.height}×{shape.width} | {method} | {memory.peak / GIB:.1f} | "
                    f"{'yes' if memory.fits else '**no**'} | {alone / GIB:.1f} | "
                    + " | ".join(f"{seconds * 1e3:.0f}" for seconds in times)
                    + " |"
                )
    return "\n".join(rows)


@pytest.mark.parametrize("block", [figures, results])
def test_tables_are_the_codes(block: Any) -> None:
    expected = block()
    assert expected in PAGE.read_text(encoding="utf-8"), f"docs/planning.md should have this table:\n{expected}"


def test_the_measured_account_is_quoted() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for value in (MEASURED.weights, MEASURED.scratch, MEASURED.unnamed, MEASURED.dma_spill, MEASURED.total):
        assert f"{value / GIB:.4g}" in page


def test_every_json_key_is_documented() -> None:
    page = PAGE.read_text(encoding="utf-8")
    case = Case(t2v_a14b(), Layout(4, 8, 2, 16), SHAPES[1])
    data = plan_as_json(plan(case, TARGETS["trn2"]), 64)
    data["suggestions"] = suggestions_as_json(suggest(case.model, case.shape, TARGETS["trn2"]))
    missing = [key for key in sorted(_keys(data)) if f"`{key}`" not in page]
    assert not missing


def _keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(_keys, value.values()))
    if isinstance(value, list):
        return set().union(*map(_keys, value))
    return set()
