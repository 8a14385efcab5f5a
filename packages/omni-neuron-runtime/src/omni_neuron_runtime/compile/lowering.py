# SPDX-License-Identifier: Apache-2.0
"""From a checked graph to StableHLO: torch-mlir's importer here, its pipelines in a process of their own.

The importer is Python over the graph and takes little. The pipelines have been seen to take all memory of a machine
(`std::bad_alloc` ends a process, and no `except` catches it), so they run in a child with a limit of its address space
and a deadline. The child imports torch-mlir without torch, which takes half a second.
"""

from __future__ import annotations

import operator
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx

from omni_neuron_runtime import env
from omni_neuron_runtime.compile import lower_child
from omni_neuron_runtime.compile.collectives import Collective, take_collectives, write_collectives
from omni_neuron_runtime.compile.composites import Composite, find_composites, raw_text, write_composites
from omni_neuron_runtime.compile.errors import CompileError
from omni_neuron_runtime.compile.graph_checks import operation

_FORBIDDEN_TYPE = re.compile(r"tensor<[\dx]*(f64|complex<\w+>)>")


@dataclass(frozen=True)
class ImportedGraph:
    """A graph as torch-mlir's importer wrote it, with its collectives and calls of kernels in StableHLO.

    Attributes:
        text: the RAW text; decides what is lowered, and is the same on every rank.
        constants: tensors of the graph's own, which the module takes after the graph's inputs.
        collectives: in order.
        composites: the calls of kernel ops, in order.
    """

    text: str
    constants: list[torch.Tensor]
    collectives: list[Collective]
    composites: list[Composite]


def import_graph(graph: fx.GraphModule, name: str) -> ImportedGraph:
    """Import a checked graph.

    Raises:
        CompileError: torch-mlir is not installed, or cannot import the graph.
    """
    try:
        import torch_mlir.fx  # noqa: F401 - `raw_text` needs it
    except ImportError as error:
        raise CompileError(
            f"{name}: neuron_stablehlo needs torch-mlir, which does not import ({error}); uv pip install "
            f"'omni-neuron-runtime[stablehlo]' (Python 3.11), or take neuron_check, which needs torch only"
        ) from error
    plain = fx.GraphModule(graph, fx.Graph())
    plain.graph.output(plain.graph.graph_copy(graph.graph, {}))
    _drop_waits(plain.graph)
    plain.graph.eliminate_dead_code()
    constants = _lift_constants(plain)
    collectives, composites = take_collectives(plain.graph), find_composites(plain.graph, name)
    text = raw_text(plain, "main", f"{name}: torch-mlir cannot import the graph")
    text = write_composites(write_collectives(text, collectives), composites)
    return ImportedGraph(text, constants, collectives, composites)


def lower(text: str, name: str, *, memory_bytes: int | None = None, seconds: float | None = None) -> str:
    """Lower an imported graph to StableHLO.

    Args:
        text: of `ImportedGraph`.
        name: for messages.
        memory_bytes: limit of the address space; None for OMNI_NEURON_COMPILE_MEMORY_GB.
        seconds: deadline; None for OMNI_NEURON_COMPILE_TIMEOUT_S.

    Raises:
        CompileError: it failed, took too much memory or time, or left float64 or complex tensors.
    """
    limit = env.get("OMNI_NEURON_COMPILE_MEMORY_GB") * 2**30 if memory_bytes is None else memory_bytes
    deadline = env.get("OMNI_NEURON_COMPILE_TIMEOUT_S") if seconds is None else seconds
    with tempfile.TemporaryDirectory(prefix="omni-neuron-lower-") as folder:
        source, target = Path(folder) / "raw.mlir", Path(folder) / "stablehlo.mlir"
        source.write_text(text)
        command = [sys.executable, lower_child.__file__, str(source), str(target), str(limit)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=deadline)
        except subprocess.TimeoutExpired:
            raise CompileError(
                f"{name}: the lowering took more than {deadline:.0f} s (OMNI_NEURON_COMPILE_TIMEOUT_S)"
            ) from None
        if done.returncode != 0 or not target.exists():
            raise CompileError(_failure(name, done, limit, text))
        stablehlo = target.read_text()
    found = _FORBIDDEN_TYPE.search(stablehlo)
    if found is not None:
        line = next(line for line in stablehlo.splitlines() if found[0] in line)
        raise CompileError(
            f"{name}: the lowering left a {found[1]} tensor, which Neuron does not have: {line.strip()[:300]}"
        )
    return stablehlo


def _failure(name: str, done: subprocess.CompletedProcess[str], limit: int, text: str) -> str:
    said = done.stderr.strip()
    killed = -done.returncode if done.returncode < 0 else 0
    starved = any(word in said for word in ("bad_alloc", "MemoryError", "memory", "failed to map segment"))
    if starved or killed in (signal.SIGKILL, signal.SIGABRT):
        return (
            f"{name}: the lowering took more than {limit / 2**30:.1f} GiB of address space "
            f"(OMNI_NEURON_COMPILE_MEMORY_GB) and was ended; give it more, or look for an operation that torch-mlir "
            f"expands without end, such as a strided slice assignment"
        )
    errors = [line for line in said.splitlines() if "error:" in line]
    place = re.search(r"[:\"](\d+):\d+", errors[0]) if errors else None
    lines = text.splitlines()
    at = f"; at {lines[int(place[1]) - 1].strip()[:300]}" if place and int(place[1]) <= len(lines) else ""
    ended = f"signal {killed}" if killed else f"exit code {done.returncode}"
    return f"{name}: torch-mlir could not lower the graph ({ended}): {errors[0].strip() if errors else said[-500:]}{at}"


def _drop_waits(graph: fx.Graph) -> None:
    """StableHLO's collectives are synchronous."""
    for node in list(graph.nodes):
        if operation(node) == "_c10d_functional.wait_tensor":
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _lift_constants(module: fx.GraphModule) -> list[torch.Tensor]:
    """Turn the tensors that the graph holds into inputs after its own; they would be literals in the module."""
    constants: list[torch.Tensor] = []
    last = None
    for node in module.graph.nodes:
        if node.op == "placeholder":
            last = node
    for node in list(module.graph.nodes):
        if node.op != "get_attr":
            continue
        value = operator.attrgetter(str(node.target))(module)
        with module.graph.inserting_after(last) if last is not None else module.graph.inserting_before():
            lifted = module.graph.placeholder(f"constant_{len(constants)}")
        lifted.meta.update(node.meta)
        lifted.meta.setdefault("val", value)
        node.replace_all_uses_with(lifted)
        module.graph.erase_node(node)
        constants.append(value)
        last = lifted
    return constants
