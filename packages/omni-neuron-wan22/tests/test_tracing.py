# SPDX-License-Identifier: Apache-2.0
"""What the graphs of a request hold. The conformance kit counts them and compares what they compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from wan22_reference import make_pipeline

SETTINGS = {"height": 32, "width": 48, "num_frames": 9, "num_inference_steps": 4, "max_sequence_length": 16}


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU mode, while nothing is compiled, folds a prompt's padding, which makes its length a shape."""
    monkeypatch.setattr("omni_neuron_wan22.pipeline.is_cpu_mode", lambda: False)


@pytest.fixture
def graphs() -> list[torch.fx.GraphModule]:
    torch._dynamo.reset()
    return []


@pytest.fixture
def backend(graphs: list[torch.fx.GraphModule]) -> Callable[..., Any]:
    """A backend that runs a graph as it is and remembers it."""

    def run_as_is(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    return run_as_is


def generate(pipeline: Any, prompt: str = "a cat") -> torch.Tensor:
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    request = pipeline.resolve(prompt, OmniDiffusionSamplingParams(seed=1, **SETTINGS))
    return pipeline.decode(pipeline.diffuse(pipeline.prepare_latents(request), pipeline.encode(request)))


def test_no_graph_reads_the_cpu(tiny: Path, graphs: list[torch.fx.GraphModule], backend: Callable[..., Any]) -> None:
    """A tensor that a graph makes on the CPU would be a copy to the device on every call."""
    pipeline = make_pipeline(str(tiny), torch.float32)
    pipeline.compile(backend=backend)
    generate(pipeline)
    code = "\n".join(graph.code for graph in graphs)
    assert ".to('cpu')" not in code
    assert ".cpu()" not in code
    assert ".item()" not in code
