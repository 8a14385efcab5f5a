# SPDX-License-Identifier: Apache-2.0
"""The backend `neuron_stablehlo`: the graph as StableHLO, as a device would get it, executed on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch
from torch import fx

from omni_neuron_runtime import env
from omni_neuron_runtime.compile import pjrt
from omni_neuron_runtime.compile.artifacts import ArtifactCache, content_key
from omni_neuron_runtime.compile.backend import BackendOptions, compile_captured
from omni_neuron_runtime.compile.lowering import ImportedGraph, import_graph, lower

logger = logging.getLogger(__name__)


def neuron_stablehlo(
    graph: fx.GraphModule,
    example_inputs: Sequence[torch.Tensor],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Lower a captured graph to StableHLO and execute that with XLA's CPU compiler, through the artifact cache.

    A graph with collectives runs on every rank of `torch.distributed` at once.

    Args:
        graph: of Dynamo, with `fullgraph=True, dynamic=False`.
        example_inputs: its inputs.
        options: of `compile_options`.
        mode: not used; `torch.compile` passes it where its caller does.

    Raises:
        CompileError: the graph cannot be lowered, or the extra `[stablehlo]` is not installed.
    """
    chosen = BackendOptions.read(options)
    cache = ArtifactCache.from_environment(chosen.compiler_workdir)

    def compile_(
        lowered: fx.GraphModule, title: str, inputs: Sequence[torch.Tensor]
    ) -> Callable[[list[torch.Tensor]], Sequence[Any]]:
        pjrt.check_installed(title)
        imported = import_graph(lowered, title)
        facts = artifact_facts(imported, chosen)
        key = content_key(imported.text, facts)
        artifact = cache.module(title, key, facts, lambda: lower(imported.text, title))
        spans_world = bool(imported.collectives)
        pjrt.prepare(spans_world)
        serialized = cache.executable(
            artifact, pjrt.fingerprint(spans_world), lambda: pjrt.compile_module(artifact.text, title, spans_world)
        )
        execute = pjrt.load_executable(serialized, spans_world)
        return lambda tensors: execute([*tensors, *imported.constants])

    return compile_captured(graph, example_inputs, chosen.model_name, compile_)


def artifact_facts(imported: ImportedGraph, options: BackendOptions) -> dict[str, Any]:
    """What decides, besides a module's text, what a compiler makes of it; the same on every rank.

    Not the component's name: two experts are one module. The topology is in the replica groups, which are in the text
    too; here it tells two worlds apart that have none.
    """
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return {
        "compiler_args": sorted(options.compiler_args),
        "target": env.get("NEURON_PLATFORM_TARGET_OVERRIDE") or "cpu",
        "world_size": world,
        "groups": sorted({repr(collective.groups) for collective in imported.collectives}),
        "versions": {name: metadata.version(name) for name in ("torch", "torch-mlir")},
    }
