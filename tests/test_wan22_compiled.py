# SPDX-License-Identifier: Apache-2.0
"""Wan2.2 through the engine with every component as StableHLO: the eager engine's video, and nothing compiled twice."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_neuron_wan22 import TinyWan, make_tiny_checkpoint

pytest.importorskip("torch_mlir", reason="the extra [stablehlo] of omni-neuron-runtime is not installed")
pytestmark = pytest.mark.engine
RUN = Path(__file__).with_name("wan22_compiled_run.py")
TIMEOUT_S = 1200
SHAPE = "64x96x9"
STABLEHLO: dict[str, Any] = {"backend": "neuron_stablehlo"}
BFLOAT16: dict[str, Any] = {"settings": {"dtype": "bfloat16"}}
WARM: dict[str, Any] = {**STABLEHLO, "settings": {"additional_config": {"warmup_shapes": [SHAPE]}}}
# In this order, in one process: what torch.compile captured is forgotten in between, and each worker is a new process.
ENGINES: dict[str, dict[str, Any]] = {
    "eager": {},
    "compiled": WARM,
    "compiled again": {**WARM, "cache_of": "compiled"},
    "eager, bfloat16": BFLOAT16,
    "compiled, bfloat16, CFG2": {**STABLEHLO, "settings": {**BFLOAT16["settings"], "cfg_parallel_size": 2}},
    "compiled, TP2 CP2": {**STABLEHLO, "settings": {"tensor_parallel_size": 2, "ring_degree": 2}},
}
# The engine that each one is compared with, and the largest relative L2 error. In bfloat16 XLA sums in another order
# than torch, and each step rounds what the one before it left.
COMPARED = {
    "compiled": ("eager", 1e-4),
    "compiled again": ("eager", 1e-4),
    "compiled, TP2 CP2": ("eager", 1e-4),
    "compiled, bfloat16, CFG2": ("eager, bfloat16", 2e-2),
}
# Text encoder; each expert's forward and projection of the text; the decoder's first chunk and later ones. The experts
# are alike, and the cache sees that.
GRAPHS, MODULES = 7, 5


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiled")
    # One layer each: every rank captures every graph, and a second layer would be captured like the first.
    model = make_tiny_checkpoint(folder / "tiny", TinyWan(num_layers=1, text_layers=1))
    environment = {
        **{name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"},
        "VLLM_NEURON_CPU_MODE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with (folder / "log.txt").open("w") as stream:
        done = subprocess.run(
            [sys.executable, str(RUN), str(model), str(folder), json.dumps(ENGINES)],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            timeout=TIMEOUT_S,
        )
    assert done.returncode == 0, (folder / "log.txt").read_text()[-8000:]
    return folder


def reports(engines: Path, name: str) -> dict[str, dict[str, Any]]:
    return json.loads((engines / name / "report.json").read_text())


@pytest.mark.parametrize("name", COMPARED)
def test_the_video_is_the_eager_engines(engines: Path, name: str) -> None:
    reference, tolerance = COMPARED[name]
    wanted, got = (np.load(engines / folder / "frames.npy").astype(np.float64) for folder in (reference, name))
    assert np.linalg.norm(got - wanted) / np.linalg.norm(wanted) <= tolerance


@pytest.mark.parametrize("name", COMPARED)
def test_a_new_prompt_seed_guidance_and_step_count_compile_nothing(engines: Path, name: str) -> None:
    report = reports(engines, name)
    assert report["first"]["graphs"] >= GRAPHS
    assert report["second"] == report["first"]


@pytest.mark.parametrize("name", ["compiled, TP2 CP2", "compiled, bfloat16, CFG2"])
def test_each_graph_is_compiled_by_one_rank(engines: Path, name: str) -> None:
    cold, parallel = reports(engines, "compiled")["first"], reports(engines, name)["first"]
    assert cold["lowerings"] == cold["compilations"] == MODULES
    # On rank 0, which found some graphs compiled by another rank.
    assert parallel["graphs"] == parallel["lowerings"] + parallel["artifact_hits"]


def test_a_warm_start_on_a_copied_cache_compiles_nothing(engines: Path) -> None:
    warm = reports(engines, "compiled again")["first"]
    assert (warm["graphs"], warm["lowerings"], warm["compilations"]) == (GRAPHS, 0, 0)
    assert warm["artifact_hits"] == warm["executable_hits"] == GRAPHS


@pytest.mark.parametrize(("name", "lowerings"), [("compiled", MODULES), ("compiled again", 0)])
def test_warmup_shapes_compile_before_the_first_request(engines: Path, name: str, lowerings: int) -> None:
    report = reports(engines, name)
    assert (report["started"]["graphs"], report["started"]["lowerings"]) == (GRAPHS, lowerings)
    assert report["first"] == report["started"]
    assert "warming up 64×96×9" in (engines / "log.txt").read_text()


def test_the_kernels_are_composites(engines: Path) -> None:
    modules = engines / "compiled" / "cache" / "modules"
    texts = {path.parent: path.read_text() for path in modules.glob("*/module.mlir")}
    found = {name for text in texts.values() for name in re.findall(r'composite "omni_neuron_kernels\.(\w+)"', text)}
    assert found >= {"adaln_modulate", "causal_conv3d", "flash_attention", "mlp", "output_projection", "qkv_projection"}


def test_progress_names_component_and_shape(engines: Path) -> None:
    log = (engines / "log.txt").read_text()
    for name in ("text_encoder", "transformer", "vae"):
        assert f"compiling {name} (64×96×9) …" in log
        assert f"compiled {name} (64×96×9) in " in log
