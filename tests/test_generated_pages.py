# SPDX-License-Identifier: Apache-2.0
"""docs/sdk.md and docs/support-matrix.md are what their generators write, and say what they should."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_omni_neuron import sdk

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def matrix() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "support_matrix.py"))


def test_the_sdks_reference_is_current_and_has_every_public_name() -> None:
    """A public name without a docstring stops the generator."""
    expected = runpy.run_path(str(ROOT / "tools" / "sdk_reference.py"))["page"]()
    text = (DOCS / "sdk.md").read_text(encoding="utf-8")
    assert text == expected, "run ./dev docs"
    assert [name for name in sdk.__all__ if f"\n### {name}\n" not in text] == []


def test_the_support_matrix_is_current(matrix: dict[str, Any]) -> None:
    kept = DOCS / "support-matrix.json"
    results = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    expected = matrix["page"](matrix["repository_models"](), results)
    assert (DOCS / "support-matrix.md").read_text(encoding="utf-8") == expected, "run ./dev docs"


def test_cells_of_the_support_matrix(matrix: dict[str, Any]) -> None:
    """Passed, failed, not tested and not supported; several suites of one architecture; what nobody tested says so."""
    from omni_neuron_testkit.conformance import ModelReport, TestResult

    [(model, spec)] = [one for one in matrix["repository_models"]() if one[1].architecture == "WanPipeline"]
    spec = replace(spec, dtypes=("float32",))

    def outcome(value: str, reason: str = "") -> dict[str, str]:
        return {"outcome": value, "reason": reason}

    first = ModelReport(
        architecture=spec.architecture,
        title="",
        distribution="",
        version="",
        suite="",
        axes={"tp": outcome("passed"), "cp": outcome("passed"), "cfg": outcome("passed")},
        features={"compile": outcome("passed"), "image_input": outcome("not_supported", "a T2V checkpoint")},
        dtypes={"float32": "passed"},
        tests=(TestResult("parity", "", "passed"), TestResult("layout", "tp2", "passed")),
    )
    second = replace(
        first,
        axes={"tp": outcome("passed"), "cp": outcome("failed", "rank 1")},
        features={"lora": outcome("untested", "no test")},
        tests=(TestResult("layout", "cp2", "failed"),),
    )
    page = matrix["page"]([(model, spec)], matrix["condense"]([first, second]))
    notes = dict(line.split(". ", 1) for line in page.partition("## Notes")[2].strip().splitlines())
    number = {text: number for number, text in notes.items()}
    for row in (
        "| tensor parallelism | ✓ |",
        "| context parallelism | ✗ |",
        "| guidance parallelism | ✓ ≤ 2 |",
        "| VAE patch parallelism | not tested |",
        "| bfloat16 | – |",
        "| float32 | ✓ |",
        "| `compile` | ✓ |",
        "| `fp8` | not tested |",
        f"| `image_input` | not tested [{number['a T2V checkpoint']}](#notes) |",
        f"| `lora` | not tested [{number['no test']}](#notes) |",
        f"| `last_image_input` | – [{number[spec.why_not('last_image_input')]}](#notes) |",
    ):
        assert f"\n{row}\n" in page, row
    assert "| 1 failed, 2 passed |" in page
