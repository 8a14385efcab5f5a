# SPDX-License-Identifier: Apache-2.0
"""Lowering without weights and without ranks: a component of fake tensors, in a world that is only declared."""

from __future__ import annotations

import contextlib
import math
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from omni_neuron_runtime.compile.artifacts import content_key
from omni_neuron_runtime.compile.backend import BackendOptions, compile_captured
from omni_neuron_runtime.compile.errors import compile_errors
from omni_neuron_runtime.compile.graph_checks import operation
from omni_neuron_runtime.compile.lowering import ImportedGraph, import_graph, lower
from omni_neuron_runtime.compile.stablehlo_backend import artifact_facts


@dataclass(frozen=True)
class LoweredGraph:
    """One graph of a component.

    Attributes:
        text: the StableHLO.
        key: of the artifact cache, were it compiled with the same options.
        report: JSON-ready: operations, collectives, FLOPs, sizes, seconds and this process's peak memory.
    """

    text: str
    key: str
    report: dict[str, Any]


@contextlib.contextmanager
def declared_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """A world of `torch.distributed` whose other ranks do not exist: groups can be made, collectives only traced."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def lower_on_paper(
    make: Callable[[], tuple[torch.nn.Module, dict[str, Any]]],
    name: str,
    compiler_args: Sequence[str] = (),
) -> list[LoweredGraph]:
    """Capture and lower a component as `neuron_stablehlo` would, without computing anything.

    Args:
        make: the component and the keyword arguments of its call; called where every new tensor is a fake one.
        name: of the component, for messages and keys.
        compiler_args: part of the key.

    Returns:
        The graphs, in the order in which the call needs them.

    Raises:
        CompileError: the component cannot be lowered.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    graphs: list[LoweredGraph] = []
    options = BackendOptions(name, tuple(compiler_args))
    clock = time.perf_counter()

    def backend(graph: fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        def lower_only(
            lowered: fx.GraphModule, title: str, inputs: Sequence[torch.Tensor]
        ) -> Callable[[list[torch.Tensor]], Sequence[Any]]:
            captured = time.perf_counter()
            imported = import_graph(lowered, title)
            text = lower(imported.text, title)
            facts = artifact_facts(imported, options)
            report = {
                **graph_report(lowered, imported),
                "stablehlo_bytes": len(text),
                "stablehlo_operations": text.count(" = "),
                "capture_seconds": round(captured - clock, 2),
                "lowering_seconds": round(time.perf_counter() - captured, 2),
                "peak_memory_bytes": peak_memory_bytes(),
            }
            graphs.append(LoweredGraph(text, content_key(text, facts), {**report, "facts": facts}))
            return lambda tensors: lowered.forward(*tensors)

        return compile_captured(graph, example_inputs, name, lower_only)

    torch._dynamo.reset()
    with FakeTensorMode(), torch.no_grad(), compile_errors(name):
        module, arguments = make()
        torch.compile(module, backend=backend, fullgraph=True, dynamic=False)(**arguments)
    return graphs


def graph_report(graph: fx.GraphModule, imported: ImportedGraph) -> dict[str, Any]:
    """What a checked graph holds, JSON-ready.

    Returns:
        `operations`, `collectives`, `composites`, and of one rank `input_bytes` and `flops`. A kernel op has the FLOPs
        of its torch reference.
    """
    counts = Counter(called for node in graph.graph.nodes if (called := operation(node)))
    values = (node.meta.get("val") for node in graph.graph.nodes if node.op == "placeholder")
    grouped, composites = Counter(imported.collectives), Counter(imported.composites)
    inside = sum(count * count_flops(composite.decomposition) for composite, count in composites.items())
    return {
        "operations": dict(counts.most_common()),
        "collectives": [
            {
                "operation": collective.operation,
                "reduction": collective.reduction,
                "count": count,
                "bytes_each": collective.input_bytes,
                "groups": [list(group) for group in collective.groups],
            }
            for collective, count in grouped.most_common()
        ],
        "composites": [
            {
                "name": composite.name,
                "kernel_version": composite.version,
                "count": count,
                "operands": dict(composite.operands),
                "results": list(composite.results),
                "attributes": {
                    name: str(value) if isinstance(value, torch.dtype) else value
                    for name, value in composite.attributes
                },
            }
            for composite, count in composites.most_common()
        ],
        "collective_bytes": sum(collective.input_bytes for collective in imported.collectives),
        "input_bytes": sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor)),
        "flops": count_flops(graph) + inside,
    }


def count_flops(graph: fx.GraphModule) -> int:
    """FLOPs of the matrix products and convolutions in a graph of ATen operations, by torch's formulas."""
    from torch.utils.flop_counter import flop_registry

    flops = 0
    for node in graph.graph.nodes:
        formula = flop_registry.get(node.target.overloadpacket) if operation(node) else None
        if formula is not None:
            arguments, keywords = fx.node.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
            flops += int(formula(*arguments, **keywords, out_val=node.meta["val"]))
    return flops


def peak_memory_bytes() -> int:
    """The larger of the peaks of this process and of its largest child, which lowers."""
    usages = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return math.ceil(max(usages)) * 1024
