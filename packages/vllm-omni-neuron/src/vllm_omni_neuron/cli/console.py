# SPDX-License-Identifier: Apache-2.0
"""Where the commands write: results to stdout, everything else to stderr."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any, NoReturn, TextIO

import typer
from rich.console import Console
from rich.table import Table

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

STATUS_STYLE = {
    "loaded": "green",
    "registered": "green",
    "failed": "bold red",
    "filtered": "yellow",
    "shadowed": "yellow",
}


def out() -> Console:
    """Results. Made anew for each use, because stdout may have been replaced."""
    return _console(sys.stdout)


def err() -> Console:
    """Progress, notes and errors."""
    return _console(sys.stderr)


def _console(file: TextIO) -> Console:
    # In a file or a pipe no line is broken and no cell of a table is cut.
    terminal = file.isatty()
    return Console(file=file, highlight=False, soft_wrap=not terminal, width=None if terminal else 500)


def print_json(value: Any) -> None:
    """One JSON document on stdout, and nothing else."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def fail(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """Print `message` on stderr as it is, and end with `code`."""
    err().print(f"error: {message}", style="bold red", markup=False)
    raise typer.Exit(code)


def plain_table(*columns: str) -> Table:
    """A table without boxes, which reads well in a terminal and in a log."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


@contextlib.contextmanager
def plugin_logs_off() -> Iterator[None]:
    """For commands that report every plugin themselves, with the cause: its warnings would say it twice."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
