# SPDX-License-Identifier: Apache-2.0
"""`plan`: what it prints, its JSON, its errors, and where it finds models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from omni_neuron_parallel.planning import METHODS, TARGETS
from vllm_omni_neuron.cli import app, plannable
from vllm_omni_neuron.cli.plan import KeyValueMethod, PlanTarget
from vllm_omni_neuron.registry import RegisteredModel

pytest.importorskip("omni_neuron_wan22")
DOCUMENTED = ["--tp", "4", "--cp", "8", "--cfg", "2", "--vae-patch", "16"]
LARGE = ["--height", "720", "--width", "1280"]


def run(*options: str, model: str = "wan22-t2v-a14b") -> Any:
    return CliRunner().invoke(app, ["plan", "--model", model, *options], env={"COLUMNS": "300"})


def test_options_offer_what_the_planner_knows() -> None:
    assert [target.value for target in PlanTarget] == list(TARGETS)
    assert tuple(method.value for method in KeyValueMethod) == METHODS


def test_json_of_the_documented_layout() -> None:
    result = run(*DOCUMENTED, "--height", "480", "--width", "832", "--frames", "81", "--target", "trn2", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert (data["tokens"]["total"], data["tokens"]["per_rank"], data["tokens"]["waste"]) == (32_760, 4095, 0)
    assert data["devices"] == {"available": 64, "used": 64, "replicas": 1}
    assert data["memory"]["fits"] is True
    assert "suggestions" not in data


def test_the_known_failure_and_its_way_out() -> None:
    gathered = run(*DOCUMENTED, *LARGE)
    assert gathered.exit_code == 1
    assert "does not fit: 26.5 GiB of 24.0 GiB while denoising" in gathered.stdout
    assert "A fork measured this layout: 24.4 GiB, of it weights 14.7 GiB" in gathered.stdout
    assert "With --method ring: fits: " in gathered.stdout
    ring = run(*DOCUMENTED, *LARGE, "--method", "ring")
    assert ring.exit_code == 0
    assert "is not published and not counted" in ring.stdout
    assert "With --method gather: does not fit" in ring.stdout


def test_every_row_reaches_people() -> None:
    arguments = (*DOCUMENTED, "--method", "ring", "--sp")
    data, text = json.loads(run(*arguments, "--json").stdout), run(*arguments).stdout
    assert "never checked on a device" in text
    for row in (*data["memory"]["items"], *data["traffic"]["items"], *data["flops"]["items"]):
        assert row["name"] in text
    assert f"{data['seconds']['step'] * 1e3:.2f}" in text


def test_suggestions() -> None:
    result = run(*DOCUMENTED, *LARGE, "--method", "ring", "--suggest", "--json")
    data = json.loads(result.stdout)
    best = next(choice for choice in data["suggestions"] if choice["fits"])
    assert {axis: best["layout"][axis] for axis in ("tp", "cp", "cfg")} == {"tp": 4, "cp": 8, "cfg": 2}
    assert any("does not fit" in choice["verdict"] for choice in data["suggestions"])
    text = run(*DOCUMENTED, "--suggest").stdout
    assert "layouts by step time" in text
    assert "TP4×CP8×CFG2" in text


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--tp", "3"], ["--tp", "3 does not divide the 40 attention heads", "1, 2, 4, 5, 8, 10, 20, 40"]),
        (["--cfg", "3"], ["--cfg", "3 ranks for 2 branches", "valid are 1, 2"]),
        (["--vae-patch", "3"], ["--vae-patch", "3 does not divide", "valid are 1"]),
        (["--cp", "0"], ["--cp", "0 is not 1 or more"]),
        (["--tp", "4", "--cp", "8", "--cfg", "2", "--devices", "32"], ["--devices", "64 ranks", "32 cores"]),
        (["--devices", "0"], ["--devices", "0 is not 1 or more"]),
        (["--frames", "80"], ["--frames", "80 is not 4 k + 1", "77 and 81"]),
        (["--height", "481"], ["--height", "481 is not a multiple of 16", "480 and 496"]),
        (["--target", "trn1"], ["--target", "trn1", "trn2", "trn3"]),
        (["--method", "auto"], ["--method", "auto", "gather", "ring"]),
    ],
)
def test_errors_name_option_value_and_what_is_valid(options: list[str], names: list[str]) -> None:
    result = run(*options)
    assert (result.exit_code, result.stdout) == (2, "")
    message = " ".join(result.stderr.replace("│", " ").split())
    for name in names:
        assert name in message


def test_trn3_has_more_memory() -> None:
    data = json.loads(run(*DOCUMENTED, *LARGE, "--target", "trn3", "--json").stdout)
    assert data["memory"]["capacity_bytes"] == 36 * 2**30
    assert data["memory"]["fits"] is True


def test_unknown_models_list_the_known_ones(tmp_path: Path) -> None:
    assert "wan22-t2v-a14b" in run(model="nothing").stderr
    (tmp_path / "model_index.json").write_text('{"_class_name": "OtherPipeline"}')
    message = " ".join(run(model=str(tmp_path)).stderr.replace("│", " ").split())
    assert "OtherPipeline" in message
    assert "WanPipeline" in message
    (tmp_path / "model_index.json").write_text("[]")
    assert "does not name a _class_name" in " ".join(run(model=str(tmp_path)).stderr.split())


def test_a_third_partys_model_is_found_and_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of two packages that plan one name, others go before ours; a broken spec is said and hides nothing."""
    (tmp_path / "acme_specs.py").write_text(
        "from dataclasses import replace\n"
        "from vllm_omni_neuron.sdk import model_spec\n"
        "wan = model_spec('WanPipeline')\n"
        "OURS = replace(wan, architecture='Ours', plans={'shared': 'nowhere:nothing'})\n"
        "THEIRS = replace(wan, architecture='Theirs',\n"
        "                 plans=dict.fromkeys(['shared', 'own'], 'omni_neuron_wan22.planning:t2v_a14b'))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def model(distribution: str, architecture: str, spec: str) -> RegisteredModel:
        return RegisteredModel(architecture, "Class", "module", "entry", distribution, "1", spec_path=spec)

    models = [
        model("omni-neuron-ours", "Ours", "acme_specs:OURS"),
        model("acme-video", "Theirs", "acme_specs:THEIRS"),
        model("acme-silent", "Silent", ""),
        model("acme-broken", "Broken", "acme_specs:GONE"),
    ]
    monkeypatch.setattr(plannable, "discover_models", lambda: models)
    for name in ("shared", "own"):
        assert plannable.find_model(name, "plans").made.heads == 40
    with pytest.raises(plannable.UnknownModelError, match=r"\(own, shared\)"):
        plannable.find_model("wan22-t2v-a14b", "plans")
    assert "acme-broken 1" in caplog.text


def test_a_model_that_lacks_axes_or_makes_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the spec does not have is neither planned nor suggested; an image has one frame."""
    (tmp_path / "acme_images.py").write_text(
        "from dataclasses import replace\n"
        "from vllm_omni_neuron.sdk import ComponentSpec, model_spec\n"
        "SPEC = replace(model_spec('WanPipeline'), architecture='Acme', title='Acme Image', output='image',\n"
        "               axes={'tp': 4, 'cfg': 2}, components=(ComponentSpec('transformer', 'transformer'),),\n"
        "               plans={'acme': 'omni_neuron_wan22.planning:t2v_a14b'})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    acme = RegisteredModel("Acme", "Class", "module", "entry", "acme", "1", spec_path="acme_images:SPEC")
    monkeypatch.setattr(plannable, "discover_models", lambda: [acme])
    data = json.loads(run("--tp", "4", "--devices", "8", "--suggest", "--json", model="acme").stdout)
    assert data["video"]["frames"] == 1
    layouts = [choice["layout"] for choice in data["suggestions"]]
    assert {layout["cp"] for layout in layouts} == {1}
    assert {layout["tp"] for layout in layouts} == {1, 2, 4}
    assert not any(layout["sequence_parallel"] for layout in layouts)
    for options, message in {
        ("--cp", "2"): "--cp: 2: Acme Image takes 1: it has no such axis",
        ("--tp", "8"): "--tp: 8: Acme Image takes at most 4",
        ("--tp", "2", "--sp"): "--sp: 2: Acme Image takes 1: it has no such axis",
        ("--frames", "5"): "--frames: 5: Acme Image makes images; leave it unset",
    }.items():
        result = run(*options, model="acme")
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.replace("│", " ").split())


def test_no_vllm_is_imported() -> None:
    program = (
        "import sys\nfrom vllm_omni_neuron.cli import app\n"
        "assert not {'torch', 'vllm'} & set(sys.modules), 'help must be fast'\n"
        "try: app(['plan', '--model', 'wan22-t2v-a14b', '--json'])\nexcept SystemExit: pass\n"
        "heavy = {'vllm', 'vllm_omni', 'transformers', 'diffusers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["format"] == 1
