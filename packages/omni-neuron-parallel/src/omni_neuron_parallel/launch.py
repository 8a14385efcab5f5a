# SPDX-License-Identifier: Apache-2.0
"""Run a function on several gloo processes of this machine, with a deadline, and always end them.

For tests, benchmarks and checks below the engine; vLLM-Omni starts its own workers.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from omni_neuron_runtime import fork_server


class RankError(RuntimeError):
    """A rank raised, died or did not answer in time; the message names it and carries its traceback."""


class RankPool:
    """`world_size` processes with an initialised gloo world, kept for several calls.

    Use as a context manager. After a failure the pool is closed: a rank that is stuck in a collective cannot be reused.
    The processes are forked from multiprocessing's fork server, not from the caller.

    Args:
        world_size: number of processes.
        timeout: seconds that start-up and each call may take.
        preload: modules that the fork server imports; see `omni_neuron_runtime.fork_server`.
    """

    def __init__(self, world_size: int, *, timeout: float = 120.0, preload: Sequence[str] = (__name__,)):
        self.world_size = world_size
        self.timeout = timeout
        context = fork_server(preload)
        self._directory = tempfile.TemporaryDirectory(prefix="omni-neuron-ranks-")
        rendezvous = f"file://{self._directory.name}/store"
        # Ranks share the machine's cores; more threads than cores slow each other down.
        threads = max(1, len(os.sched_getaffinity(0)) // world_size)
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, rank, world_size, rendezvous, threads, timeout, dict(os.environ)),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self._collect("starting")

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(*arguments)` on every rank; the results in rank order.

        `function` must be importable (a module-level function), arguments and results picklable.

        Raises:
            RankError: a rank raised, died, or the deadline passed. The pool is closed.
        """
        if not self._processes:
            raise RankError("the pool is closed")
        for connection in self._connections:
            connection.send((function, arguments))
        return self._collect(getattr(function, "__qualname__", repr(function)))

    def _collect(self, what: str) -> list[Any]:
        deadline = time.monotonic() + self.timeout
        results: dict[int, Any] = {}
        while len(results) < self.world_size:
            pending = [rank for rank in range(self.world_size) if rank not in results]
            ready = wait([self._connections[rank] for rank in pending], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise RankError(f"{what}: ranks {pending} of {self.world_size} did not answer in {self.timeout:.0f} s")
            for rank in [rank for rank in pending if self._connections[rank] in ready]:
                try:
                    ok, value = self._connections[rank].recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(5)
                    code = self._processes[rank].exitcode
                    self.close()
                    raise RankError(f"{what}: rank {rank} of {self.world_size} died (exit code {code})") from None
                if not ok:
                    self.close()
                    raise RankError(f"{what}: rank {rank} of {self.world_size} raised\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """End every process, at once; idempotent."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        self._directory.cleanup()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def run_on_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 120.0) -> list[Any]:
    """One `RankPool.run` on a pool of its own."""
    with RankPool(world_size, timeout=timeout) as pool:
        return pool.run(function, *arguments)


def _serve(
    connection: Connection,
    rank: int,
    world_size: int,
    rendezvous: str,
    threads: int,
    timeout: float,
    environment: dict[str, str],
) -> None:
    os.environ.clear()  # the server's environment is that of its start
    os.environ.update(environment)
    torch.set_num_threads(threads)
    try:
        dist.init_process_group(
            "gloo", init_method=rendezvous, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
        )
        connection.send((True, None))
    except Exception:
        connection.send((False, traceback.format_exc()))
        return
    while True:
        try:
            function, arguments = connection.recv()
            connection.send((True, function(*arguments)))
        except EOFError:
            return
        except Exception:
            connection.send((False, traceback.format_exc()))
