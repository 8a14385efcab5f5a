# SPDX-License-Identifier: Apache-2.0
"""docs/kernels.md says what the README of omni-neuron-kernels and the cost model of omni-neuron-nkisim say.

The README's tables are compared with the model by that package's own tests.
"""

from __future__ import annotations

from pathlib import Path

from omni_neuron_nkisim.costs import COST_RULES

ROOT = Path(__file__).parents[1]
README = ROOT / "packages" / "omni-neuron-kernels" / "README.md"
PAGE = ROOT / "docs" / "kernels.md"
SIZES = {"480p": "480p", "720p": "720p", "32,760": "480p", "75,600": "720p"}


def cost_tables() -> list[tuple[str, list[dict[str, str]]]]:
    """The README's tables of costs, each as the title of its first column and its rows by column."""
    tables: list[tuple[str, list[dict[str, str]]]] = []
    columns: list[str] = []
    for line in README.read_text().partition("## What the cost model says")[2].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            columns = []
        elif not columns:
            columns = cells
            tables.append((columns[0], []))
        elif set(cells[0]) != {"-"}:
            tables[-1][1].append(dict(zip(columns, cells, strict=True)))
    return tables


def summary() -> list[str]:
    """One row for each of the README's: kernel, where, LNC, time, how busy TensorE is, and what of that is useful."""
    lines = []
    for title, rows in cost_tables():
        for row in rows:
            kernel = row[title]
            if title == "softmax":
                kernel = f"`ring_attention`, {kernel.replace('_', ' ')}"
            elif title == "`causal_conv3d`":
                kernel = f"{title}, {kernel}, {row['output']}"
            size = SIZES.get(row.get("video") or row.get("tokens") or "480p", "")
            place = f"{row.get('target', 'trn2')}, {size}, LNC {row['LNC']}"
            lines.append(f"| {kernel} | {place} | {row['µs']} | {row['TensorE']} | {row['useful']} |")
    return lines


def rules() -> list[str]:
    """The rules of the cost model."""
    return [f"| {rule.instructions} | {rule.formula} | {rule.source} |" for rule in COST_RULES]


def updated(page: str) -> str:
    """The page with its two tables as they should be; what is around them stays."""
    lines: list[str] = []
    for line in page.splitlines():
        if not line.startswith("| ") or line in TABLES:
            lines.append(line)
        elif lines[-1].startswith("|---"):
            lines += TABLES[lines[-2]]()
    return "\n".join(lines) + "\n"


TABLES = {"| kernel | where | µs | TensorE | useful |": summary, "| instruction | cost | source |": rules}


def test_the_page_says_what_the_readme_and_the_model_say() -> None:
    page = PAGE.read_text()
    assert all(page.count(head) == 1 for head in TABLES)
    assert len(summary()) > 50 and len(rules()) > 10
    assert page == updated(page), "run python tests/test_docs_kernels.py"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
