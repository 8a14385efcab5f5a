# SPDX-License-Identifier: Apache-2.0
"""What a compilation is for, as its messages say it: "transformer (480×832×81)"."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_shape: ContextVar[str] = ContextVar("compile_shape", default="")


@contextlib.contextmanager
def compiling_for(shape: str) -> Iterator[None]:
    """Name the shape, such as "480×832×81", that graphs which are compiled meanwhile are for."""
    token = _shape.set(shape)
    try:
        yield
    finally:
        _shape.reset(token)


def graph_title(name: str) -> str:
    """The graph's name with the shape that it is compiled for, where that is known."""
    shape = _shape.get()
    return f"{name} ({shape})" if shape else name
