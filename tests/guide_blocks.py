# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/features.md: its fenced blocks, and how those in Python are run."""

from __future__ import annotations

import importlib
import os
import runpy
import shlex
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools" / "packaging"))
page_script = importlib.import_module("page_script")

PAGE = ROOT / "docs" / "features.md"
MAKES_CHECKPOINT = "python -m omni_neuron_wan22."


def blocks(language: str) -> list[Any]:
    """The page's blocks in that language, in their order."""
    return page_script.blocks(PAGE, (language,))


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
