# SPDX-License-Identifier: Apache-2.0
"""docs/features.md: its commands and stage YAMLs are executed, its defaults are the code's.

Its Python examples run in the engines' process of test_wan22_engine.py. Commands run up to the engine, whose place a
stand-in takes.
"""

from __future__ import annotations

import importlib
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from omni_neuron_wan22 import request as wan22
from vllm_omni_neuron.cli import app, engine
from vllm_omni_neuron.stage_config import parse_stage_config

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))
guide_blocks = importlib.import_module("guide_blocks")


class EngineStandIn:
    """Takes the place of the engine and keeps what it was asked for."""

    request: engine.GenerateOptions | None = None

    def __call__(self, request: engine.GenerateOptions, phase: Any, profile_runs: int | None = None) -> None:
        self.request = request
        engine.engine_arguments(request)
        engine.engine_prompt(request)
        raise RuntimeError("no engine here")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> EngineStandIn:
    """A folder with what the commands name, as the current one."""
    stand_in = EngineStandIn()
    monkeypatch.setattr(engine, "run_engine", stand_in)
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "1")
    for name in ("tiny-wan", "tiny-i2v"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model_index.json").write_text("{}")
    (tmp_path / "tiny-fp8").mkdir()
    (tmp_path / "style.safetensors").touch()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name in ("first.png", "last.png"):
        Image.new("RGB", (8, 6)).save(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "wan22"))
    return stand_in


# What makes a checkpoint runs before the Python examples, which need it.
COMMANDS = [line for line in guide_blocks.commands() if not line.startswith(guide_blocks.MAKES_CHECKPOINT)]


@pytest.mark.parametrize("line", COMMANDS)
def test_commands(line: str, asked: EngineStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    command, _, comment = line.partition("#")
    program, *arguments = shlex.split(command)
    if program == "export":
        [(name, value)] = [argument.split("=", 1) for argument in arguments]
        monkeypatch.setenv(name, value)
        return
    generates = program == "python" or arguments[0] == "generate"
    if program == "python":
        script = typer.Typer()
        script.command()(importlib.import_module(Path(arguments.pop(0)).stem).main)
    else:
        assert program == "vllm-omni-neuron"
        script = app
    # Verbose, because the engine's output would go to a file that is kept after a failure.
    result = CliRunner().invoke(script, [*arguments, *(["--verbose"] if generates else [])])
    if comment.strip().startswith("fails: "):
        assert result.exit_code == 2, result.output
        assert comment.strip().removeprefix("fails: ") in " ".join(result.stderr.replace("│", " ").split())
    elif generates:
        assert asked.request is not None, result.output
    else:
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize("block", guide_blocks.blocks("yaml"), ids=lambda block: f"line {block.line}")
def test_stage_yamls(block: Any) -> None:
    import yaml

    parse_stage_config(yaml.safe_load(block.text), source=f"docs/features.md:{block.line}")


def table(title: str) -> dict[str, list[str]]:
    """A table of the guide by its rows' first cells, without what stands in brackets there."""
    section = guide_blocks.PAGE.read_text(encoding="utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:2] == "| "]
    return {row[0].partition(" (")[0].strip("`"): row[1:] for row in rows[1:]}


def test_defaults_are_the_codes() -> None:
    rows = table("Controls of a request")
    defaults = {name: cells[1] for name, cells in rows.items()}
    t2v = wan22.DEFAULTS["t2v"]
    expected = {
        "height": t2v.height,
        "width": t2v.width,
        "num_frames": t2v.num_frames,
        "num_inference_steps": t2v.num_inference_steps,
        "guidance_scale": t2v.guidance_scale,
        "flow_shift": wan22.DEFAULT_FLOW_SHIFT,
        "fps": t2v.fps,
        "max_sequence_length": wan22.DEFAULT_MAX_SEQUENCE_LENGTH,
        "num_outputs_per_prompt": 1,
        "sample_solver": "unipc",
        "output_type": "np",
    }
    assert {name: defaults[name] for name in expected} == {name: str(value) for name, value in expected.items()}
    assert str(t2v.boundary_ratio) in defaults["boundary_ratio"]


def test_defaults_of_every_model() -> None:
    rows = table("Models")
    for column, defaults in enumerate(wan22.DEFAULTS.values()):
        cells = {name: cells[column] for name, cells in rows.items()}
        assert cells["num_frames`, `fps"] == f"{defaults.num_frames}, {defaults.fps}"
        assert cells["num_inference_steps"] == str(defaults.num_inference_steps)
        assert cells["guidance_scale"] == str(defaults.guidance_scale)
        assert cells["boundary_ratio"].startswith(str(defaults.boundary_ratio))
        assert all(str(size) in cells["height`, `width"] for size in (defaults.height, defaults.width))


def test_every_option_of_generate_is_in_the_guide() -> None:
    page = guide_blocks.PAGE.read_text(encoding="utf-8")
    [command] = [found for found in app.registered_commands if found.callback.__name__ == "generate"]
    parameters = typer.main.get_command_from_info(
        command, pretty_exceptions_short=False, rich_markup_mode="rich"
    ).params
    options = [next(name for name in parameter.opts if name.startswith("--")) for parameter in parameters]
    for shown in ("--json", "--quiet", "--verbose", "--debug", "--model"):
        options.remove(shown)
    assert [option for option in options if option not in page] == []
