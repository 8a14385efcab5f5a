# SPDX-License-Identifier: Apache-2.0
"""Wan2.2 through the engine with every component as StableHLO: the eager engine's video, and nothing compiled twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_neuron_wan22 import make_tiny_checkpoint

pytest.importorskip("torch_mlir", reason="the extra [stablehlo] of omni-neuron-runtime is not installed")
pytestmark = pytest.mark.engine
RUN = Path(__file__).with_name("wan22_compiled_run.py")
TIMEOUT_S = 1200
STABLEHLO = "neuron_stablehlo"
ENGINES: dict[str, list[Any]] = {
    "eager": ["", {}],
    "compiled": [STABLEHLO, {}],
    "compiled, TP2 CP2": [STABLEHLO, {"tensor_parallel_size": 2, "ring_degree": 2}],
}
# In a process of its own: in the first one torch.compile itself would still know the graphs.
AGAIN: dict[str, list[Any]] = {"compiled again": [STABLEHLO, {}]}
COMPILED = ["compiled", "compiled, TP2 CP2", "compiled again"]
# Text encoder; each expert's forward and projection of the text; the decoder's first chunk and later ones. The experts
# are alike, and the cache sees that.
GRAPHS, MODULES = 7, 5


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiled")
    model = make_tiny_checkpoint(folder / "tiny")
    environment = {
        **{name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"},
        "VLLM_NEURON_CPU_MODE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMNI_NEURON_COMPILE_CACHE_DIR": str(folder / "cache"),
    }
    for engines in (ENGINES, AGAIN):
        with (folder / "log.txt").open("a") as stream:
            done = subprocess.run(
                [sys.executable, str(RUN), str(model), str(folder), json.dumps(engines)],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=TIMEOUT_S,
            )
        assert done.returncode == 0, (folder / "log.txt").read_text()[-8000:]
    return folder


def reports(engines: Path, name: str) -> list[dict[str, Any]]:
    return json.loads((engines / name / "report.json").read_text())


@pytest.mark.parametrize("name", COMPILED)
def test_the_video_is_the_eager_engines(engines: Path, name: str) -> None:
    wanted, got = (np.load(engines / folder / "frames.npy").astype(np.float64) for folder in ("eager", name))
    assert np.linalg.norm(got - wanted) / np.linalg.norm(wanted) <= 1e-4


@pytest.mark.parametrize("name", COMPILED)
def test_a_new_prompt_seed_guidance_and_step_count_compile_nothing(engines: Path, name: str) -> None:
    first, second = reports(engines, name)
    assert first["graphs"] >= GRAPHS
    assert second == first


def test_each_graph_is_compiled_once_by_one_rank(engines: Path) -> None:
    cold, parallel = reports(engines, "compiled")[0], reports(engines, "compiled, TP2 CP2")[0]
    assert cold["lowerings"] == cold["compilations"] == MODULES
    # On rank 0, which found some graphs compiled by another rank.
    assert parallel["graphs"] == parallel["lowerings"] + parallel["artifact_hits"]


def test_a_warm_start_compiles_nothing(engines: Path) -> None:
    warm = reports(engines, "compiled again")[0]
    assert (warm["graphs"], warm["lowerings"], warm["compilations"]) == (GRAPHS, 0, 0)
    assert warm["artifact_hits"] == warm["executable_hits"] == GRAPHS


def test_progress_names_component_and_shape(engines: Path) -> None:
    log = (engines / "log.txt").read_text()
    for name in ("text_encoder", "transformer", "vae"):
        assert f"compiling {name} (64×96×9) …" in log
        assert f"compiled {name} (64×96×9) in " in log
