# SPDX-License-Identifier: Apache-2.0
"""A page of the documentation as one program: what its fenced blocks say, in their order. Standard library only.

A line of a block for a shell with the comment `# fails…` must fail. Blocks in Python share their names.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of the page that its first line stands on."""

    language: str
    text: str
    line: int


def blocks(page: Path, languages: tuple[str, ...] = ("sh", "python")) -> list[Block]:
    """The page's blocks in these languages, in their order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(match[1], match[2], text.count("\n", 0, match.start()) + 2)
        for match in _FENCE.finditer(text)
        if match[1] in languages
    ]  # fmt: skip


def commands(block: Block) -> list[tuple[str, bool]]:
    """Each command of a block for a shell without its comment, and whether it must fail."""
    lines = [line.partition(" # ") for line in block.text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(line.strip(), comment.strip().startswith("fails")) for line, _, comment in lines]


def python_so_far(found: list[Block], number: int) -> str:
    """The Python blocks up to and with block `number`, with the page's own line numbers in a traceback."""
    text = ""
    for block in found[: number + 1]:
        if block.language == "python":
            text += "\n" * (block.line - 1 - text.count("\n")) + block.text
    return text


def script(page: Path) -> str:
    """The page as a script for bash, which stops at the first thing that does not do as it says."""
    lines, found = ["set -euo pipefail"], blocks(page)
    for number, block in enumerate(found):
        lines.append(f"echo {shlex.quote(f'{page.name}, line {block.line}')}")
        if block.language == "python":
            lines.append(f"python -c {shlex.quote(python_so_far(found, number))}")
            continue
        for command, fails in commands(block):
            lines.append(f"echo {shlex.quote(f'+ {command}')}")
            lines.append(f"if {command}; then echo 'should have failed'; exit 1; fi" if fails else command)
    return "\n".join(lines) + "\n"
