# SPDX-License-Identifier: Apache-2.0
"""A model as a distribution of its own: its wheel is built, installed beside ours and run in two spawned workers.

It is what `vllm-omni-neuron new-model acme-toy-video` makes, as it stands in examples/. Two other distributions stand
beside it, one that raises on import and one that claims the same architecture.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from omni_neuron_testkit.conformance import KitRequest
from vllm_omni_neuron.cli.new_model import render

EXAMPLE = Path(__file__).parents[1] / "examples" / "third_party_model"
ARCHITECTURE = "AcmeToyVideoPipeline"
REQUEST = {"height": 32, "width": 48, "num_frames": 3, "num_inference_steps": 4, "guidance_scale": 4.0, "seed": 7}

RUN = """
import json, sys
from pathlib import Path

import torch
from vllm_omni.entrypoints.omni import Omni
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

import vllm_omni_neuron
from vllm_omni_neuron.capture import read_step_meta, read_step_tensors


def main():
    model, folder = sys.argv[1], Path(sys.argv[2])
    capture = {"modules": ["blocks.1.attention"], "capture_dir": str(folder / "capture")}
    omni = Omni(
        model=model,
        dtype="float32",
        tensor_parallel_size=2,
        enforce_eager=True,
        additional_config={"tensor_capture": capture},
    )

    def generate(prompt, **changes):
        settings = json.loads((folder / "request.json").read_text()) | changes
        [output] = omni.generate({"prompt": prompt}, OmniDiffusionSamplingParams(**settings))
        [made] = output.images
        return torch.as_tensor(made)

    fox, frames, again = generate("a red fox", output_type="latent"), generate("a red fox"), generate("a red fox")
    omni.engine.collective_rpc("enable_capture", args=("owl",))
    owl = generate("an owl", output_type="latent")
    omni.engine.collective_rpc("disable_capture")
    torch.save({"a red fox": fox, "an owl": owl}, folder / "latents.pt")
    captured = {
        f"{key.module} tp{key.tp} cp{key.cp} cfg{key.cfg} call{key.call}": tensor.double().sum().item()
        for key, tensor in read_step_tensors(folder / "capture", "owl", 3).items()
    }
    report = {
        "models": [[m.distribution, m.architecture, m.status] for m in vllm_omni_neuron.discover_models()],
        "shape": list(frames.shape),
        "same_seed_is_equal": torch.equal(frames, again),
        "captured": captured,
        "meta": read_step_meta(folder / "capture", "owl", 1),
    }
    try:
        generate("")
    except Exception as error:
        report["empty_prompt"] = str(error)
    omni.close()
    (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
"""

DISCOVER = """
import json, sys, vllm_omni_neuron
print(json.dumps([[m.distribution, m.status, m.reason] for m in vllm_omni_neuron.discover_models()]))
assert "vllm_omni" not in sys.modules and "acme_toy_video.pipeline" not in sys.modules
"""


def find_uv() -> str:
    """uv, which nox puts on PATH; else the one of the bootstrap environment beside the development environment."""
    bootstrap = Path(sys.prefix).parents[1] / ".venv" / "bin"
    uv = shutil.which("uv") or shutil.which("uv", path=str(bootstrap))
    assert uv is not None, f"uv is neither on PATH nor in {bootstrap}; run the tests with ./dev test"
    return uv


def add_distribution(site: Path, name: str, version: str, module: str, source: str) -> None:
    (site / f"{module}.py").write_text(source)
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[vllm_omni_neuron.models]\n{module} = {module}\n")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the toy installed from its wheel, a broken model package, and one that claims the toy's name."""
    uv, folder = find_uv(), tmp_path_factory.mktemp("third_party")
    subprocess.run([uv, "build", "--quiet", "--wheel", "--out-dir", folder / "dist", EXAMPLE], check=True)
    [wheel] = (folder / "dist").glob("*.whl")
    target = folder / "site"
    install = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--no-deps", "--target", target, wheel]
    subprocess.run(install, check=True)
    add_distribution(target, "acme-broken-model", "4.5", "acme_broken", "raise ImportError('no libacme.so')\n")
    rival = [{"model_arch": ARCHITECTURE, "class_name": "Rival", "module_name": "no.such.module"}]
    add_distribution(target, "omni-neuron-toy-rival", "6.7", "toy_rival", f"PIPELINE_REGISTRY = {rival!r}\n")
    return target


def environment_of(site: Path, **variables: str) -> dict[str, str]:
    environment = {**os.environ, "VLLM_NEURON_CPU_MODE": "1", "PYTHONPATH": str(site), **variables}
    for name in ("VLLM_PLUGINS", "NEURON_VISIBLE_DEVICES"):
        if name not in variables:
            environment.pop(name, None)
    return environment


def files_of(folder: Path) -> dict[str, str]:
    """The text of every file by its path, what tools leave behind not among them."""
    paths = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    own = [path for path in paths if "__pycache__" not in path.parts and not path.parts[0].startswith(".")]
    return {str(path): (folder / path).read_text() for path in own}


def test_the_example_is_what_new_model_makes(tmp_path: Path) -> None:
    render("acme-toy-video", tmp_path / "made")
    assert files_of(EXAMPLE) == files_of(tmp_path / "made")


def discover(site: Path, **variables: str) -> tuple[dict[str, tuple[str, str]], str]:
    """Status and reason of every distribution that offers models, and stderr."""
    result = subprocess.run(
        [sys.executable, "-c", DISCOVER], capture_output=True, text=True, env=environment_of(site, **variables)
    )
    assert result.returncode == 0, result.stderr
    return {name: (status, reason) for name, status, reason in json.loads(result.stdout)}, result.stderr


def test_discovery_imports_no_model_and_names_what_is_wrong(site: Path) -> None:
    models, stderr = discover(site)
    assert models["acme-toy-video"] == ("registered", "")
    assert models["acme-broken-model"][0] == "failed"
    assert models["omni-neuron-toy-rival"][0] == "shadowed"
    for part in ("acme-broken-model", "4.5", "no libacme.so", "omni-neuron-toy-rival 6.7", ARCHITECTURE):
        assert part in stderr


def test_vllm_plugins_that_excludes_the_model_says_so(site: Path) -> None:
    models, stderr = discover(site, VLLM_PLUGINS="neuron,wan22")
    assert models["acme-toy-video"][0] == "filtered"
    assert "VLLM_PLUGINS" in models["acme-toy-video"][1]
    assert "acme-toy-video" in stderr


@pytest.fixture(scope="module")
def example(site: Path) -> Iterator[ModuleType]:
    """The example's own test file: its checkpoint and its model in plain torch."""
    sys.path.insert(0, str(site))
    spec = importlib.util.spec_from_file_location("acme_reference", EXAMPLE / "tests" / "test_conformance.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(site))
    # Another file makes a package of this name anew.
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_toy_video"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def run(site: Path, example: ModuleType) -> tuple[dict[str, Any], str]:
    """One engine with two spawned workers: its report and what it printed."""
    folder = site.parent
    (folder / "run.py").write_text(RUN)
    (folder / "request.json").write_text(json.dumps(REQUEST))
    example.make_tiny_checkpoint(folder / "model")
    command = [sys.executable, str(folder / "run.py"), str(folder / "model"), str(folder)]
    log = folder / "log.txt"
    with log.open("w") as stream:
        result = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, env=environment_of(site), timeout=900)
    text = log.read_text()
    assert result.returncode == 0, text[-8000:]
    return json.loads((folder / "report.json").read_text()), text


@pytest.mark.engine
def test_frames_from_two_spawned_workers(run: tuple[dict[str, Any], str], site: Path, example: ModuleType) -> None:
    report, _ = run
    assert report["shape"][-4:] == [3, 32, 48, 3]
    assert report["same_seed_is_equal"]
    assert "prompt = '': a text that is not empty is needed" in report["empty_prompt"]
    latents = torch.load(site.parent / "latents.pt")
    for prompt, ours in latents.items():
        request = KitRequest(prompt=prompt, negative_prompt="", **REQUEST)
        theirs = example.reference(site.parent / "model", request, torch.float32).latents
        assert float((ours - theirs).norm() / theirs.norm()) <= 1e-5


@pytest.mark.engine
def test_the_others_work_and_every_process_says_what_is_broken(run: tuple[dict[str, Any], str]) -> None:
    report, log = run
    assert ["acme-toy-video", ARCHITECTURE, "registered"] in report["models"]
    lines = [line for line in log.splitlines() if "acme-broken-model 4.5" in line and "no libacme.so" in line]
    assert any("DiffusionWorker" not in line for line in lines)
    assert any("DiffusionWorker" in line for line in lines)
    assert "omni-neuron-toy-rival 6.7 is left out" in log


@pytest.mark.engine
def test_captured_tensors_of_both_ranks(run: tuple[dict[str, Any], str]) -> None:
    report, _ = run
    names = {f"transformer.blocks.1.attention tp{rank} cp0 cfg0 call{call}" for rank in (0, 1) for call in (0, 1)}
    captured = report["captured"]
    assert set(captured) == names
    for call in (0, 1):  # the two branches of guidance; what attention returns is the same on both ranks
        first, second = (captured[f"transformer.blocks.1.attention tp{rank} cp0 cfg0 call{call}"] for rank in (0, 1))
        assert first == second
    assert report["meta"]["step"] == 1
    assert report["meta"]["modules"] == ["transformer.blocks.1.attention"]
