# SPDX-License-Identifier: Apache-2.0
"""What the tests of all packages share where they run together, in one process after the other's."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

FAMILY = ("omni_neuron_", "vllm_omni_neuron")


@pytest.fixture(autouse=True)
def _log_records_reach_caplog() -> Iterator[None]:
    """Undo what loading the plugin, or vLLM's server modules, in an earlier test has done to this process's loggers.

    With the plugin our loggers write where vLLM's do, not through the root; a library of the server's raises the level
    of the root and of its handlers to ERROR.
    """
    root = logging.getLogger()
    for name in logging.root.manager.loggerDict:
        if name.startswith(FAMILY) and "." not in name:
            logging.getLogger(name).parent = root
    places: list[logging.Logger | logging.Handler] = [root, *root.handlers]
    levels = [(place, place.level) for place in places]
    yield
    for place, level in levels:
        place.setLevel(level)
