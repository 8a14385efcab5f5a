# SPDX-License-Identifier: Apache-2.0
"""examples/wan22: every YAML file of the repository is valid and its layout fits; the scripts ask for what they say."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
import yaml
from PIL import Image
from typer.testing import CliRunner

from omni_neuron_parallel.planning import TARGETS, Case, Layout, VideoShape, plan
from omni_neuron_wan22 import registry
from omni_neuron_wan22.planning import t2v_a14b
from vllm_omni_neuron.cli import engine
from vllm_omni_neuron.stage_config import StageEntry, load_stage_config, to_deploy_config

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "wan22"
ARCHITECTURES = {entry["model_arch"] for entry in registry.PIPELINE_REGISTRY}


def yaml_files() -> list[Path]:
    """Every stage file that the repository holds: all YAML but templates of other files."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.yaml", "*.yml"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [ROOT / line for line in sorted(listed.stdout.split()) if "/templates/" not in line]


def planned(stage: StageEntry) -> Any:
    """The plan of a stage: A14B's sizes (image-to-video has 20 more input channels) on trn2."""
    engine_args, sampling = stage.engine_args, stage.default_sampling_params
    parallel = engine_args.parallel_config
    assert sampling is not None
    layout = Layout(
        tp=parallel.tensor_parallel_size,
        cp=parallel.context_parallel_size,
        cfg=parallel.cfg_parallel_size,
        vae_patch=parallel.vae_patch_parallel_size,
        sequence_parallel=engine_args.settings.tp_sequence_parallel,
        method="ring" if engine_args.settings.context_method == "ring" else "gather",
    )
    shape = VideoShape(sampling.height or 0, sampling.width or 0, sampling.num_frames or 0)
    return plan(Case(t2v_a14b(), layout, shape), TARGETS["trn2"])


@pytest.mark.parametrize("path", yaml_files(), ids=lambda path: path.name)
def test_yaml_files_are_valid_and_fit(path: Path) -> None:
    if path.name.endswith(".deploy.yaml"):
        source = path.with_name(path.name.replace(".deploy.yaml", ".yaml"))
        assert yaml.safe_load(path.read_text()) == to_deploy_config(source)
        return
    stage = load_stage_config(path).stage
    assert stage.engine_args.model_class_name in ARCHITECTURES
    if "cpu" not in path.name:
        assert planned(stage).memory.fits


def test_the_documented_layouts_are_there() -> None:
    found = set()
    for path in EXAMPLES.glob("stage_*p.yaml"):
        stage = load_stage_config(path).stage
        layout = stage.engine_args.parallel_config
        sizes = (layout.tensor_parallel_size, layout.context_parallel_size, layout.cfg_parallel_size)
        assert stage.default_sampling_params is not None
        found.add((stage.engine_args.model_class_name, *sizes, stage.default_sampling_params.height))
    assert found == {
        ("WanPipeline", 4, 8, 2, 480),
        ("WanPipeline", 4, 8, 2, 720),
        ("WanPipeline", 4, 8, 1, 480),
        ("WanImageToVideoPipeline", 8, 4, 1, 720),
    }


class EngineStandIn:
    """Takes the place of the engine, keeps what it was asked for, and stops there."""

    def __call__(self, request: engine.GenerateOptions, phase: Any, profile_runs: int | None = None) -> None:
        self.request, self.profile_runs = request, profile_runs
        self.deploy = None if request.deploy_config is None else yaml.safe_load(request.deploy_config.read_text())
        raise RuntimeError("no engine here")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> EngineStandIn:
    stand_in = EngineStandIn()
    monkeypatch.setattr(engine, "run_engine", stand_in)
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "1")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return stand_in


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model_index.json").write_text("{}")
    return tmp_path


def call(script: ModuleType, *arguments: str) -> str:
    """Run a script's command; it ends at the engine."""
    app = typer.Typer()
    app.command()(script.main)
    result = CliRunner().invoke(app, [*arguments, "--verbose"])
    assert result.exit_code == 1, result.output
    assert "no engine here" in result.stderr
    return result.output


def test_run(asked: EngineStandIn, model: Path) -> None:
    run = importlib.import_module("run")
    common = ["--model-path", str(model), "--output", str(model / "out.mp4")]
    call(run, *common)
    request = asked.request
    assert (request.height, request.width, request.num_frames, request.num_inference_steps) == (480, 832, 81, 40)
    assert (request.seed, request.seed_is_random, asked.profile_runs) == (42, False, None)

    call(run, *common, "--dev", "--no-cfg", "--profile", "--num-frames", "9", "--prompt", "a fox")
    request = asked.request
    assert (request.height, request.width, request.num_frames, request.num_inference_steps) == (128, 208, 9, 10)
    assert (request.guidance_scale, request.guidance_scale_2, request.prompt) == (1.0, 1.0, "a fox")
    assert asked.profile_runs == 3

    quantized = ["--quantization", "fp8_row_mx", "--comfyui-fp8-model-path", str(model)]
    stage = ["--stage-config", str(EXAMPLES / "stage_t2v_tp4_cp8_cfg2_480p.yaml"), "--cache-backend", "cache_dit"]
    call(run, *common, *quantized, *stage, "--modules-to-not-convert", "attn1,attn2,ffn", "--guidance-scale", "5")
    [entry] = asked.deploy["stages"]
    assert entry["cache_backend"] == "cache_dit"
    assert entry["model_config"] == {
        "tp_sequence_parallel": True,
        "context_method": "ring",
        "quantization": "fp8_row_mx",
        "comfyui_fp8_model_path": str(model),
        "modules_to_not_convert": ["attn1", "attn2", "ffn"],
    }
    assert asked.request.guidance_scale == 5.0


def test_run_i2v(asked: EngineStandIn, model: Path) -> None:
    run = importlib.import_module("run_i2v")
    image = model / "image.png"
    Image.new("RGB", (8, 6)).save(image)
    common = ["--model-path", str(model), "--output", str(model / "out.mp4"), "--image", str(image)]
    call(run, *common, "--dev", "--last-image", str(image))
    assert (asked.request.image, asked.request.last_image, asked.request.height) == (image, image, 128)
