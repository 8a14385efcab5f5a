# SPDX-License-Identifier: Apache-2.0
"""The simulator is nki while these tests run, and not for the tests of other packages."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import omni_neuron_nkisim

sys.path.insert(0, str(Path(__file__).parent))
_asked_for = omni_neuron_nkisim.is_installed()


@pytest.fixture(autouse=True)
def _simulated_nki(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in ("OMNI_NEURON_NKISIM", "VLLM_NEURON_DISABLE_NKI_KERNELS", "NEURON_PLATFORM_TARGET_OVERRIDE"):
        monkeypatch.delenv(variable, raising=False)
    omni_neuron_nkisim.install()
    yield
    if not _asked_for:
        omni_neuron_nkisim.uninstall()
