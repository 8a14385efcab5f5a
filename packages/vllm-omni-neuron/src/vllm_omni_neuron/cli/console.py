# SPDX-License-Identifier: Apache-2.0
"""Where the commands write: results to stdout, everything else to stderr."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

EXIT_OK = 0
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
    return Console(file=sys.stdout, highlight=False, soft_wrap=not sys.stdout.isatty())


def err() -> Console:
    """Progress, notes and errors."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=not sys.stderr.isatty())


def print_json(value: Any) -> None:
    """One JSON document on stdout, and nothing else."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def fail(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """Print `message` on stderr as it is, and end with `code`."""
    err().print(f"error: {message}", style="bold red", markup=False)
    raise typer.Exit(code)


def plain_table(*columns: str, title: str | None = None) -> Table:
    """A table without boxes, which reads well in a terminal and in a log."""
    table = Table(
        *columns, title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    table.show_header = any(columns)
    return table


@contextlib.contextmanager
def plugin_logs_off() -> Iterator[None]:
    """For commands that report every plugin themselves, with the cause: its warnings would say it twice."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
