# SPDX-License-Identifier: Apache-2.0
"""`doctor`, `models`, `convert-stage-config` and `version`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_omni_neuron import __version__, shared_memory
from vllm_omni_neuron.cli import app, checks
from vllm_omni_neuron.cli.checks import Report

EXAMPLE = Path(__file__).parents[3] / "examples" / "wan22" / "stage_cpu_tp2.yaml"
Usage = namedtuple("Usage", "total used free")

PLATFORM = {"vllm": "vllm_omni_neuron.platforms.vllm_platform.NeuronPlatform", "vllm_omni": checks.OUR_OMNI_PLATFORM}


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """CPU mode, enough shared memory, and a platform probe that answers at once."""
    for name in ("NEURON_VISIBLE_DEVICES", "NEURON_RT_VISIBLE_CORES", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(8 * 10**9, 0, 8 * 10**9))
    monkeypatch.setitem(checks.CHECKS, "platform", lambda report: PLATFORM)
    return monkeypatch


def doctor(code: int) -> dict:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == code, result.output
    report: dict = json.loads(result.stdout)
    assert report["ok"] is (code == 0)
    return report


def test_version() -> None:
    result = CliRunner().invoke(app, ["version"])
    assert (result.exit_code, result.stdout) == (0, f"{__version__}\n")


def test_convert_prints_the_deploy_configuration() -> None:
    result = CliRunner().invoke(app, ["convert-stage-config", str(EXAMPLE)])
    assert result.exit_code == 0
    assert result.stdout == EXAMPLE.with_name("stage_cpu_tp2.deploy.yaml").read_text()


def test_convert_overwrites_only_when_told(tmp_path: Path) -> None:
    target = tmp_path / "new.yaml"
    command = ["convert-stage-config", str(EXAMPLE), "-o", str(target)]
    assert CliRunner().invoke(app, command).exit_code == 0
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 2
    assert "exists; --force overwrites it" in again.stderr
    assert CliRunner().invoke(app, [*command, "--force"]).exit_code == 0


@pytest.mark.parametrize("text", ["stage_args: [{engine_args: {}}]\n", "stages: []\n", "{"])
def test_convert_says_what_is_wrong(tmp_path: Path, text: str) -> None:
    path = tmp_path / "stage.yaml"
    path.write_text(text)
    result = CliRunner().invoke(app, ["convert-stage-config", str(path)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "1 problem" in result.stderr


def test_doctor_reports_versions_devices_and_entry_points(healthy: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    report = json.loads(result.stdout)
    versions = {row["name"]: row["version"] for row in report["packages"]}
    assert versions["vllm-omni-neuron"] == __version__
    assert versions["vllm-omni"] == metadata.version("vllm-omni")
    assert report["devices"]["cpu_mode"] is True
    loaded = {(row["group"], row["name"]): row["status"] for row in report["entry_points"]}
    assert loaded["vllm_omni.platform_plugins", "neuron"] == "loaded"
    assert loaded["vllm.platform_plugins", "neuron"] == "loaded"
    assert loaded["vllm_omni.general_plugins", "neuron"] == "loaded"
    assert loaded["omni_neuron.parallel", "torch"] == "loaded"
    assert {"name": "VLLM_NEURON_CPU_MODE", "value": "1", "error": None} in report["environment"]


def test_doctor_shows_the_same_to_people(healthy: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["doctor"])
    for text in ("vllm_omni.platform_plugins", "neuron = vllm_omni_neuron:neuron_omni_platform_plugin", "enough"):
        assert text in result.stdout
    assert result.stdout.splitlines()[-1] in ("no problems found", "1 problem found")


def test_doctor_without_device_and_cpu_mode(healthy: pytest.MonkeyPatch) -> None:
    healthy.setenv("VLLM_NEURON_CPU_MODE", "0")
    healthy.setattr("omni_neuron_runtime.devices.DEVICE_GLOB", "/nowhere/neuron*")
    report = doctor(code=1)
    assert any("set VLLM_NEURON_CPU_MODE=1 to run on the CPU" in problem for problem in report["problems"])
    assert report["devices"]["platform_target"] is None


def test_doctor_flags_invalid_variables(healthy: pytest.MonkeyPatch) -> None:
    healthy.setenv("NEURON_VISIBLE_DEVICES", "0-")
    report = doctor(code=1)
    [row] = [row for row in report["environment"] if row["name"] == "NEURON_VISIBLE_DEVICES"]
    assert "is not a list of cores" in row["error"]
    assert report["devices"] is None
    assert report["shared_memory"]["total_bytes"] == 8 * 10**9, "a check that breaks hides the others"


def test_doctor_explains_vllm_plugins(healthy: pytest.MonkeyPatch) -> None:
    healthy.setenv("VLLM_PLUGINS", "torch,unheard_of")
    report = doctor(code=1)
    assert any("drops this plugin's own entry point 'neuron'" in problem for problem in report["problems"])
    assert any("VLLM_PLUGINS=torch,unheard_of,neuron" in problem for problem in report["problems"])
    assert any("VLLM_PLUGINS names 'unheard_of'" in note for note in report["notes"])
    assert report["plugin_filter"]["unknown"] == ["unheard_of"]


@pytest.mark.parametrize(("cpu_mode", "list_name"), [("1", "notes"), ("0", "problems")])
def test_small_shared_memory(healthy: pytest.MonkeyPatch, cpu_mode: str, list_name: str) -> None:
    healthy.setenv("VLLM_NEURON_CPU_MODE", cpu_mode)
    healthy.setattr(shutil, "disk_usage", lambda path: Usage(64 * 2**20, 0, 64 * 2**20))
    report = Report()
    checks.check_shared_memory(report)
    [message] = getattr(report, list_name)
    assert "/dev/shm has 64 MiB free of 64 MiB, 1024 MiB are advised" in message
    assert "--shm-size=2g" in message


def test_shared_memory_that_stops_an_engine_is_a_problem_in_cpu_mode_too(healthy: pytest.MonkeyPatch) -> None:
    healthy.setattr(shutil, "disk_usage", lambda path: Usage(64 * 2**20, 0, 2**20))
    report = Report()
    checks.check_shared_memory(report)
    [message] = report.problems
    assert "1 MiB free of 64 MiB, at least 16 MiB are needed" in message


def test_no_shared_memory(healthy: pytest.MonkeyPatch, tmp_path: Path) -> None:
    healthy.setattr(shared_memory, "PATH", tmp_path / "none")
    report = Report()
    checks.check_shared_memory(report)
    assert "there is no" in report.problems[0]


def test_versions_outside_the_declared_bounds(healthy: pytest.MonkeyPatch) -> None:
    installed = metadata.version
    healthy.setattr(metadata, "version", lambda name: "0.31.1" if name == "vllm-omni" else installed(name))
    report = Report()
    checks.check_packages(report)
    [problem] = report.problems
    assert problem == (
        "vllm-omni-neuron needs vllm-omni<0.31,>=0.30, and 0.31.1 is installed; uv pip install 'vllm-omni<0.31,>=0.30'"
    )


def test_another_platform_is_a_problem(healthy: pytest.MonkeyPatch) -> None:
    answer = {**PLATFORM, "vllm_omni": "vllm_omni.platforms.interface.UnspecifiedOmniPlatform"}
    broken = ["pipeline a.A of acme 1: no"]
    said = json.dumps({**answer, "broken_pipelines": broken})
    healthy.setattr(checks, "_PROBE", f"print({checks._PROBE_MARK!r} + {said!r})")
    report = Report(sections={"devices": {"active": True}})
    assert checks.check_platform(report) == answer
    assert report.problems[:1] == broken
    assert "UnspecifiedOmniPlatform, not vllm_omni_neuron" in report.problems[1]


@pytest.mark.parametrize(
    ("script", "expected"),
    [("raise ImportError('no vllm here')", "ImportError: no vllm here"), ("import os; os.abort()", "exit code -6")],
)
def test_a_platform_probe_that_dies(healthy: pytest.MonkeyPatch, script: str, expected: str) -> None:
    healthy.setattr(checks, "_PROBE", script)
    report = Report()
    assert checks.check_platform(report) == {"vllm": None, "vllm_omni": None}
    assert expected in report.problems[0]


def test_a_platform_probe_that_hangs(healthy: pytest.MonkeyPatch) -> None:
    healthy.setattr(checks, "_PROBE", "import time; time.sleep(60)")
    healthy.setattr(checks, "PROBE_SECONDS", 0.5)
    report = Report()
    checks.check_platform(report)
    assert "did not resolve a platform within 0.5 s" in report.problems[0]


def write_distribution(folder: Path, name: str, module: str, requirements: tuple[str, ...] = ()) -> None:
    """A distribution with one entry point in the models' group."""
    (folder / f"{name.replace('-', '_')}_models.py").write_text(module)
    info = folder / f"{name.replace('-', '_')}-1.2.dist-info"
    info.mkdir()
    requires = "".join(f"Requires-Dist: {line}\n" for line in requirements)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n{requires}")
    (info / "entry_points.txt").write_text(f"[vllm_omni_neuron.models]\n{name} = {name.replace('-', '_')}_models\n")


def command(tmp_path: Path, *arguments: str, shadow: str | None = None) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with `tmp_path` first on its path."""
    if shadow is not None:
        (tmp_path / f"{shadow}.py").write_text("raise ImportError('broken on purpose')\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "VLLM_NEURON_CPU_MODE": "1"}
    program = (
        "from vllm_omni_neuron.cli import app, checks\n"
        f"checks.CHECKS['platform'] = lambda report: {PLATFORM!r}\n"
        "app()\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120, env=environment
    )


SPEC = """
from vllm_omni_neuron.sdk import FEATURES, ComponentSpec, ModelSpec

SPEC = ModelSpec(
    "GoodPipeline", "Good Video 1", "video", (ComponentSpec("transformer", "transformer", ("tp",), "", False),),
    {**dict.fromkeys(FEATURES, True), "lora": "not trained with any"}, axes={"tp": None, "cfg": 2}, dtypes=("float32",),
    environment={"GOOD_VIDEO": "1"}, plans={"good-1": "good:sizes", "": "good:from_checkpoint"},
)
"""


def test_doctor_and_models_name_faults_between_packages_and_show_the_rest(tmp_path: Path) -> None:
    """One raises, one is for another SDK, one lacks a requirement and a spec, two claim one architecture."""
    entry = {"model_arch": "GoodPipeline", "class_name": "Good", "module_name": "good.pipeline"}
    declared = f"PIPELINE_REGISTRY = [{entry!r}]\n"
    specs = "SDK = 1\nMODEL_SPECS = {'GoodPipeline': 'good_video_models:SPEC'}\n"
    write_distribution(tmp_path, "broken-video", "raise RuntimeError('no such accelerator')")
    write_distribution(tmp_path, "future-video", "raise SystemExit", ("omni-neuron-runtime>=9",))
    write_distribution(tmp_path, "good-video", declared + specs + SPEC)
    write_distribution(tmp_path, "late-video", declared)
    lacks = (
        declared.replace("GoodPipeline", "LacksPipeline") + "SDK = 1\nMODEL_SPECS = {'LacksPipeline': 'gone:SPEC'}\n"
    )
    write_distribution(tmp_path, "lacks-video", lacks, ("no-such-lib",))
    faults = {
        "broken-video 1.2": "RuntimeError: no such accelerator",
        "future-video 1.2": "needs omni-neuron-runtime>=9, and ",
        "lacks-video 1.2": "needs no-such-lib, and it is not installed; uv pip install 'no-such-lib'",
        "'gone:SPEC' of lacks-video": "No module named 'gone'",
    }

    result = command(tmp_path, "doctor", "--json")
    assert result.returncode == 1, result.stderr
    report = json.loads(result.stdout)
    for who, what in faults.items():
        assert [text for text in report["problems"] if who in text and what in text], (who, report["problems"])
    assert any("GoodPipeline of late-video is not used: good-video 1.2 claims" in note for note in report["notes"])
    [good] = [row for row in report["models"] if row["distribution"] == "good-video"]
    assert (good["status"], good["problems"]) == ("registered", [])
    assert good["spec"]["title"] == "Good Video 1"
    assert {"name": "GOOD_VIDEO", "value": "1", "source": "good-video", "replaced": None} in good["environment"]

    shown = command(tmp_path, "models")
    assert shown.returncode == 1, shown.stderr
    assert "SystemExit" not in shown.stdout, "a package for another SDK was imported"
    for text in (
        *faults.values(),
        "uv pip install --upgrade future-video omni-neuron-runtime",
        "Good Video 1",
        "TP, CFG ≤ 2",
        "good.pipeline.Good",
        "GoodPipeline, lora: not trained with any",
        "GoodPipeline: GOOD_VIDEO=1 (good-video)",
        "GoodPipeline: NEURON_SCRATCHPAD_PAGE_SIZE=2048 (base)",
        "GoodPipeline, plan: good-1, a checkpoint folder",
    ):
        assert text in shown.stdout, text


def test_doctor_works_where_the_runtime_package_is_broken(tmp_path: Path) -> None:
    result = command(tmp_path, "doctor", shadow="omni_neuron_runtime")
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert "devices could not be checked: ImportError: broken on purpose" in result.stdout
    assert "vllm-omni-neuron" in result.stdout
