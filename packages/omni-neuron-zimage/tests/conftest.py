# SPDX-License-Identifier: Apache-2.0
"""Shared by this package's tests: a tiny checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from omni_neuron_zimage.tiny import TinyZImage, make_tiny_checkpoint

# Ranks inherit sys.path, so they too can import zimage_ranks.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in float32, its transformer in several files with an index."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("zimage") / "tiny", TinyZImage(max_shard_size="1MB"))
