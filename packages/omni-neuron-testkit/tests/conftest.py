# SPDX-License-Identifier: Apache-2.0
"""Shared by this package's tests: the toy model of the conformance kit, installed as far as discovery can tell."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Ranks inherit sys.path, so they too can import the toy.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def installed_toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The metadata of a distribution whose entry point is the toy."""
    site = tmp_path_factory.mktemp("site")
    info = site / "conformance_toy-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: conformance-toy\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[vllm_omni_neuron.models]\nconformance_toy = conformance_toy\n")
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    yield
    sys.path.remove(str(site))
