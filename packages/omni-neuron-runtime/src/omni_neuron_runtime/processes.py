# SPDX-License-Identifier: Apache-2.0
"""Processes on a CPU that are forked from one server, which has imported what all of them need."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext


def fork_server(preload: Sequence[str]) -> ForkServerContext:
    """The context of this process's fork server, which runs when this returns and ends with this process.

    Args:
        preload: modules that the server imports once, instead of every process. Only the server's first user decides;
            processes import for themselves what it lacks.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    with openmp_threads(1):  # no pool of threads in the server, which a fork would not carry over
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def openmp_threads(count: int) -> Iterator[None]:
    """Processes started meanwhile have `count` OpenMP threads: torch sizes its pool when it is imported."""
    before = dict(os.environ)
    os.environ["OMP_NUM_THREADS"] = str(count)
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if "OMP_NUM_THREADS" in before:
            os.environ["OMP_NUM_THREADS"] = before["OMP_NUM_THREADS"]


@contextlib.contextmanager
def environment_defaults(variables: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Set those of `variables` that are not set, for the time of the block.

    Yields:
        The others, with the values that they have.
    """
    kept = {name: os.environ[name] for name in variables if name in os.environ}
    added = {name: value for name, value in variables.items() if name not in kept}
    os.environ.update(added)
    try:
        yield kept
    finally:
        for name in added:
            os.environ.pop(name, None)
