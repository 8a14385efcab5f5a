# SPDX-License-Identifier: Apache-2.0
"""The processes that the kit's pipelines run in: one pool for all models of a test session, and worlds within it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from omni_neuron_parallel import RankError, RankPool, Topology, destroy_parallel, initialize_parallel
from omni_neuron_runtime import declared_world, is_cpu_mode

RANKS = 4
# Of every call and of start-up, in which the fork server imports vLLM: 25 seconds on an idle core.
DEADLINE_S = 240.0
PRELOADED = ("vllm_omni_neuron.worker", "diffusers")

_pool: RankPool | None = None
_stores: tempfile.TemporaryDirectory[str] | None = None
_numbers = itertools.count()


class KitError(AssertionError):
    """Something that the kit asked of a model package went wrong; the message has the rank's own error."""


def run_in_world(
    topology: Topology, function: Callable[..., Any], *arguments: Any, paper: bool = False, preload: Sequence[str] = ()
) -> list[Any]:
    """`function(*arguments)` on the ranks of `topology`, in rank order, with its groups made.

    Args:
        topology: of at most `RANKS` ranks.
        function: of a module that the ranks can import.
        arguments: picklable.
        paper: run one rank only, in a world whose other ranks are merely declared: collectives return garbage.
        preload: modules that ranks would import, for the processes to be forked from one that has them.

    Raises:
        KitError: a rank raised, died or did not answer in time.
    """
    global _pool, _stores
    if not is_cpu_mode():
        raise KitError("the conformance kit runs on this machine's CPU: set VLLM_NEURON_CPU_MODE=1")
    if _pool is None:
        _pool = RankPool(RANKS, timeout=DEADLINE_S, preload=(*PRELOADED, *preload))
        _stores = tempfile.TemporaryDirectory(prefix="omni-neuron-conformance-")
        atexit.register(close_pool)
    assert _stores is not None
    store = f"{_stores.name}/{next(_numbers)}"
    try:
        results = _pool.run(_in_world, topology, store, paper, function, arguments)
    except RankError as error:
        close_pool()
        raise KitError(str(error)) from error
    taken = results[: 1 if paper else topology.world_size]
    errors = [f"rank {rank} of {topology}: {text}" for rank, (text, _) in enumerate(taken) if text is not None]
    if errors:
        raise KitError("\n".join(errors))
    return [value for _, value in taken]


def close_pool() -> None:
    """End the processes; the next run starts others. They end with this process in any case."""
    global _pool, _stores
    if _pool is not None:
        _pool.close()
        _pool = None
    if _stores is not None:
        _stores.cleanup()
        _stores = None


@functools.cache
def _rank_in_pool() -> int:
    return dist.get_rank()  # asked for the first time in the pool's own world


def _in_world(
    topology: Topology, store: str, paper: bool, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[str | None, Any]:
    """On a rank: the error's text, or None and the value."""
    rank = _rank_in_pool()
    # The kit compares ranks itself, and says more; declared ranks could not answer.
    os.environ["OMNI_NEURON_CHECK_RANK_AGREEMENT"] = "0"
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank >= (1 if paper else topology.world_size):
        return None, None
    try:
        with _world(topology, store, rank, paper):
            initialize_parallel(topology)
            try:
                return None, function(*arguments)
            finally:
                destroy_parallel()
    except Exception as error:
        return f"{type(error).__name__}: {error}\n{traceback.format_exc()}", None


@contextlib.contextmanager
def _world(topology: Topology, store: str, rank: int, paper: bool) -> Iterator[None]:
    if topology.world_size == 1:
        yield
        return
    if paper:
        with declared_world(topology.world_size):
            yield
        return
    # A quarter of the pool's deadline: a rank that is left alone says so before the pool gives up on all of them.
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=topology.world_size,
        timeout=timedelta(seconds=DEADLINE_S / 4),
    )
    torch.set_num_threads(1)
    try:
        yield
    finally:
        dist.destroy_process_group()
