# SPDX-License-Identifier: Apache-2.0
"""How each rank's part of a request ended, so that the engine notices where one rank alone has left it.

vLLM-Omni's caller gets the error of the rank that is first with one, without the rank's number; in step mode that of
rank 0 only. It then counts the request as done and sends the next, while the other ranks may still be in it: what they
exchange from then on belongs to different requests. Here every rank says when it has come out of a request. An error
that all ranks come out with is one of the request; where some stay behind, the engine has to stop.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed

from omni_neuron_parallel import CollectiveError
from vllm_omni_neuron import startup

logger = logging.getLogger(__name__)

# Seconds that the other ranks have to come out of a request after the first error of one. Ranks that fail alike do so
# within moments; a rank that waits in a collective for the one that failed never comes.
RANK_GRACE_S = 10.0

# The ranks run the same requests in the same order, so that the same number is the same request on each.
_numbers = itertools.count()


@contextlib.contextmanager
def reported(request: str) -> Iterator[None]:
    """In a worker: tell the engine how this rank comes out of the block, which all ranks run.

    Args:
        request: what it is, for the message, such as "request 17".
    """
    report: dict[str, Any] = {"status": "request", "number": next(_numbers), "request": request, "error": None}
    try:
        yield
    except Exception as error:
        startup.report(
            report
            | {
                "error": f"{type(error).__name__}: {error}",
                "traceback": "".join(traceback.format_exception(error)),
                "collective": isinstance(error, CollectiveError | torch.distributed.DistError),
            }
        )
        raise
    startup.report(report)


@dataclass
class _Request:
    """What is known of one request: the ranks that have come out of it, and the errors of those that had one."""

    done: set[int] = field(default_factory=set)
    errors: dict[int, dict[str, Any]] = field(default_factory=dict)
    deadline: float = 0.0


class RankReports:
    """In the engine: what the workers report. One thread reads; any may ask."""

    def __init__(self, pipes: Sequence[Connection] = ()) -> None:
        """`pipes`: of the workers, in rank order. They belong to this object from now on."""
        self._ranks = {pipe: rank for rank, pipe in enumerate(pipes)}
        self._world = len(pipes)
        self._requests: dict[int, _Request] = {}
        self._lock = threading.Lock()

    def pipes(self) -> list[Connection]:
        """Those whose workers live, to wait on."""
        with self._lock:
            return list(self._ranks)

    def read(self) -> None:
        """Take in all that has been reported until now."""
        with self._lock:
            for pipe, rank in list(self._ranks.items()):
                try:
                    while pipe.poll():
                        self._note(rank, pipe.recv())
                except (EOFError, OSError):  # the process has ended, which its sentinel says as well
                    del self._ranks[pipe]

    def unread(self) -> bool:
        """Whether there is something that `read` would take in."""
        with self._lock:
            return any(pipe.poll() for pipe in self._ranks)

    def decided_at(self) -> float | None:
        """When (`time.monotonic`) `verdict` knows more at the latest, if nobody reports; None for no open error."""
        with self._lock:
            return min((request.deadline for request in self._requests.values() if request.errors), default=None)

    def verdict(self) -> str | None:
        """Why the ranks cannot go on together, if it is so by now."""
        with self._lock:
            for request in self._requests.values():
                late = sorted(set(range(self._world)) - request.done)
                if request.errors and (not late or time.monotonic() >= request.deadline):
                    return _reason(request, late)
        return None

    def close(self) -> None:
        """Let go of the pipes."""
        with self._lock:
            for pipe in self._ranks:
                pipe.close()
            self._ranks.clear()

    def _note(self, rank: int, report: dict[str, Any]) -> None:
        if report["status"] != "request":
            return
        number = report["number"]
        request = self._requests.setdefault(number, _Request())
        request.done.add(rank)
        if report["error"] is not None:
            if not request.errors:
                request.deadline = time.monotonic() + RANK_GRACE_S
            request.errors[rank] = report
        if len(request.done) == self._world and not any(error["collective"] for error in request.errors.values()):
            # All are out of it, so nothing is out of step. After a collective that failed nobody knows that.
            del self._requests[number]


def _reason(request: _Request, late: list[int]) -> str:
    """The message for the caller; a rank that failed by itself goes before those whose collective failed for it."""
    rank, error = min(request.errors.items(), key=lambda item: item[1]["collective"])
    logger.error("diffusion worker rank %d failed:\n%s", rank, error["traceback"])
    message = f"diffusion worker rank {rank} failed while executing {error['request']}: {error['error']}"
    if late:
        names = ", ".join(map(str, late))
        message += f"; rank {names} did not come out of it in the {RANK_GRACE_S:g} s after that"
    return f"{message}; the process groups cannot be used again"
