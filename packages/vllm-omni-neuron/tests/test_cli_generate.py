# SPDX-License-Identifier: Apache-2.0
"""`generate` without an engine: what is refused before one starts, what reaches it, what is shown of its answer."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

from vllm_omni_neuron.cli import app, engine, outputs
from vllm_omni_neuron.cli.engine import GenerateOptions, GenerationResult, Run
from vllm_omni_neuron.video import read_video_info

REPORT = {
    "num_inference_steps": 40,
    "steps_per_expert": {"transformer": 26, "transformer_2": 14},
    "guidance_per_expert": {"transformer": 4.0, "transformer_2": 3.0},
    "sample_solver": "unipc",
    "flow_shift": 12.0,
    "boundary_ratio": 0.875,
    "dtype": "bfloat16",
    "layout": {"tp": 2, "cp": 1, "cfg": 1},
}
SOURCES = {
    "height": "request",
    "fps": "request",
    "flow_shift": "engine",
    "boundary_ratio": "checkpoint",
    "width": "default",
}


def output(
    frames: int = 5, report: dict | None = None, durations: dict | None = None, videos: int = 1
) -> SimpleNamespace:
    """A request's output of `frames` frames of 48×32."""
    video = np.random.default_rng(0).random((frames, 32, 48, 3), dtype=np.float32)
    metadata = {"video": {"fps": 16.0}, **({"generation": report} if report else {})}
    return SimpleNamespace(
        images=[video] * videos,
        multimodal_output={"metadata": metadata, "fps": 16.0},
        stage_durations={**(durations or {}), "queue_wait_ms": 0.5},
    )


class Engine:
    """Stands for the engine: keeps the request, answers with `answer` or raises it."""

    def __init__(self) -> None:
        self.request: GenerateOptions | None = None
        self.answer: object = output(report=REPORT, durations={"text": 1.25, "denoise": 30.0, "vae": 4.5})

    def __call__(
        self, request: GenerateOptions, phase: Callable[[str], None], profile_runs: int | None = None
    ) -> GenerationResult:
        self.request = request
        self.deploy_text = None if request.deploy_config is None else request.deploy_config.read_text()
        phase("starting the engine")
        os.write(1, b"INFO something of the engine on stdout\n")
        os.write(2, b"\r 50%|#####     | 20/40 [00:10<00:10]")
        if isinstance(self.answer, BaseException):
            raise self.answer
        defaults = SimpleNamespace(num_frames=1, seed=None, fps=8.0, extra_args={})
        sampling = engine.apply_request(defaults, request)
        runs = tuple(Run(self.answer, 36.0 + number) for number in range(profile_runs or 1))
        warm_up = None if profile_runs is None else Run(self.answer, 100.0)
        return GenerationResult(runs, sampling, engine.configured_settings(defaults), 10.0, warm_up)


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    fake = Engine()
    monkeypatch.setattr(engine, "run_engine", fake)
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "1")
    monkeypatch.setenv("COLUMNS", "200")
    return fake


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model_index.json").write_text("{}")
    return folder


@pytest.fixture
def arguments(model: Path, tmp_path: Path) -> list[str]:
    return ["generate", "--model", str(model), "--prompt", "a red panda", "--output", str(tmp_path / "out.mp4")]


def run(arguments: list[str], code: int) -> tuple[str, str]:
    """Run the command; what it wrote to stdout and, boxes removed and lines joined, to stderr."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    return result.stdout, " ".join(re.sub("[│╭╮╰╯─]", " ", result.stderr).split())


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (["--prompt", "  "], "the prompt is empty"),
        (["--height", "0"], "'--height': 0 is not 1 or more"),
        (["--width", "-8"], "'--width': -8 is not 1 or more"),
        (["--num-frames", "0"], "'--num-frames': 0 is not 1 or more"),
        (["--num-inference-steps", "-1"], "'--num-inference-steps': -1 is not 1 or more"),
        (["--guidance-scale", "-1"], "'--guidance-scale': -1.0 is not a number of 0 or more"),
        (["--guidance-scale-2", "inf"], "'--guidance-scale-2': inf is not a number of 0 or more"),
        (["--tensor-parallel-size", "0"], "0 is not 1 or more"),
        (["--fps", "0"], "'--fps': 0.0 is not a number above 0"),
        (["--flow-shift", "nan"], "'--flow-shift': nan is not a number above 0"),
        (["--boundary-ratio", "1.5"], "'--boundary-ratio': 1.5 is not between 0 and 1"),
        (["--seed", "-1"], "'--seed': -1 is not between 0 and"),
        (["--dtype", "bf16"], "is not one of 'bfloat16', 'float16', 'float32'"),
        (["--output", "video.gif"], "video.gif does not end in .mp4"),
        (["--output", "nowhere/video.mp4"], "the folder nowhere does not exist"),
        (["--model", "/nowhere/model"], "no folder /nowhere/model"),
        (["--model", "/dev/null"], "/dev/null is a file"),
        (["--num-outputs-per-prompt", "0"], "'--num-outputs-per-prompt': 0 is not 1 or more"),
        (["--no-cfg", "--guidance-scale-2", "3"], "3.0 contradicts --no-cfg"),
        (["--image", "nowhere.png"], "'--image': nowhere.png is no file"),
        (["--image", __file__], "is not an image that can be read"),
        (["--quantization", "int4"], "is not one of 'fp8_row_mx'"),
        (["--modules-to-not-convert", "ffn"], "only valid with --quantization fp8_row_mx"),
        (["--cache-backend", "tea_cache"], "is not one of 'none', 'cache_dit'"),
        (["--cache-backend", "cache_dit", "--cache-config", "0.24"], "0.24 is not a JSON object"),
        (["--lora", "nowhere"], "'nowhere' does not exist"),
        (["--lora", __file__, "--lora-scale", "nan"], "'--lora-scale': nan is not a finite number"),
        (["--lora-scale", "2"], "only valid with --lora"),
        (["--cache-config", "{}"], "only valid with --cache-backend cache_dit"),
        (["--ring-degree", "0"], "'--ring-degree': 0 is not 1 or more"),
        (["--profile", "--profile-runs", "0"], "'--profile-runs': 0 is not 1 or more"),
    ],
)
def test_usage_errors_come_before_the_engine(
    arguments: list[str], fake_engine: Engine, extra: list[str], expected: str
) -> None:
    _, stderr = run([*arguments, *extra], code=2)
    assert expected in stderr
    assert fake_engine.request is None


def test_a_folder_without_model_index(arguments: list[str], fake_engine: Engine, model: Path) -> None:
    (model / "model_index.json").unlink()
    assert "has no model_index.json" in run(arguments, code=2)[1]


def test_a_folder_that_cannot_be_written(
    arguments: list[str], fake_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "cannot be written: no permission" in run(arguments, code=2)[1]


def test_an_inactive_plugin_is_said_before_the_engine(
    arguments: list[str], fake_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omni_neuron_runtime.is_active", lambda: False)
    assert "set VLLM_NEURON_CPU_MODE=1 to run on the CPU" in run(arguments, code=1)[1]
    assert fake_engine.request is None


def test_a_hub_name_is_refused_with_the_command_that_makes_a_folder(arguments: list[str], fake_engine: Engine) -> None:
    name = "Wan-AI/Wan2.2-T2V-A14B-Diffusers"
    _, stderr = run([*arguments, "--model", name], code=2)
    assert f"hf download {name} --local-dir Wan2.2-T2V-A14B-Diffusers" in stderr
    assert fake_engine.request is None


def test_every_option_reaches_the_engine(arguments: list[str], fake_engine: Engine, tmp_path: Path) -> None:
    Image.new("RGB", (6, 4)).save(tmp_path / "image.png")
    options = {
        "negative_prompt": "blur",
        "height": 32,
        "width": 48,
        "num_frames": 5,
        "num_inference_steps": 40,
        "guidance_scale": 4.0,
        "guidance_scale_2": 3.0,
        "seed": 7,
        "fps": 8.0,
        "flow_shift": 12.0,
        "boundary_ratio": 0.9,
        "sample_solver": "euler",
        "image_policy": "crop",
        "num_outputs_per_prompt": 1,
        "lora_scale": 0.5,
        "tensor_parallel_size": 2,
        "ring_degree": 2,
        "cfg_parallel_size": 2,
        "vae_patch_parallel_size": 4,
        "dtype": "float32",
        "quantization": "fp8_row_mx",
        "comfyui_fp8_model_path": str(Path(__file__).parent),
        "cache_backend": "cache_dit",
    }
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    flags += ["--modules-to-not-convert", "attn1, ffn", "--vae-use-tiling", "--enable-cpu-offload"]
    flags += ["--cache-config", '{"max_warmup_steps": 2}', "--image", str(tmp_path / "image.png")]
    flags += ["--lora", __file__]
    run([*arguments, *flags], code=0)
    request = dataclasses.asdict(fake_engine.request)
    options |= {"modules_to_not_convert": ("attn1", "ffn"), "vae_use_tiling": True, "enable_cpu_offload": True}
    options |= {"cache_config": {"max_warmup_steps": 2}, "lora": Path(__file__)}
    assert {name: request[name] for name in options} == options
    assert not request["seed_is_random"]


def test_no_cfg_is_guidance_1_for_both_experts(arguments: list[str], fake_engine: Engine) -> None:
    run([*arguments, "--no-cfg"], code=0)
    assert fake_engine.request is not None
    assert (fake_engine.request.guidance_scale, fake_engine.request.guidance_scale_2) == (1.0, 1.0)


def test_images_travel_as_vllm_omni_takes_them(arguments: list[str], fake_engine: Engine, tmp_path: Path) -> None:
    first, last = tmp_path / "first.png", tmp_path / "last.jpg"
    Image.new("RGBA", (6, 4), "red").save(first)
    turned = Image.Exif()
    turned[0x0112] = 6  # a photo that was taken upright
    Image.new("RGB", (6, 4), "blue").save(last, exif=turned)
    run([*arguments, "--image", str(first), "--last-image", str(last)], code=0)
    assert fake_engine.request is not None
    media = engine.engine_prompt(fake_engine.request)["multi_modal_data"]
    assert {name: (image.mode, image.size) for name, image in media.items()} == {
        "image": ("RGB", (6, 4)),
        "last_image": ("RGB", (4, 6)),
    }
    for alone in (["--last-image", str(last)], ["--image-policy", "crop"]):
        stderr = run([*arguments, *alone], code=2)[1]
        assert alone[0] in stderr and "is only valid with --image" in stderr


def test_several_videos_are_numbered_in_the_order_of_their_seeds(
    arguments: list[str], fake_engine: Engine, tmp_path: Path
) -> None:
    fake_engine.answer = output(report=REPORT, videos=2)
    summary = json.loads(run([*arguments, "--seed", "7", "--num-outputs-per-prompt", "2", "--json"], code=0)[0])
    assert summary["outputs"] == [str(tmp_path / "out-1.mp4"), str(tmp_path / "out-2.mp4")]
    assert all(read_video_info(path).frames == 5 for path in summary["outputs"])
    assert summary["seeds"] == [7, 8]
    assert not (tmp_path / "out.mp4").exists()


def test_an_image_model_writes_png(
    arguments: list[str], fake_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "model_spec", lambda architecture: SimpleNamespace(output="image"))
    fake_engine.answer = output(report=REPORT)
    fake_engine.answer.images = [Image.new("RGB", (6, 4), color) for color in ("red", "blue")]
    stderr = run(arguments, code=2)[1]
    assert "this model makes images; the name must end in .png" in stderr
    arguments[-1] = str(tmp_path / "out.png")
    summary = json.loads(run([*arguments, "--seed", "7", "--json"], code=0)[0])
    assert [summary[name] for name in ("width", "height", "num_frames", "fps")] == [6, 4, 1, None]
    assert summary["outputs"] == [str(tmp_path / f"out-{number}.png") for number in (1, 2)]
    with Image.open(summary["outputs"][1]) as image:
        assert image.getpixel((0, 0)) == (0, 0, 255)
    table = run([*arguments, "--seed", "7"], code=0)[0]
    assert "image files" in table and "fps" not in table


def test_where_settings_came_from(arguments: list[str], fake_engine: Engine) -> None:
    fake_engine.answer = output(report={**REPORT, "sources": SOURCES})
    command = [*arguments, "--seed", "7", "--height", "32"]
    # The frame rate is in the configuration's sampling parameters, which reach the pipeline as the request's.
    assert json.loads(run([*command, "--json"], code=0)[0])["sources"] == {**SOURCES, "fps": "configuration"}
    table = [" ".join(line.split()) for line in run(command, code=0)[0].splitlines()]
    assert "from request height" in table
    assert "from configuration file fps" in table
    assert "from default width" in table


def test_profile(arguments: list[str], fake_engine: Engine, tmp_path: Path) -> None:
    report = {**REPORT, "step_seconds": {"transformer": [1.0, 3.0], "transformer_2": [2.0]}}
    durations = {"text": 1.0, "denoise": 30.0, "vae": 3.0, "transfer": 0.5}
    fake_engine.answer = output(report=report, durations=durations)
    stdout, _ = run([*arguments, "--seed", "7", "--profile", "--profile-runs", "3"], code=0)
    rows = [line.split() for line in stdout.splitlines()]
    assert ["total", "37.000", "100.0%", "36.000", "38.000"] in rows
    assert ["denoise", "30.000", "81.1%", "30.000", "30.000"] in rows
    assert ["transformer:", "each", "of", "2", "steps", "2.000", "1.000", "3.000"] in rows
    profile = json.loads((tmp_path / "out.profile.json").read_text())
    assert (profile["start_seconds"], profile["warm_up_seconds"], profile["median"]["total"]) == (10.0, 100.0, 37.0)
    # What no stage accounts for: the median of 36, 37 and 38 less the stages' 34.5.
    assert profile["median"]["stages"] == {**durations, "other": 2.5}
    assert profile["median"]["step_seconds"]["transformer"] == {"steps": 2, "median": 2.0, "least": 1.0, "most": 3.0}
    assert [timed["total"] for timed in profile["runs"]] == [36.0, 37.0, 38.0]
    assert profile["settings"]["steps_per_expert"] == {"transformer": 26, "transformer_2": 14}


def test_the_file_holds_what_the_summary_says(arguments: list[str], fake_engine: Engine, tmp_path: Path) -> None:
    stdout, _ = run([*arguments, "--seed", "7", "--json"], code=0)
    summary = json.loads(stdout)
    info = read_video_info(tmp_path / "out.mp4")
    assert (info.frames, info.width, info.height, info.fps) == (5, 48, 32, 16.0)
    assert (summary["num_frames"], summary["width"], summary["height"], summary["fps"]) == (5, 48, 32, 16.0)
    assert summary["seed"] == 7
    assert summary["seconds"] == {"text": 1.25, "denoise": 30.0, "vae": 4.5, "start": 10.0, "total": 36.0}
    assert {name: summary[name] for name in REPORT} == REPORT
    assert summary["outputs"] == [str(tmp_path / "out.mp4")]


def test_the_table(arguments: list[str], fake_engine: Engine) -> None:
    stdout, _ = run([*arguments, "--seed", "7"], code=0)
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in stdout.splitlines() if line.strip()}
    assert rows["size"] == "48×32"
    assert rows["frames"] == "5 at 16 fps (0.31 s)"
    assert rows["steps"] == "26 transformer + 14 transformer_2"
    assert rows["guidance"] == "4 transformer, 3 transformer_2"
    assert rows["schedule"] == "unipc, shift 12, boundary 0.875"
    assert rows["seed"] == "7"
    assert rows["layout"] == "TP 2 × CP 1 × CFG 1"
    extras = {"tp_sequence_parallel": True, "vae_patch": 2, "vae_tiling": True}
    fake_engine.answer = output(report={**REPORT, **extras})
    assert "TP 2 × CP 1 × CFG 1, sequence parallel, VAE tiles on 2 ranks" in run([*arguments, "--seed", "7"], code=0)[0]
    assert rows["seconds"] == "text 1.2, denoise 30.0, vae 4.5, start 10.0, total 36.0"


def test_image_adapter_quantisation_and_cache_are_in_the_table(arguments: list[str], fake_engine: Engine) -> None:
    layers = {"linears": 12, "row_mx_linears": 8}
    branch = {"steps": 10, "cached_steps": [5, 6, 8]}
    report = {
        "image": {"size": [1000, 500], "policy": "resize", "aspect_error": 0.154},
        "lora": {"name": "fox", "scale": 0.5},
        "quantization": {"method": "fp8_row_mx", "computed_by": "by torch", "experts": {"transformer": layers}},
        "cache": {"backend": "cache_dit", "experts": {"transformer": {"positive": branch, "negative": branch}}},
    }
    fake_engine.answer = output(report={**REPORT, **report})
    table = [" ".join(line.split()) for line in run([*arguments, "--seed", "7"], code=0)[0].splitlines()]
    assert "lora fox, scale 0.5" in table
    assert "image 1000×500, policy resize, 15.4% stretched" in table
    assert "quantized fp8_row_mx: transformer 8 of 12 linear layers; by torch" in table
    assert "cache cache_dit: transformer 6 of 20 forwards reused" in table


def test_what_a_pipeline_does_not_report_is_a_dash(arguments: list[str], fake_engine: Engine) -> None:
    fake_engine.answer = output()
    stdout, _ = run([*arguments, "--seed", "7"], code=0)
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in stdout.splitlines() if line.strip()}
    assert rows["steps"] == rows["guidance"] == rows["layout"] == rows["schedule"] == "–"
    assert rows["seconds"] == "text –, denoise –, vae –, start 10.0, total 36.0"


def test_a_seed_is_random_and_reported(arguments: list[str], fake_engine: Engine) -> None:
    summary = json.loads(run([*arguments, "--json"], code=0)[0])
    assert fake_engine.request is not None
    assert fake_engine.request.seed_is_random
    assert summary["seed"] == fake_engine.request.seed


def test_changed_sizes_are_noted(arguments: list[str], fake_engine: Engine) -> None:
    _, stderr = run([*arguments, "--num-frames", "6", "--height", "40", "--width", "48"], code=0)
    assert "num frames: asked for 6, got 5" in stderr
    assert "height: asked for 40, got 32" in stderr
    assert "width" not in stderr


def test_quiet_says_nothing(arguments: list[str], fake_engine: Engine, tmp_path: Path) -> None:
    assert run([*arguments, "--quiet"], code=0) == ("", "")
    assert (tmp_path / "out.mp4").exists()


def test_fps_is_that_of_the_file(arguments: list[str], fake_engine: Engine, tmp_path: Path) -> None:
    run([*arguments, "--fps", "8"], code=0)
    assert read_video_info(tmp_path / "out.mp4").fps == 8.0


def test_a_failure_is_one_message_without_a_traceback(arguments: list[str], fake_engine: Engine) -> None:
    fake_engine.answer = ValueError("tensor_parallel_size 3 does not divide 40 heads")
    _, stderr = run(arguments, code=1)
    assert "error: tensor_parallel_size 3 does not divide 40 heads" in stderr
    assert "Traceback" not in stderr
    [log] = re.findall(r"the engine's output is in (\S+)", stderr)
    assert "something of the engine on stdout" in Path(log).read_text()
    Path(log).unlink()


def caused(error: Exception, cause: Exception | None) -> Exception:
    error.__cause__ = cause
    return error


WORKER_DIED = "diffusion worker rank 1 (pid 7) was killed by SIGKILL (exit code -9) while loading the model"


@pytest.mark.parametrize(
    "error",
    [
        caused(RuntimeError(WORKER_DIED), EOFError()),
        caused(
            RuntimeError(f"Orchestrator initialization failed: {WORKER_DIED}"),
            caused(RuntimeError(WORKER_DIED), EOFError()),
        ),
        RuntimeError(f"Orchestrator initialization failed: {WORKER_DIED}"),
    ],
)
def test_the_message_is_neither_the_wrappers_nor_the_innermost(
    arguments: list[str], fake_engine: Engine, error: Exception
) -> None:
    fake_engine.answer = error
    assert f"error: {WORKER_DIED}" in run([*arguments, "--verbose"], code=1)[1]


def test_debug_shows_the_traceback(arguments: list[str], fake_engine: Engine) -> None:
    fake_engine.answer = ValueError("no")
    _, stderr = run([*arguments, "--debug", "--verbose"], code=1)
    assert "Traceback" in stderr


def test_an_interrupt_is_no_failure(arguments: list[str], fake_engine: Engine) -> None:
    fake_engine.answer = KeyboardInterrupt()
    assert "interrupted" in run([*arguments, "--verbose"], code=130)[1]


STAGE = """
stage_args:
  - runtime: {devices: "0-1"}
    engine_args: {model_class_name: WanPipeline, parallel_config: {tensor_parallel_size: 2}}
"""


def test_a_stage_configuration_becomes_a_deploy_configuration(
    arguments: list[str], fake_engine: Engine, tmp_path: Path
) -> None:
    (tmp_path / "stage.yaml").write_text(STAGE)
    run([*arguments, "--stage-config", str(tmp_path / "stage.yaml")], code=0)
    assert fake_engine.deploy_text is not None
    assert "tensor_parallel_size: 2" in fake_engine.deploy_text
    assert fake_engine.request is not None
    assert not fake_engine.request.deploy_config.exists(), "the temporary file is left behind"
    assert engine.engine_arguments(fake_engine.request) == {"deploy_config": str(fake_engine.request.deploy_config)}


def test_the_limit_of_the_start_goes_to_the_engine_with_and_without_a_configuration_file(
    arguments: list[str], fake_engine: Engine, tmp_path: Path
) -> None:
    (tmp_path / "stage.yaml").write_text(STAGE)
    for more in ([], ["--stage-config", str(tmp_path / "stage.yaml")]):
        run([*arguments, "--init-timeout", "7200", *more], code=0)
        assert fake_engine.request is not None
        passed = engine.engine_arguments(fake_engine.request)
        assert (passed["init_timeout"], passed["stage_init_timeout"]) == (7200, 7200)


def test_engine_settings_go_into_the_configuration_file(
    arguments: list[str], fake_engine: Engine, tmp_path: Path
) -> None:
    stage, deploy = tmp_path / "stage.yaml", tmp_path / "deploy.yaml"
    stage.write_text(STAGE)
    deploy.write_text("dtype: bfloat16\nstages: [{stage_id: 0, flow_shift: 3.0, model_config: {warmup_shapes: []}}]\n")
    flags = ["--dtype", "float32", "--flow-shift", "12", "--cache-backend", "cache_dit", "--quantization", "fp8_row_mx"]
    for file in (["--stage-config", str(stage)], ["--deploy-config", str(deploy)]):
        run([*arguments, *flags, *file], code=0)
        assert fake_engine.deploy_text is not None
        written = yaml.safe_load(fake_engine.deploy_text)
        [entry] = written["stages"]
        assert (written["dtype"], entry["flow_shift"], entry["cache_backend"]) == ("float32", 12.0, "cache_dit")
        assert entry["model_config"]["quantization"] == "fp8_row_mx"
    assert entry["model_config"]["warmup_shapes"] == []
    deploy.write_text("stages: []\n")
    assert "has not one stage" in run([*arguments, *flags, "--deploy-config", str(deploy)], code=2)[1]


def test_a_bad_stage_configuration(arguments: list[str], fake_engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "stage.yaml").write_text(STAGE.replace("0-1", "0-3"))
    _, stderr = run([*arguments, "--stage-config", str(tmp_path / "stage.yaml")], code=2)
    assert "runtime.devices names 4 core(s)" in stderr


def test_configuration_files_exclude_each_other(arguments: list[str], fake_engine: Engine, tmp_path: Path) -> None:
    stage, deploy = tmp_path / "stage.yaml", tmp_path / "deploy.yaml"
    stage.write_text(STAGE)
    deploy.write_text("stages: []\n")
    both = ["--stage-config", str(stage), "--deploy-config", str(deploy)]
    assert "give this or --deploy-config, not both" in run([*arguments, *both], code=2)[1]
    assert "give it to --stage-config" in run([*arguments, "--deploy-config", str(stage)], code=2)[1]
    layout = ["--deploy-config", str(deploy), "--tensor-parallel-size", "2"]
    assert "the configuration file settles the layout" in run([*arguments, *layout], code=2)[1]
    run([*arguments, "--deploy-config", str(deploy)], code=0)
    assert fake_engine.request is not None
    assert fake_engine.request.deploy_config == deploy


def test_defaults_of_the_configuration_yield_to_the_request() -> None:
    defaults = SimpleNamespace(num_frames=33, height=480, seed=5, guidance_scale=4.0, extra_args={"flow_shift": 5.0})
    request = GenerateOptions(model="m", prompt="p", seed=9, seed_is_random=True, height=64, flow_shift=12.0)
    sampling = engine.apply_request(defaults, request)
    assert (sampling.num_frames, sampling.height, sampling.seed, sampling.guidance_scale) == (33, 64, 5, 4.0)
    assert sampling.extra_args == {"flow_shift": 12.0}
    assert defaults.extra_args == {"flow_shift": 5.0}


def test_a_given_seed_wins_over_the_configuration() -> None:
    defaults = SimpleNamespace(num_frames=33, seed=5, extra_args={})
    request = GenerateOptions(model="m", prompt="p", seed=9, seed_is_random=False)
    assert engine.apply_request(defaults, request).seed == 9


@pytest.mark.parametrize(("num_frames", "extra_args"), [(None, {}), (1, {"num_frames": 1}), (5, {"num_frames": 5})])
def test_one_frame_can_be_told_from_no_frame_count(num_frames: int | None, extra_args: dict[str, int]) -> None:
    request = GenerateOptions(model="m", prompt="p", seed=9, seed_is_random=True, num_frames=num_frames)
    sampling = engine.apply_request(SimpleNamespace(num_frames=1, seed=None, extra_args={}), request)
    assert (sampling.num_frames, sampling.extra_args) == (num_frames or 1, extra_args)


def test_the_request_sets_fields_that_vllm_omni_has() -> None:
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    known = {field.name for field in dataclasses.fields(OmniDiffusionSamplingParams)}
    request = GenerateOptions(
        model="m", prompt="p", seed=1, seed_is_random=False, height=1, width=1, num_frames=5, num_inference_steps=1,
        guidance_scale=1.0, guidance_scale_2=1.0, fps=8.0, flow_shift=1.0, boundary_ratio=0.5, sample_solver="unipc",
        num_outputs_per_prompt=2, image_policy="crop",
    )  # fmt: skip
    sampling = engine.apply_request(OmniDiffusionSamplingParams(), request)
    engine.add_lora(sampling, Path("styles") / "fox.safetensors", 0.5)
    assert set(vars(sampling)) <= known
    assert (sampling.lora_request.lora_name, sampling.lora_scale) == ("fox", 0.5)
    assert Path(sampling.lora_request.lora_path).is_absolute() and sampling.lora_request.lora_int_id > 0


def test_help_and_version_import_neither_vllm_nor_torch() -> None:
    program = (
        "import sys; from vllm_omni_neuron.cli import app; app(['generate', '--help'], standalone_mode=False);"
        "sys.exit(','.join({'torch', 'vllm', 'vllm_omni', 'omni_neuron_runtime'} & set(sys.modules)) or None)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
