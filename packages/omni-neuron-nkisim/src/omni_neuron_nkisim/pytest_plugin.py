# SPDX-License-Identifier: Apache-2.0
"""pytest's `--nkisim`: the simulator stands in for `nki` during the tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption(
        "--nkisim",
        action="store_true",
        help="let omni-neuron-nkisim stand in for nki, unless a real nki imports",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Install before test modules are imported."""
    if config.getoption("--nkisim"):
        from omni_neuron_nkisim.install import install

        install()
