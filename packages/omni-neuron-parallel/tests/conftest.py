# SPDX-License-Identifier: Apache-2.0
"""Pools of gloo processes that end with the session."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_neuron_parallel import RankPool

# Ranks inherit sys.path, so they too can import the functions in parallel_ranks.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool
