# SPDX-License-Identifier: Apache-2.0
"""A denoising run with FP8 weights, on every rank. Importable by spawned processes."""

from __future__ import annotations

from typing import Any

import torch
from vllm_omni.inputs.data import OmniDiffusionSamplingParams
from wan22_reference import PROMPT, make_pipeline

SETTINGS = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 10, "seed": 7, "max_sequence_length": 64}


def run_trajectory(
    path: str, dtype: torch.dtype, quantization: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, Any] | None]:
    """Final latents of a guided run through both experts, and what became of the FP8 weights."""
    pipeline = make_pipeline(path, dtype, additional_config=quantization)
    parameters = OmniDiffusionSamplingParams(guidance_scale=4.0, guidance_scale_provided=True, **SETTINGS)
    request = pipeline.resolve({"prompt": PROMPT, "negative_prompt": "dark"}, parameters)
    trajectory = pipeline.encode(request)
    return pipeline.diffuse(pipeline.prepare_latents(request), trajectory), pipeline.quantization
