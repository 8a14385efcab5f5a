# SPDX-License-Identifier: Apache-2.0
"""Shared by this package's tests: tiny checkpoints, and pools of gloo processes that end with the session."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from omni_neuron_parallel import RankPool
from omni_neuron_wan22 import TinyWan, make_tiny_checkpoint

# Ranks inherit sys.path, so they too can import the functions in wan22_reference.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-expert checkpoint in float32, sharded into several files with an index."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("wan") / "tiny", TinyWan(max_shard_size="500KB"))


@pytest.fixture(scope="session")
def preload() -> tuple[str, ...]:
    """What every rank of these tests would import: 20 to 30 seconds of one core."""
    return ("omni_neuron_wan22.pipeline", "diffusers.pipelines.wan.pipeline_wan")


@pytest.fixture(scope="session")
def two_ranks(preload: tuple[str, ...]) -> Iterator[RankPool]:
    with RankPool(2, preload=preload) as pool:
        yield pool


@pytest.fixture(scope="session")
def four_ranks(preload: tuple[str, ...]) -> Iterator[RankPool]:
    with RankPool(4, timeout=180, preload=preload) as pool:
        yield pool


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> RankPool | None:
    """The pool for an indirect parameter: a TP size; None at TP 1, which needs no processes."""
    names = {1: None, 2: "two_ranks", 4: "four_ranks"}
    name = names[request.param]
    return None if name is None else request.getfixturevalue(name)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
