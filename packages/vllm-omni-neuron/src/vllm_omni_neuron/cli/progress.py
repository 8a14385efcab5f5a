# SPDX-License-Identifier: Apache-2.0
"""A clean terminal while the engine works: its output goes to a log file, its progress bar is drawn here.

The engine's processes inherit this process's stdout and stderr and write logs and a tqdm bar to them. Both file
descriptors are therefore led to a log file, and a thread reads the bar from it.

An engine that runs in this process also changes `sys.stdout` and `sys.stderr` for good: vLLM puts the worker's name
before every line, and log handlers keep the objects. They get objects of their own, both of stderr, so that nothing
but the result ever reaches stdout.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

# The bar of vLLM-Omni's ProgressBarMixin has no description before the percentage; bars of weight loading have one.
# An engine that runs in this process prefixes the first state of it.
_STEP = re.compile(r"^(?:\(\w+ pid=\d+\))?\s*\d+%\|[^|]*\|\s*(\d+)/(\d+) \[")
_SPLIT = re.compile(rb"[\r\n]+")
_POLL_SECONDS = 0.1


@contextlib.contextmanager
def engine_streams() -> Iterator[None]:
    """Inside, file descriptor 1 is stderr's, and `sys.stdout` and `sys.stderr` are objects that may be spoilt."""
    sys.stdout.flush()
    sys.stderr.flush()
    streams = sys.stdout, sys.stderr
    stdout = os.dup(1)
    os.dup2(2, 1)
    sys.stdout, sys.stderr = (os.fdopen(2, "w", buffering=1, encoding="utf-8", closefd=False) for _ in streams)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = streams
        os.dup2(stdout, 1)
        os.close(stdout)


class EngineOutput:
    """Context manager: inside it, output of the engine goes to a log file, and phases and steps are shown.

    The log is removed where all goes well.

    Args:
        show: Draw progress on the real stderr.
    """

    def __init__(self, show: bool) -> None:
        self._log_descriptor, name = tempfile.mkstemp(prefix="vllm-omni-neuron-", suffix=".log")
        self.log = Path(name)
        self._show = show
        self._done = threading.Event()

    def __enter__(self) -> EngineOutput:
        sys.stderr.flush()
        self._stderr = os.dup(2)
        os.dup2(self._log_descriptor, 2)
        os.close(self._log_descriptor)
        self._streams = engine_streams()
        self._streams.__enter__()
        self._terminal = os.fdopen(os.dup(self._stderr), "w", encoding="utf-8")
        self._console = console = Console(file=self._terminal, highlight=False)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            # rich would show on the terminal what is meant for the log
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not (self._show and console.is_terminal),
        )
        self._task = self._progress.add_task("starting", total=None, count="")
        self._progress.start()
        self._follower = threading.Thread(target=self._follow, name="engine-output", daemon=True)
        self._follower.start()
        return self

    def phase(self, description: str) -> None:
        """Name what the engine does now."""
        self._begin(description)
        if self._show and not self._console.is_terminal:
            self._console.print(description, markup=False)

    def _begin(self, description: str) -> None:
        # A new task, because rich cannot take a total back.
        self._progress.remove_task(self._task)
        self._task = self._progress.add_task(description, total=None, count="")

    def _follow(self) -> None:
        """Read the log as it grows. A pipe would not do: helper processes of the engine outlive it and hold it open."""
        pending = b""
        with self.log.open("rb") as log:
            while True:
                last = self._done.wait(_POLL_SECONDS)
                *lines, pending = _SPLIT.split(pending + log.read())
                for line in lines:
                    self._step(line.decode("utf-8", "replace"))
                if last:
                    return

    def _step(self, line: str) -> None:
        if match := _STEP.match(line):
            done, total = map(int, match.groups())
            if done == total:
                self._begin("decoding the video")
                return
            self._progress.update(
                self._task, completed=done, total=total, description="denoising", count=f"{done}/{total}"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._done.set()
        self._follower.join()
        self._progress.stop()
        self._streams.__exit__(kind, error, traceback)
        os.dup2(self._stderr, 2)
        os.close(self._stderr)
        self._terminal.close()
        if error is None:
            self.log.unlink()
