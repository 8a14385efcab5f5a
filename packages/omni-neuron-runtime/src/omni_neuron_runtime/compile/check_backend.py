# SPDX-License-Identifier: Apache-2.0
"""The backend `neuron_check`: says whether Neuron could take a graph, and runs it in torch. Needs torch only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from omni_neuron_runtime.compile.backend import BackendOptions, compile_captured


def neuron_check(
    graph: fx.GraphModule,
    example_inputs: Sequence[torch.Tensor],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Check a captured graph (`check_graph`) and run its decomposed form.

    Args:
        graph: of Dynamo, with `fullgraph=True, dynamic=False`.
        example_inputs: its inputs.
        options: of `compile_options`.
        mode: not used; `torch.compile` passes it where its caller does.

    Raises:
        CompileError: the graph cannot be lowered for Neuron.
    """
    name = BackendOptions.read(options).model_name

    def run_in_torch(
        lowered: fx.GraphModule, title: str, inputs: Sequence[torch.Tensor]
    ) -> Callable[[list[torch.Tensor]], Sequence[Any]]:
        return lambda tensors: lowered.forward(*tensors)

    return compile_captured(graph, example_inputs, name, run_in_torch)
