# SPDX-License-Identifier: Apache-2.0
"""What the tests of all packages share where they run together, in one process after the other's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib.metadata import entry_points

import pytest

FAMILY = ("omni_neuron_", "vllm_omni_neuron")
# What the ranks of these files import, vLLM above all.
RANKS_OF = ("packages/omni-neuron-wan22/tests/", "/test_conformance")
THEY_IMPORT = ("vllm_omni_neuron.worker", "diffusers.pipelines.wan.pipeline_wan")


@pytest.fixture(scope="session", autouse=True)
def _ranks_are_forked_from_a_process_that_has_vllm(request: pytest.FixtureRequest) -> None:
    """Start the fork server with what any file of this run needs; its first user decides what it has imported.

    Else a file whose ranks do without vLLM would start it, and every rank of later ones would import vLLM: a quarter of
    a minute of a core for each.
    """
    if any(part in str(item.path) for item in request.session.items for part in RANKS_OF):
        from omni_neuron_runtime import fork_server

        fork_server((*THEY_IMPORT, *_pipeline_modules()))


def _pipeline_modules() -> Iterator[str]:
    """The modules of the pipelines of all model packages that are installed."""
    for entry_point in entry_points(group="vllm_omni_neuron.models"):
        yield from (entry["module_name"] for entry in entry_point.load().PIPELINE_REGISTRY)


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
