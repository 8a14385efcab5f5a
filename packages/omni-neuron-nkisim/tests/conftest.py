# SPDX-License-Identifier: Apache-2.0
"""The simulator is nki while these tests are collected and run, and not for the tests of other packages."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import omni_neuron_nkisim

sys.path.insert(0, str(Path(__file__).parent))
_asked_for = omni_neuron_nkisim.is_installed()
omni_neuron_nkisim.install()


def pytest_collection_finish() -> None:
    if not _asked_for:
        omni_neuron_nkisim.uninstall()


@pytest.fixture(autouse=True)
def _simulated_nki() -> Iterator[None]:
    omni_neuron_nkisim.install()
    yield
    if not _asked_for:
        omni_neuron_nkisim.uninstall()
