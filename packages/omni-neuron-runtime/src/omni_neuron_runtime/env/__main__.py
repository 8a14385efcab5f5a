# SPDX-License-Identifier: Apache-2.0
"""Writes the page of environment variables: `python -m omni_neuron_runtime.env docs/environment.md [--check]`."""

from __future__ import annotations

import argparse
from pathlib import Path

from omni_neuron_runtime.env import VARIABLES, EnvVar

_HEAD = """\
<!-- Generated from the table in omni_neuron_runtime.env by `./dev docs`. Edit the table, not this page. -->
# Environment variables

Every variable that these packages read. A value that is not valid is an error that names the variable, the value and
what would be valid. An empty value counts as unset, except for a list of names, which then allows nothing. Variables
of vLLM, vLLM-Omni, PyTorch and the Neuron SDK that only those read are not listed.

| variable | value | default | meaning |
|---|---|---|---|
"""


def page() -> str:
    """The whole page, as Markdown."""
    return _HEAD + "".join(_line(row) for row in VARIABLES.values())


def _line(row: EnvVar) -> str:
    default = "unset" if row.default is None else f"`{int(row.default) if row.kind == 'bool' else row.default}`"
    valid = row.valid if row.choices is None else " or ".join(f"`{choice}`" for choice in row.choices)
    return f"| `{row.name}` | {valid} | {default} | {row.meaning} |\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m omni_neuron_runtime.env", description=__doc__)
    parser.add_argument("path", type=Path, help="the page to write")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page is not current")
    arguments = parser.parse_args()
    if not arguments.check:
        arguments.path.parent.mkdir(parents=True, exist_ok=True)
        arguments.path.write_text(page(), encoding="utf-8")
    elif not arguments.path.exists() or arguments.path.read_text(encoding="utf-8") != page():
        parser.exit(1, f"{arguments.path} is not current: run `python -m omni_neuron_runtime.env {arguments.path}`\n")


if __name__ == "__main__":
    main()
