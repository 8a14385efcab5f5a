# SPDX-License-Identifier: Apache-2.0
"""A model as a distribution of its own: its wheel is built, installed beside ours and run in two spawned workers.

Two other distributions stand beside it, one that raises on import and one that claims the same architecture.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "third_party_model"

RUN = '''
import hashlib, json, os, sys
from pathlib import Path

import torch
from vllm_omni.entrypoints.omni import Omni
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

import vllm_omni_neuron
from vllm_omni_neuron.capture import read_step_meta, read_step_tensors

STEPS, SHAPE, SEED = 4, (3, 16, 24, 3), 7


def expected(prompt):
    """The frames, by the model's formula on one rank."""
    latents = torch.randn(SHAPE, generator=torch.Generator().manual_seed(SEED), dtype=torch.float32)
    embedding = torch.tensor(list(hashlib.sha256(prompt.encode()).digest()[:8]), dtype=torch.float32) / 255
    colour = torch.tanh(embedding @ torch.linspace(-1, 1, 24, dtype=torch.float32).reshape(8, 3))
    for step in range(STEPS):
        latents = latents - (latents - colour) * (1 - step / STEPS) / 2
    return ((latents.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8), colour


def main():
    model, folder = sys.argv[1], Path(sys.argv[2])
    capture = {"modules": ["colour"], "capture_dir": str(folder / "capture")}
    omni = Omni(model=model, tensor_parallel_size=2, enforce_eager=True, additional_config={"tensor_capture": capture})

    def generate(prompt):
        sampling = OmniDiffusionSamplingParams(
            height=SHAPE[1], width=SHAPE[2], num_frames=SHAPE[0], num_inference_steps=STEPS, seed=SEED
        )
        [output] = omni.generate({"prompt": prompt}, sampling)
        [video] = output.images
        return video

    first, second = generate("a red fox"), generate("a red fox")
    omni.engine.collective_rpc("enable_capture", args=("owl",))
    other = generate("an owl")
    omni.engine.collective_rpc("disable_capture")
    reference, _ = expected("a red fox")
    owl, colour = expected("an owl")
    captured = read_step_tensors(folder / "capture", "owl", STEPS - 1)
    report = {
        "models": [[m.distribution, m.architecture, m.status] for m in vllm_omni_neuron.discover_models()],
        "shape": list(first.shape),
        "dtype": str(first.dtype),
        "difference": int((first.int() - reference.int()).abs().max()),
        "same_seed_is_equal": torch.equal(first, second),
        "owl_difference": int((other.int() - owl.int()).abs().max()),
        "prompts_differ": not torch.equal(first, other),
        "captured": {f"{key.module} tp{key.tp} cp{key.cp} cfg{key.cfg} call{key.call}": float((t - colour).abs().max())
                     for key, t in captured.items()},
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
'''

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
    rival = [{"model_arch": "ToyVideoPipeline", "class_name": "Rival", "module_name": "no.such.module"}]
    add_distribution(target, "omni-neuron-toy-rival", "6.7", "toy_rival", f"PIPELINE_REGISTRY = {rival!r}\n")
    return target


def environment_of(site: Path, **variables: str) -> dict[str, str]:
    environment = {**os.environ, "VLLM_NEURON_CPU_MODE": "1", "PYTHONPATH": str(site), **variables}
    for name in ("VLLM_PLUGINS", "NEURON_VISIBLE_DEVICES"):
        if name not in variables:
            environment.pop(name, None)
    return environment


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
    for part in ("acme-broken-model", "4.5", "no libacme.so", "omni-neuron-toy-rival 6.7", "ToyVideoPipeline"):
        assert part in stderr


def test_vllm_plugins_that_excludes_the_model_says_so(site: Path) -> None:
    models, stderr = discover(site, VLLM_PLUGINS="neuron,wan22")
    assert models["acme-toy-video"][0] == "filtered"
    assert "VLLM_PLUGINS" in models["acme-toy-video"][1]
    assert "acme-toy-video" in stderr


@pytest.fixture(scope="module")
def run(site: Path) -> tuple[dict[str, Any], str]:
    """One engine with two spawned workers: its report and what it printed."""
    folder = site.parent
    (folder / "run.py").write_text(RUN)
    (folder / "model").mkdir()
    (folder / "model" / "model_index.json").write_text(json.dumps({"_class_name": "ToyVideoPipeline"}))
    command = [sys.executable, str(folder / "run.py"), str(folder / "model"), str(folder)]
    log = folder / "log.txt"
    with log.open("w") as stream:
        result = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, env=environment_of(site), timeout=900)
    text = log.read_text()
    assert result.returncode == 0, text[-8000:]
    return json.loads((folder / "report.json").read_text()), text


@pytest.mark.engine
def test_frames_from_two_spawned_workers(run: tuple[dict[str, Any], str]) -> None:
    report, _ = run
    assert report["shape"] == [3, 16, 24, 3]
    assert report["dtype"] == "torch.uint8"
    # One grey level: the ranks add their partial sums in another order than one rank does.
    assert report["difference"] <= 1
    assert report["owl_difference"] <= 1
    assert report["same_seed_is_equal"]
    assert report["prompts_differ"]
    assert "the prompt is empty" in report["empty_prompt"]


@pytest.mark.engine
def test_the_others_work_and_every_process_says_what_is_broken(run: tuple[dict[str, Any], str]) -> None:
    report, log = run
    assert ["acme-toy-video", "ToyVideoPipeline", "registered"] in report["models"]
    lines = [line for line in log.splitlines() if "acme-broken-model 4.5" in line and "no libacme.so" in line]
    assert any("DiffusionWorker" not in line for line in lines)
    assert any("DiffusionWorker" in line for line in lines)
    assert "omni-neuron-toy-rival 6.7 is left out" in log


@pytest.mark.engine
def test_captured_tensors_of_both_ranks(run: tuple[dict[str, Any], str]) -> None:
    report, _ = run
    names = {f"denoiser.colour tp{rank} cp0 cfg0 call0" for rank in (0, 1)}
    assert set(report["captured"]) == names
    assert max(report["captured"].values()) < 1e-6
    assert report["meta"] == {"step": 1, "timestep": 0.75, "modules": ["denoiser.colour"]}
