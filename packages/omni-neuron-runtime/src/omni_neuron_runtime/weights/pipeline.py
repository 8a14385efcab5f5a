# SPDX-License-Identifier: Apache-2.0
"""Stages on threads, joined by bounded channels, that stop together: the machinery of the pipelined load."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any


class StageStoppedError(Exception):
    """Another stage failed, or the consumer left; a stage that gets it returns."""


class Pipeline:
    """What stages share: one lock, the first error, and the deadline of every wait.

    Args:
        stall_timeout_s: seconds that the consumer waits for one item before it gives up.
    """

    def __init__(self, stall_timeout_s: float) -> None:
        self.stall_timeout_s = stall_timeout_s
        self.changed = threading.Condition()
        self.error: BaseException | None = None
        self.stopped = False
        # Stage name to what it does right now, for the message of a deadline.
        self.doing: dict[str, str] = {}
        self._threads: list[threading.Thread] = []

    def start(self, name: str, stage: Callable[[], None]) -> None:
        """Run `stage` on a thread of its own; an exception in it stops all stages and is raised by the consumer."""

        def run() -> None:
            try:
                stage()
            except StageStoppedError:
                return
            except BaseException as error:
                self.stop(error)

        # A daemon: a read that hangs in the kernel cannot be interrupted and must not keep the process alive.
        thread = threading.Thread(target=run, name=f"weights-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def stop(self, error: BaseException | None = None) -> None:
        """Stop all stages; the first error is kept."""
        with self.changed:
            self.error = self.error or error
            self.stopped = True
            self.changed.notify_all()

    def progress(self) -> str:
        """What each stage is doing, in words."""
        return "; ".join(f"{stage}: {what}" for stage, what in self.doing.items())

    def join(self, timeout_s: float) -> None:
        """Wait for the stages' threads, at most `timeout_s` seconds in all."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


class Channel:
    """A bounded queue between two stages of a pipeline."""

    _END = object()

    def __init__(self, pipeline: Pipeline, size: int) -> None:
        self._pipeline = pipeline
        self._size = size
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        """Add an item once there is room (StageStoppedError where the pipeline stops first)."""
        with self._pipeline.changed:
            # No deadline of its own: the consumer has one, and when it gives up it stops the pipeline, which ends this.
            self._pipeline.changed.wait_for(lambda: self._pipeline.stopped or len(self._items) < self._size)
            if self._pipeline.stopped:
                raise StageStoppedError
            self._items.append(item)
            self._pipeline.changed.notify_all()

    def end(self) -> None:
        """Say that no item follows."""
        self.put(self._END)

    def items(self, timeout_s: float | None = None) -> Iterator[Any]:
        """The items until the end.

        Raises:
            StageStoppedError: the pipeline stopped.
            TimeoutError: no item came within `timeout_s` seconds; says what each stage was doing.
        """
        while True:
            with self._pipeline.changed:
                ready = self._pipeline.changed.wait_for(lambda: self._pipeline.stopped or self._items, timeout_s)
                if self._pipeline.stopped:
                    raise StageStoppedError
                if not ready:
                    raise TimeoutError(f"nothing arrived within {timeout_s} s ({self._pipeline.progress()})")
                item = self._items.popleft()
                self._pipeline.changed.notify_all()
            if item is self._END:
                return
            yield item
