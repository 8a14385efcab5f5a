# SPDX-License-Identifier: Apache-2.0
"""Shared by this package's tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from omni_neuron_hunyuan_video15.tiny import make_tiny_checkpoint

# Ranks inherit sys.path, so they too can import the functions in hunyuan_ranks.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint in float32."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("hunyuan") / "tiny")
