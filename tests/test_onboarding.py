# SPDX-License-Identifier: Apache-2.0
"""docs/onboarding.md: its snippets and those of its commands that need neither an environment nor an engine.

`./dev new_model` runs the whole page as it stands, in an empty folder and a fresh environment.
"""

from __future__ import annotations

import importlib
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_omni_neuron.cli import app

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools" / "packaging"))
page_script = importlib.import_module("page_script")

PAGE = ROOT / "docs" / "onboarding.md"
PACKAGE = "acme_toy_video"
# What only the session runs: an environment, the installed package, engines, the kit, mypy, a build.
OF_THE_SESSION = (
    "uv ",
    ". env/",
    "export ",
    "vllm-omni-neuron models",
    f"python {PACKAGE.replace('_', '-')}/generate.py",
    "pytest ",
    "cat report",
    "mypy ",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty one, as the current one; what is made in it can be imported, and is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "acme-toy-video" / "src")
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


def test_the_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = {"__name__": "page"}
    transformer = folder / "acme-toy-video" / "src" / PACKAGE / "transformer.py"
    for block in page_script.blocks(PAGE):
        if block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.text, str(PAGE), "exec"), namespace)
            continue
        for command, fails in page_script.commands(block):
            program, *arguments = shlex.split(command)
            if command.startswith(OF_THE_SESSION):
                continue
            assert not fails
            if program == "vllm-omni-neuron":
                result = CliRunner().invoke(app, arguments)
                assert result.exit_code == 0, result.output
                made = transformer.read_text()
                importlib.invalidate_caches()
            elif program == "python":
                assert arguments[0] == "-m"
                monkeypatch.setattr(sys, "argv", arguments[1:])
                runpy.run_module(arguments[1], run_name="__main__")
            elif program == "sed":
                before = transformer.read_text()
                subprocess.run([program, *arguments], check=True)
                assert transformer.read_text() != before
            else:
                assert program == "ruff"
                subprocess.run([sys.executable, "-m", program, *arguments, "--no-cache"], check=True)
    assert transformer.read_text() == made  # what the page breaks it mends


def test_the_session_runs_every_command() -> None:
    program = page_script.script(PAGE)
    for block in page_script.blocks(PAGE):
        for command, fails in page_script.commands(block) if block.language == "sh" else []:
            assert f"\n{'if ' if fails else ''}{command}{';' if fails else chr(10)}" in program
    assert subprocess.run(["bash", "-n"], input=program, text=True).returncode == 0
