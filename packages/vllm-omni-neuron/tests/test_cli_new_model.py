# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-neuron new-model`: names that it takes, what it writes, what it refuses."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_omni_neuron.cli import app
from vllm_omni_neuron.cli.new_model import MAX_LENGTH, render

REPOSITORY = Path(__file__).parents[3]
LONGEST = "-".join(["stranger"] * 4) + "-long"


def new_model(*arguments: object):
    return CliRunner().invoke(app, ["new-model", *map(str, arguments)])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Acme", "lowercase letters, digits and single hyphens"),
        ("acme_video", "lowercase letters, digits and single hyphens"),
        ("1acme", "lowercase letters, digits and single hyphens"),
        ("a" * (MAX_LENGTH + 1), "41 characters"),
        ("omni-neuron-acme", "one of this project's own packages"),
        ("vllm-omni-neuron", "one of this project's own packages"),
        ("class", "Python's own"),
        ("json", "Python's own"),
        ("torch", "installed already"),
    ],
)
def test_names_that_are_refused(name: str, message: str) -> None:
    result = new_model(name)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    result = new_model("acme-video", "--output", tmp_path / "mine")
    assert result.exit_code == 2
    assert "mine exists" in result.stderr.replace("\n", "")
    assert not list((tmp_path / "mine").iterdir())


def test_without_copier_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "copier", None)
    result = new_model("acme-video", "--output", tmp_path / "acme")
    assert result.exit_code == 1
    assert "uv pip install 'vllm-omni-neuron[template]'" in result.stderr.replace("\n", " ")
    assert not (tmp_path / "acme").exists()


@pytest.mark.parametrize("name", ["ab", LONGEST])
def test_what_it_writes_passes_the_linter(name: str, tmp_path: Path) -> None:
    pytest.importorskip("ruff")
    assert len(LONGEST) == MAX_LENGTH
    result = new_model(name, "--output", tmp_path / name)
    assert result.exit_code == 0, result.output
    manifest = tomllib.loads((tmp_path / name / "pyproject.toml").read_text())
    assert manifest["project"]["name"] == name
    own = [text for text in manifest["project"]["dependencies"] if text.startswith(("omni-neuron-", "vllm-omni-"))]
    assert len(own) == 2 and all(text.endswith(">=0.1,<0.2") for text in own)
    assert not [path for path in (tmp_path / name).rglob("*") if path.is_file() and "{{" in path.read_text()]
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "."]
        checked = subprocess.run(ruff, cwd=tmp_path / name, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout


def test_rules_of_the_linter_are_this_repositorys(tmp_path: Path) -> None:
    configuration = REPOSITORY / "pyproject.toml"
    if not configuration.exists():
        pytest.skip("outside the repository there are no rules to compare with")
    render("acme-video", tmp_path / "acme")
    ours, theirs = (
        tomllib.loads(path.read_text())["tool"]["ruff"]
        for path in (configuration, tmp_path / "acme" / "pyproject.toml")
    )
    for key in ("select", "ignore"):
        assert sorted(ours["lint"][key]) == sorted(theirs["lint"][key])
    assert ours["line-length"] == theirs["line-length"]


def test_the_command_line_does_not_import_copier() -> None:
    code = "import sys, vllm_omni_neuron.cli; sys.exit('copier' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
