# SPDX-License-Identifier: Apache-2.0
"""What a spawned worker tells the engine while it starts: the phase it is in, or the error that stopped it."""

from __future__ import annotations

import traceback
from multiprocessing.connection import Connection
from typing import Any

# Set in spawned workers only; in a single-process engine there is nobody to tell.
_pipe: Connection | None = None

IMPORTING = "starting its Python process and importing vLLM-Omni"
DEVICE = "initialising its device and process groups"
LOADING = "loading the model"


def report_phase(phase: str) -> None:
    """Say what this worker does from now on until it says otherwise."""
    if _pipe is not None:
        _pipe.send({"status": "phase", "phase": phase})


def worker_main(rank: int, pipe: Connection, shm_prefix: str, *arguments: Any) -> None:
    """Entry point of a spawned worker: vLLM-Omni's own, whose errors reach the engine.

    Args:
        rank: Global rank.
        pipe: Where phases, the first error and vLLM-Omni's "ready" are sent.
        shm_prefix: Prefix of the shared-memory segments that this process makes.
        arguments: What vLLM-Omni's `WorkerProc.worker_main` takes besides: configuration, broadcast handle, …
    """
    global _pipe
    _pipe = pipe
    try:
        from vllm_omni.diffusion.worker import WorkerProc

        from vllm_omni_neuron.compat import name_shared_memory

        name_shared_memory(shm_prefix)
        od_config, *rest = arguments
        WorkerProc.worker_main(rank, od_config, _ReadyPipe(pipe), *rest)
    except Exception as error:
        if _pipe is None:  # it was ready: the engine has the rank's requests, their errors and its exit code
            raise
        text = "".join(traceback.format_exception(error))
        pipe.send({"status": "error", "error": f"{type(error).__name__}: {error}", "traceback": text})
        raise SystemExit(1) from error


class _ReadyPipe:
    """The pipe as vLLM-Omni's worker uses it: for the one message that says it is ready."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def send(self, message: dict[str, Any]) -> None:
        global _pipe
        _pipe = None
        self._pipe.send(message)
        self._pipe.close()
