# SPDX-License-Identifier: Apache-2.0
"""What makes a new graph, and what does not; counted with `neuron_check`, which needs torch only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from wan22_reference import make_pipeline

from omni_neuron_runtime import COUNTERS

SETTINGS = {"height": 32, "width": 48, "num_frames": 9, "num_inference_steps": 4, "max_sequence_length": 16}


@torch.inference_mode()
def graphs_of(pipeline: Any, prompt: str = "a cat", **changes: Any) -> int:
    """Generate; the number of graphs that were compiled for it."""
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    before = COUNTERS.graphs
    parameters = OmniDiffusionSamplingParams(**{"seed": 1, **SETTINGS, **changes})
    request = pipeline.resolve(prompt, parameters)
    trajectory = pipeline.encode(request)
    for number in range(request.num_outputs_per_prompt):
        assert pipeline.generate(pipeline.prepare_latents(request, number=number), trajectory) is not None
    return COUNTERS.graphs - before


def test_recompilation(tiny: Path) -> None:
    torch._dynamo.reset()
    pipeline = make_pipeline(str(tiny), torch.float32)
    pipeline.compile(backend="neuron_check")
    # Text encoder; each expert's projection of the text and forward; the decoder's first chunk and later ones.
    assert graphs_of(pipeline) == 7
    for changes in (
        {"seed": 2},
        {"guidance_scale": 3.0},
        {"guidance_scale_2": 1.0},
        {"num_inference_steps": 6},
        {"guidance_scale": 1.0},
        {"boundary_ratio": 0.5},
        {"extra_args": {"flow_shift": 12.0}},
        {"extra_args": {"sample_solver": "euler"}},
        {"num_outputs_per_prompt": 2},
    ):
        assert graphs_of(pipeline, **changes) == 0, changes
    assert graphs_of(pipeline, "a longer prompt, with more words than the first one") == 0
    # Height and width are in the experts' and the decoder's graphs, the number of frames in the experts'.
    assert graphs_of(pipeline, height=48) == 4
    assert graphs_of(pipeline, width=64) == 4
    assert graphs_of(pipeline, num_frames=13) == 2
    # The text's length is in the text encoder's and all of the experts'.
    assert graphs_of(pipeline, max_sequence_length=24) == 5
    # And all of them are still there.
    for changes in ({}, {"height": 48}, {"width": 64}, {"num_frames": 13}, {"max_sequence_length": 24}):
        assert graphs_of(pipeline, **changes) == 0


def test_another_dtype_is_another_graph(tiny: Path) -> None:
    torch._dynamo.reset()
    for dtype in (torch.float32, torch.bfloat16):
        pipeline = make_pipeline(str(tiny), dtype)
        pipeline.compile(backend="neuron_check")
        assert graphs_of(pipeline) == 7
