# SPDX-License-Identifier: Apache-2.0
"""Writes the table of keys: `python -m vllm_omni_neuron.stage_config docs/stage-configuration.md [--check]`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .reference import key_table

BEGIN, END = "<!-- keys -->\n", "<!-- /keys -->\n"


def with_current_table(page: str) -> str:
    """`page` with the table between its two marks replaced by the current one."""
    before, mark, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"the page has no {BEGIN.strip()} … {END.strip()} to put the table in")
    return f"{before}{BEGIN}\n{key_table()}\n{END}{after}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m vllm_omni_neuron.stage_config", description=__doc__)
    parser.add_argument("path", type=Path, help="the page to update")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page is not current")
    arguments = parser.parse_args()
    page = arguments.path.read_text(encoding="utf-8")
    current = with_current_table(page)
    if not arguments.check:
        arguments.path.write_text(current, encoding="utf-8")
    elif page != current:
        parser.exit(1, f"{arguments.path} is not current: run `{parser.prog} {arguments.path}`\n")


if __name__ == "__main__":
    main()
