# SPDX-License-Identifier: Apache-2.0
"""What both backends share: AOTAutograd with the decompositions, options, counting and progress."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from omni_neuron_runtime.compile.counters import COUNTERS
from omni_neuron_runtime.compile.decompositions import decompositions
from omni_neuron_runtime.compile.errors import CompileError
from omni_neuron_runtime.compile.graph_checks import check_captured, check_graph
from omni_neuron_runtime.compile.kernel_ops import reference_decompositions
from omni_neuron_runtime.compile.progress import graph_title

logger = logging.getLogger(__name__)

_GRAPHS_OF_ONE_FUNCTION = 64


@dataclass(frozen=True)
class BackendOptions:
    """`compile_options`, as a backend reads them.

    Attributes:
        model_name: of the component.
        compiler_args: of neuronx-cc.
        compiler_workdir: the artifact cache; None for the one of the environment.
    """

    model_name: str = "graph"
    compiler_args: tuple[str, ...] = ()
    compiler_workdir: str | None = None

    @classmethod
    def read(cls, options: Mapping[str, Any] | None) -> BackendOptions:
        """From `torch.compile(options=…)`.

        Raises:
            CompileError: an unknown option.
        """
        given = dict(options or {})
        unknown = set(given) - {"model_name", "compiler_args", "compiler_workdir"}
        if unknown:
            raise CompileError(
                f"options {sorted(unknown)} mean nothing to this backend; make them with "
                f"omni_neuron_runtime.compile_options(model_name, compiler_args, compiler_workdir)"
            )
        return cls(
            given.get("model_name", "graph"), tuple(given.get("compiler_args", ())), given.get("compiler_workdir")
        )


# Of a checked graph, its name and its inputs: what runs it.
Compiler = Callable[[fx.GraphModule, str, Sequence[torch.Tensor]], Callable[[list[torch.Tensor]], Sequence[Any]]]


def compile_captured(
    graph: fx.GraphModule, example_inputs: Sequence[torch.Tensor], model_name: str, compiler: Compiler
) -> Callable[..., Any]:
    """Turn a graph that Dynamo captured into ATen operations, check it, and let `compiler` make what runs it.

    Raises:
        CompileError: the graph cannot be lowered for Neuron, or needs gradients.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func

    title = graph_title(model_name)
    check_captured(graph, title)
    # Torch stops at 8 graphs of one function: two experts share theirs, and every shape is a graph.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS_OF_ONE_FUNCTION)

    def forward(lowered: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
        logger.info("compiling %s …", title)
        started = time.perf_counter()
        COUNTERS.graphs += 1
        check_graph(lowered, title)
        run = compiler(lowered, title, inputs)
        seconds = time.perf_counter() - started
        COUNTERS.seconds += seconds
        logger.info("compiled %s in %.1f s", title, seconds)
        return make_boxed_func(lambda *tensors: run(list(tensors)))

    def backward(lowered: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
        raise CompileError(
            f"{title} needs gradients, and only inference is compiled: call it under torch.inference_mode() or "
            f"torch.no_grad()"
        )

    return aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=forward,
        decompositions={**decompositions(), **reference_decompositions()},
    )(graph, example_inputs)
