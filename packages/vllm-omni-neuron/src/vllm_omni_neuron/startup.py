# SPDX-License-Identifier: Apache-2.0
"""How a worker process comes to be, and what it tells the engine meanwhile: its phase, or the error that stopped it."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any

logger = logging.getLogger(__name__)

# Set in worker processes only; in a single-process engine there is nobody to tell.
_pipe: Connection | None = None
_ready = False

IMPORTING = "starting its Python process and importing vLLM-Omni"
DEVICE = "initialising its device and process groups"
LOADING = "loading the model"

# Seconds that a worker whose engine is gone has to end by itself; one that waits for another rank never does.
ORPHAN_GRACE_S = 5.0

# What the server of `worker_context` imports: everything that a worker needs but the model.
PRELOADED = "vllm_omni_neuron.worker"


def worker_context() -> ForkServerContext | SpawnContext:
    """What starts the workers.

    On a device each is spawned: it binds its core before anything is imported. In CPU mode they are forked from one
    server that has imported vLLM-Omni, 20 to 30 seconds of one core, once instead of in every worker. The server stays
    for the caller's next engine and ends with the caller's process.
    """
    import omni_neuron_runtime as runtime

    if not runtime.is_cpu_mode():
        return multiprocessing.get_context("spawn")
    return runtime.fork_server([PRELOADED])


@contextlib.contextmanager
def rendezvous_port(od_config: Any) -> Iterator[None]:
    """Keep `od_config.master_port` for rank 0, which listens on it; another free port where it is taken.

    vLLM-Omni looks for a free port when it makes the configuration, many seconds before rank 0 binds it; until then any
    process may be given the same. A bound socket that does not listen keeps it from them, and not from rank 0, whose
    socket has SO_REUSEADDR as well.
    """
    dual_stack = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if dual_stack else socket.AF_INET) as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if dual_stack:
            keeper.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            keeper.bind(("", od_config.master_port))
        except OSError as error:
            keeper.bind(("", 0))
            port = keeper.getsockname()[1]
            logger.info("port %s of the process groups is taken (%s); using %d", od_config.master_port, error, port)
            od_config.master_port = port
        yield


def _adopt_environment(environment: dict[str, str]) -> None:
    """Give a forked worker the engine's environment; the server's may be that of an earlier engine."""
    import torch

    os.environ.clear()
    os.environ.update(environment)
    # OpenMP reads the variable when it is loaded, which was in the server; the first number is the outermost level's.
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"].partition(",")[0]))


def end_with_the_engine() -> None:
    """End this process when the engine's process has ended, in whatever way.

    vLLM-Omni asks the kernel for a signal when the parent process ends. A forked worker's parent is the fork server,
    which outlives an engine that was killed for as long as it has a worker.
    """
    engine = multiprocessing.parent_process()
    if engine is None:
        return  # this is the engine's process

    def watch() -> None:
        wait([engine.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="neuron-engine-watch", daemon=True).start()


def report(message: dict[str, Any]) -> None:
    """Send `message` to the engine, if this process is a worker's and the engine still listens."""
    if _pipe is not None:
        with contextlib.suppress(OSError):
            _pipe.send(message)


def report_phase(phase: str, limit_s: float | None = None) -> None:
    """Say what this worker does from now on until it says otherwise or is ready.

    Args:
        phase: in words that go on from "is still" and "failed while".
        limit_s: seconds that the phase may take, which then do not count as the start-up's; None: they do.
    """
    if not _ready:
        report({"status": "phase", "phase": phase, "limit_s": limit_s})


def worker_main(rank: int, pipe: Connection, shm_prefix: str, environment: dict[str, str], *arguments: Any) -> None:
    """Entry point of a worker process: vLLM-Omni's own, whose errors reach the engine.

    Args:
        rank: Global rank.
        pipe: Where phases, an error of the start-up, vLLM-Omni's "ready" and then the reports of `rank_reports` go.
        shm_prefix: Prefix of the shared-memory segments that this process makes.
        environment: The engine's, with OMP_NUM_THREADS.
        arguments: What vLLM-Omni's `WorkerProc.worker_main` takes besides: configuration, broadcast handle, …
    """
    global _pipe, _ready
    _pipe, _ready = pipe, False
    end_with_the_engine()
    try:
        _adopt_environment(environment)
        from vllm_omni.diffusion.worker import WorkerProc

        from vllm_omni_neuron.compat import name_shared_memory

        name_shared_memory(shm_prefix)
        od_config, *rest = arguments
        WorkerProc.worker_main(rank, od_config, _ReadyPipe(pipe), *rest)
    except Exception as error:
        if _ready:  # the engine has the rank's requests, their errors and its exit code
            raise
        text = "".join(traceback.format_exception(error))
        report({"status": "error", "error": f"{type(error).__name__}: {error}", "traceback": text})
        raise SystemExit(1) from error


class _ReadyPipe:
    """The pipe as vLLM-Omni's worker uses it: for the one message that says it is ready."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def send(self, message: dict[str, Any]) -> None:
        global _ready
        _ready = True
        self._pipe.send(message)
