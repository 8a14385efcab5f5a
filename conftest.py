# SPDX-License-Identifier: Apache-2.0
"""What the tests of all packages share where they run together, in one process after the other's."""

from __future__ import annotations

import logging

import pytest

FAMILY = ("omni_neuron_", "vllm_omni_neuron")


@pytest.fixture(autouse=True)
def _loggers_of_a_fresh_process() -> None:
    """Where an earlier test loaded the plugin, our loggers have vLLM's for a parent, and caplog does not see them."""
    for name in logging.root.manager.loggerDict:
        if name.startswith(FAMILY) and "." not in name:
            logging.getLogger(name).parent = logging.root
