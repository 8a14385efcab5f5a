# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/features.md: its fenced blocks, and how those in Python are run."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "features.md"
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


MAKES_CHECKPOINT = "python -m omni_neuron_wan22."


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of the page that its first line stands on."""

    language: str
    text: str
    line: int


def blocks(language: str) -> list[Block]:
    """The page's blocks in that language, in their order."""
    page = PAGE.read_text(encoding="utf-8")
    found = [
        Block(match[1], match[2], page.count("\n", 0, match.start()) + 2)
        for match in _FENCE.finditer(page)
    ]  # fmt: skip
    return [block for block in found if block.language == language]


def commands() -> list[str]:
    """Every line of the page's blocks for a shell."""
    lines = [line for block in blocks("sh") for line in block.text.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.strip()]


def run_python(folder: Path) -> dict[str, Any]:
    """Run the Python examples as one program, started in `folder`; the lines they began on, and what stopped them."""
    os.chdir(folder)
    for command in commands():
        if command.startswith(MAKES_CHECKPOINT):
            _, _, module, *sys.argv[1:] = shlex.split(command, comments=True)
            runpy.run_module(module, run_name="__main__")
    namespace: dict[str, Any] = {"__name__": "guide"}
    done: list[int] = []
    for block in blocks("python"):
        # The page's own line numbers in a traceback.
        code = compile("\n" * (block.line - 1) + block.text, str(PAGE), "exec")
        try:
            exec(code, namespace)
        except Exception:
            return {"done": done, "error": traceback.format_exc()}
        done.append(block.line)
    return {"done": done, "error": None}
