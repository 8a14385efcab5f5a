# SPDX-License-Identifier: Apache-2.0
"""What counts as a line of code beyond the model, and that the foreign models have no file of an unknown kind."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from count_glue import COLUMNS, FOREIGN, GLUE, KINDS, ROOT, count, lines_of_code

LIMIT = 300
SOURCE = '''# a comment
"""A docstring
of two lines."""

import math  # code


def area(
    radius: float,
) -> float:
    """Of a circle."""
    text = """not a
docstring"""
    return math.pi * radius**2 + len(text)
'''


def test_lines_that_hold_code() -> None:
    assert lines_of_code(SOURCE) == 7


def test_files_by_kind(tmp_path: Path) -> None:
    for name in ("src/acme/transformer.py", "src/acme/registry.py", "src/acme/words.py", "tests/test_conformance_a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("A = 1\nB = 2\n")
    assert count(tmp_path) == {"model": 2, "registration": 2, "pipeline": 2, "conformance test": 2}
    assert {*KINDS.values(), *GLUE} <= {*COLUMNS}


def test_glue_of_the_foreign_models() -> None:
    for name in FOREIGN:
        found = count(ROOT / "packages" / name)
        glue = sum(found[column] for column in GLUE)
        assert found["model"] > 200  # it is counted at all
        assert glue <= LIMIT, f"{name} has {glue} lines of glue; docs/onboarding.md names goal and figures"
