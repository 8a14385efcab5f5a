# SPDX-License-Identifier: Apache-2.0
"""Wan2.2 through the real vLLM-Omni engine in CPU mode: TP 1, 2 and 4, other layouts, and the online server."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from omni_neuron_wan22 import NeuronFlowUniPCMultistepScheduler, TinyWan, make_tiny_checkpoint

pytestmark = pytest.mark.engine
RUN = Path(__file__).with_name("wan22_engine_run.py")
REQUEST = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 4}
# Sizes of tensor parallelism whose engines are looked at from every side; four ranks add nothing to the rest.
THOROUGH = (1, 2)
SERVER_START_TIMEOUT_S = 300
ENGINES_TIMEOUT_S = 900


def environment(**variables: str) -> dict[str, str]:
    clean = {
        name: value for name, value in os.environ.items() if name not in ("VLLM_PLUGINS", "NEURON_VISIBLE_DEVICES")
    }
    return {**clean, "VLLM_NEURON_CPU_MODE": "1", "HF_HUB_OFFLINE": "1", **variables}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("wan") / "tiny")


# Every axis and switch at least once, on two and on four ranks.
LAYOUTS: dict[str, dict[str, Any]] = {
    "CP2, VAE patch 2, CPU offload": {"ring_degree": 2, "vae_patch_parallel_size": 2, "enable_cpu_offload": True},
    "CFG2, tiles": {"cfg_parallel_size": 2, "vae_use_tiling": True},
    "TP2 with SP, CP2, VAE patch 4": {
        "tensor_parallel_size": 2,
        "ring_degree": 2,
        "vae_patch_parallel_size": 4,
        "additional_config": {"tp_sequence_parallel": True, "context_method": "ring"},
    },
}


@pytest.fixture(scope="module")
def image_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("wan-i2v") / "tiny-i2v", TinyWan(task="i2v"))


def refused_engines(model: Path, folder: Path) -> dict[str, list[Any]]:
    """Checkpoint and settings of engines that cannot run; their checkpoints are made in `folder`."""
    for name in ("no_vae", "truncated"):
        shutil.copytree(model, folder / name)
    shutil.rmtree(folder / "no_vae" / "vae")
    [weights] = (folder / "truncated" / "transformer_2").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    return {
        "heads": [str(model), {"tensor_parallel_size": 3}],
        "devices": [str(model), {"tensor_parallel_size": 4}],
        "no_vae": [str(folder / "no_vae"), {"tensor_parallel_size": 2}],
        "truncated": [str(folder / "truncated"), {"tensor_parallel_size": 2}],
        "branches": [str(model), {"cfg_parallel_size": 3}],
        "ulysses": [str(model), {"ulysses_degree": 2}],
        "vae": [str(model), {"tensor_parallel_size": 2, "vae_patch_parallel_size": 3}],
    }


@pytest.fixture(scope="module")
def engines(model: Path, image_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder with a subfolder for each layout, and each engine's log.

    One engine after the other in one process, those of TP 2 and 4 after a worker of the last engine was killed. Every
    rank compares its latents with the others' after each step.
    """
    folder = tmp_path_factory.mktemp("engines")
    layouts = {f"TP{size}": {"tensor_parallel_size": size} for size in (1, 2, 4)} | LAYOUTS
    layouts["image"] = {"tensor_parallel_size": 2, "image_to_video": str(image_model)}
    refused = refused_engines(model, tmp_path_factory.mktemp("refused"))
    with (folder / "log.txt").open("w") as stream:
        result = subprocess.run(
            [sys.executable, str(RUN), str(model), str(folder), json.dumps(layouts), json.dumps(refused)],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment(OMNI_NEURON_CHECK_RANK_AGREEMENT="1"),
            timeout=ENGINES_TIMEOUT_S,
        )
    log = (folder / "log.txt").read_text()
    assert result.returncode == 0, log[-8000:]
    parts = (part.split("\n", 1) for part in log.split("=== engine ")[1:])
    return folder, {name.strip(): rest for name, rest in parts}


@pytest.fixture(scope="module")
def runs(engines: tuple[Path, dict[str, str]]) -> dict[int, tuple[dict[str, Any], Path]]:
    """Report and folder of the engines of tensor parallelism alone, by size."""
    folders = {size: engines[0] / f"TP{size}" for size in (1, 2, 4)}
    return {size: (json.loads((folder / "report.json").read_text()), folder) for size, folder in folders.items()}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest, engines: tuple[Path, dict[str, str]]) -> dict[str, Any]:
    """What an engine of one layout made: `settings`, `latents`, frames `wide`, its report and its `log`."""
    folder, logs = engines[0] / request.param, engines[1]
    report = json.loads((folder / "report.json").read_text())
    arrays = {name: np.load(folder / f"{name}.npy") for name in ("latents", "wide")}
    return {"settings": LAYOUTS[request.param], "log": logs[request.param], **arrays, **report}


def test_a_layout_makes_the_video_of_one_rank(layout: dict[str, Any], runs: dict) -> None:
    alone = {name: np.load(runs[1][1] / f"{name}.npy") for name in ("latents", "wide")}
    distance = np.linalg.norm(layout["latents"] - alone["latents"])
    assert distance <= 1e-4 * np.linalg.norm(alone["latents"])
    # Two tiles: near to the untiled frames, not the same, because the VAE's attention sees one tile at a time.
    assert layout["wide"].shape == alone["wide"].shape == (1, 5, 64, 320, 3)
    assert 0 < np.square(layout["wide"] - alone["wide"]).mean() < 10 ** (-30 / 10)
    assert layout["same_seed_is_bit_equal"]
    assert layout["unguided"] == [1, 9, 64, 96, 3]


def test_a_layout_is_reported(layout: dict[str, Any]) -> None:
    settings, generation, log = layout["settings"], layout["generation"], layout["log"]
    tp, cp, cfg = (settings.get(name, 1) for name in ("tensor_parallel_size", "ring_degree", "cfg_parallel_size"))
    assert generation["layout"] == {"tp": tp, "cp": cp, "cfg": cfg}
    assert generation["vae_patch"] == settings.get("vae_patch_parallel_size", 1)
    assert generation["vae_tiling"]
    assert generation["tp_sequence_parallel"] == ("additional_config" in settings)
    assert ("DiT weights are off the device during decoding" in log) == ("enable_cpu_offload" in settings)
    assert ("half of the cores idle" in log) == (cfg == 2)
    for wrong in ("VAE patch parallelism is NOT enabled", "SP hooks not applied", "does not support CPU offloading"):
        assert wrong not in log


@pytest.fixture(scope="module")
def diffusers_frames(model: Path) -> np.ndarray:
    from diffusers import WanPipeline

    with contextlib.redirect_stderr(io.StringIO()):
        pipeline = WanPipeline.from_pretrained(model)
    pipeline.scheduler = NeuronFlowUniPCMultistepScheduler(shift=5.0)
    pipeline.set_progress_bar_config(disable=True)
    prompts = ("A red circle moving right.", "blurry")
    return pipeline(*prompts, **REQUEST, guidance_scale=4.0, generator=torch.Generator().manual_seed(11)).frames


def test_frames_are_those_of_diffusers_at_every_size(runs: dict, diffusers_frames: np.ndarray) -> None:
    for size, (report, folder) in runs.items():
        frames = np.load(folder / "frames.npy")
        assert frames.shape == diffusers_frames.shape == (1, 9, 64, 96, 3)
        assert np.linalg.norm(frames - diffusers_frames) <= 1e-3 * np.linalg.norm(diffusers_frames), f"TP {size}"
        assert report["workers"] == (size if size > 1 else 0)


def test_image_to_video_makes_the_frames_of_diffusers(engines: tuple[Path, dict[str, str]], image_model: Path) -> None:
    from diffusers import WanImageToVideoPipeline

    folder = engines[0] / "image"
    report = json.loads((folder / "report.json").read_text())
    with contextlib.redirect_stderr(io.StringIO()):
        pipeline = WanImageToVideoPipeline.from_pretrained(image_model)
    pipeline.scheduler = NeuronFlowUniPCMultistepScheduler(shift=5.0)
    pipeline.set_progress_bar_config(disable=True)
    images = {"image": Image.open(folder / "first.png"), "last_image": Image.open(folder / "last.png")}
    texts = {"prompt": "A red circle moving right.", "negative_prompt": "blurry"}
    generator = torch.Generator().manual_seed(11)
    expected = pipeline(**images, **texts, **REQUEST, guidance_scale=4.0, generator=generator).frames
    frames = np.load(folder / "frames.npy")
    assert frames.shape == expected.shape == (1, 9, 64, 96, 3)
    assert np.linalg.norm(frames - expected) <= 1e-3 * np.linalg.norm(expected)
    generation = report["generation"]
    assert generation["boundary_ratio"] == 0.9
    assert generation["image"] == {"size": [96, 64], "policy": "resize", "aspect_error": 0.0}
    assert set(generation["seconds"]) == {"text", "image", "denoise", "vae", "transfer"}
    assert report["last_frame_matters"]
    assert "there is no image, which this model needs" in report["no_image"]


def test_same_seed_same_bits(runs: dict) -> None:
    assert all(report["same_seed_is_bit_equal"] for report, _ in runs.values())
    for size in THOROUGH:
        report, _ = runs[size]
        assert report["other_seed_differs"]
        assert report["generator_continues"]


def test_several_videos_of_one_request(runs: dict) -> None:
    for size in THOROUGH:
        videos = runs[size][0]["videos"]
        assert videos["bit_equal"] and videos["generators"] and videos["generator_goes_on"]
        assert videos["report"] == {
            "num_outputs_per_prompt": 2,
            "seed": 11,
            "seeds": [11, 12],
            "steps_per_expert": {"transformer": 1, "transformer_2": 1},
        }


def test_the_guides_python_examples_run(engines: tuple[Path, dict[str, str]]) -> None:
    guide = json.loads((engines[0] / "guide.json").read_text())
    assert guide["error"] is None, guide["error"]
    assert len(guide["done"]) >= 9


def test_reports(runs: dict) -> None:
    for size, (report, _) in runs.items():
        generation = report["generation"]
        assert generation["steps_per_expert"] == {"transformer": 2, "transformer_2": 2}
        assert generation["guidance_per_expert"] == {"transformer": 4.0, "transformer_2": 4.0}
        assert generation["layout"] == {"tp": size, "cp": 1, "cfg": 1}
        assert (generation["seed"], generation["model"], generation["dtype"]) == (11, "tiny", "float32")
        assert set(generation["seconds"]) == {"text", "denoise", "vae", "transfer"}
    for size in THOROUGH:
        report, _ = runs[size]
        assert report["euler"]["generation"]["sample_solver"] == "euler"
        assert report["euler"]["generation"]["flow_shift"] == 12.0
        assert report["rounded"] == [1, 5, 64, 96, 3]
        assert report["latents"] == [[1, 16, 3, 8, 12], "torch.float32"]


def test_a_bad_request_says_what_is_valid(runs: dict) -> None:
    assert "sample_solver = 'ddim': valid values are unipc, euler" in runs[1][0]["bad_request"]


@pytest.mark.parametrize("size", [2, 4])
def test_a_killed_worker_is_named_and_leaves_nothing(runs: dict, size: int) -> None:
    kill = runs[size][0]["kill"]
    assert "rank 1" in kill["error"]
    assert "SIGKILL" in kill["error"]
    assert kill["seconds"] < 15
    assert kill["alive"] == []
    assert kill["shared_memory"] == []


class Server(NamedTuple):
    url: str
    log: Path


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--omni", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", "float32", "--enforce-eager"]
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment())
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + SERVER_START_TIMEOUT_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            assert process.poll() is None, log.read_text()[-8000:]
            assert time.monotonic() < deadline, f"no /health in {SERVER_START_TIMEOUT_S} s:\n{log.read_text()[-8000:]}"
            time.sleep(0.5)
        yield Server(url, log)
        assert "omni_neuron_wan22.pipeline.NeuronWanPipeline" in log.read_text()
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def test_a_cancelled_online_request_makes_room_for_the_next(server: Server) -> None:
    """It would take minutes; the test after this one would wait for it."""
    form = {"prompt": "a cat", "height": "256", "width": "384", "num_frames": "81", "num_inference_steps": "200"}
    response = httpx.post(f"{server.url}/v1/videos", files={k: (None, v) for k, v in form.items()}, timeout=60)
    assert response.status_code == 200, response.text
    job = response.json()
    deadline = time.monotonic() + SERVER_START_TIMEOUT_S
    while httpx.get(f"{server.url}/v1/videos/{job['id']}", timeout=30).json()["status"] != "in_progress":
        assert time.monotonic() < deadline, f"{job['id']} does not begin:\n{server.log.read_text()[-4000:]}"
        time.sleep(0.2)
    assert httpx.delete(f"{server.url}/v1/videos/{job['id']}", timeout=60).json()["deleted"]
    while "Stopped cancelled diffusion request(s)" not in server.log.read_text():
        assert time.monotonic() < deadline, f"{job['id']} goes on:\n{server.log.read_text()[-4000:]}"
        time.sleep(0.2)


def test_online_video_equals_the_offline_one(server: Server, runs: dict) -> None:
    form = {"prompt": "A red circle moving right.", "negative_prompt": "blurry", "seed": "11", "guidance_scale": "4.0"}
    form |= {name: str(value) for name, value in REQUEST.items()}
    # multipart/form-data, as the endpoint expects it: fields without a file name
    response = httpx.post(f"{server.url}/v1/videos/sync", files={k: (None, v) for k, v in form.items()}, timeout=300)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("video/mp4")
    offline = (runs[1][1] / "video.mp4").read_bytes()
    assert response.content == offline


def test_online_errors_say_what_is_valid(server: Server) -> None:
    form = {"prompt": "a cat", "height": "64", "width": "96", "extra_params": json.dumps({"sample_solver": "ddim"})}
    response = httpx.post(f"{server.url}/v1/videos/sync", files={k: (None, v) for k, v in form.items()}, timeout=120)
    assert response.status_code == 400, response.text
    assert "sample_solver = 'ddim': valid values are unipc, euler" in response.text


@pytest.fixture(scope="module")
def refusals(engines: tuple[Path, dict[str, str]]) -> dict[str, dict[str, Any]]:
    """What `Omni(...)` raises for checkpoints and settings that cannot run (`refused_engines`)."""
    return json.loads((engines[0] / "refusals.json").read_text())


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("heads", ["tensor_parallel_size = 3", "4 attention heads", "1, 2, 4"]),
        ("devices", ["4", "3"]),
        ("no_vae", ["no folder vae"]),
        ("truncated", ["transformer_2", ".safetensors"]),
        ("branches", ["cfg_parallel_size = 3", "2 branches", "1, 2"]),
        ("ulysses", ["ulysses_degree = 2", "ring_degree = 2"]),
        ("vae", ["vae_patch", "3", "1, 2"]),
    ],
)
def test_refusals_reach_the_caller_before_a_worker_starts(refusals: dict, case: str, parts: list[str]) -> None:
    assert all(part in refusals[case]["error"] for part in parts), refusals[case]["error"]
    assert refusals[case]["processes"] == 0


def test_demo(tmp_path: Path) -> None:
    """The README's first command, on one worker: the videos show what was asked for, and that is said."""
    options = ["--folder", str(tmp_path), "--tensor-parallel-size", "1"]
    demo = Path(__file__).parents[1] / "examples" / "demo.py"
    run = subprocess.run(
        [sys.executable, str(demo), *options], env=environment(), capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    assert "seen:  a red circle moving right" in run.stdout
    assert "3 of 3 as asked" in run.stdout
    assert len(list(tmp_path.glob("*.mp4"))) == 3 and (tmp_path / "contact-sheet.png").stat().st_size > 1000
