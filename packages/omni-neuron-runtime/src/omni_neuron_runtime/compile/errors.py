# SPDX-License-Identifier: Apache-2.0
"""What a compilation says when it fails: the graph, the node, its source line, and what to do."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch
from torch import fx

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)\n(?P<code>.*)')

DATA_DEPENDENT_SHAPE = "its shape depends on data: use torch.where or a mask of fixed shape"


class CompileError(RuntimeError):
    """A graph cannot be compiled; the message names graph, node, source line and advice."""


def source_line(node: fx.Node) -> str:
    """Where the model's code made `node`: file, line, function and the line itself; empty where torch lost it."""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    if not frames:
        return ""
    frame = frames[-1]
    return f"{frame['file']}:{frame['line']} in {frame['function'].strip()}: {frame['code'].strip()}"


def node_error(graph: str, node: fx.Node, problem: str, advice: str) -> CompileError:
    """A `CompileError` about one node of a graph.

    Args:
        graph: the graph's name.
        node: the node that cannot be compiled.
        problem: what is wrong with it.
        advice: what to write instead.
    """
    where = source_line(node)
    return CompileError(
        f"{graph}: node {node.name} ({node.target}) {problem}; {advice}" + (f". It comes from {where}" if where else "")
    )


@contextlib.contextmanager
def compile_errors(what: str) -> Iterator[None]:
    """Turn what torch raises while it compiles into `CompileError`, without torch's wrapping around it.

    Args:
        what: what runs, for the message of a graph break.
    """
    try:
        yield
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if isinstance(error.inner_exception, CompileError):
            raise error.inner_exception from None
        raise
    except torch._dynamo.exc.Unsupported as error:
        advice = (
            # How torch before 2.10 ends the trace; later ones leave the node for the backend to refuse.
            DATA_DEPENDENT_SHAPE
            if "Dynamic shape operator" in str(error)
            else "move what cannot be traced (prints, .item(), data-dependent branches, host arithmetic) out of the "
            "component's forward"
        )
        raise CompileError(
            f"{what} is not one full graph: {error}\nEvery component is compiled with fullgraph=True, because a break "
            f"would move data between host and device; {advice}"
        ) from error
