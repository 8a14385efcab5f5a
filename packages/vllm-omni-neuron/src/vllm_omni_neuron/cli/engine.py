# SPDX-License-Identifier: Apache-2.0
"""The engine call of `generate`: everything that needs vLLM-Omni, behind one function."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt and what the user asked for; None leaves a setting to the configuration file, then to the model."""

    model: str
    prompt: str
    seed: int
    seed_is_random: bool
    negative_prompt: str | None = None
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    fps: float | None = None
    flow_shift: float | None = None
    boundary_ratio: float | None = None
    sample_solver: str | None = None
    tensor_parallel_size: int | None = None
    dtype: str | None = None
    deploy_config: Path | None = None


@dataclass(frozen=True)
class GenerationResult:
    """The request's output, what was asked of the pipeline, and wall-clock seconds."""

    output: Any
    sampling: Any
    start_seconds: float
    generate_seconds: float


def run_engine(request: GenerationRequest, phase: Callable[[str], None]) -> GenerationResult:
    """Start an engine, generate one video, and stop the engine.

    Args:
        request: What to generate.
        phase: Called with the name of each phase as it begins.

    Raises:
        Exception: Whatever vLLM-Omni raises; the engine is stopped first.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    started = time.perf_counter()
    phase("loading vLLM-Omni")
    from vllm_omni.entrypoints.omni import Omni

    phase("starting the engine")
    omni = Omni(model=request.model, **engine_arguments(request))
    try:
        sampling = apply_request(omni.default_sampling_params_list[0], request)
        ready = time.perf_counter()
        phase("encoding the prompt")
        [output] = omni.generate(engine_prompt(request), sampling, use_tqdm=False)
        done = time.perf_counter()
        phase("stopping the engine")
    finally:
        omni.close()
    return GenerationResult(output, sampling, ready - started, done - ready)


def engine_arguments(request: GenerationRequest) -> dict[str, Any]:
    """Keyword arguments of `Omni` beside the model."""
    arguments = {
        "tensor_parallel_size": request.tensor_parallel_size,
        "dtype": request.dtype,
        "flow_shift": request.flow_shift,
        "boundary_ratio": request.boundary_ratio,
        "deploy_config": None if request.deploy_config is None else str(request.deploy_config),
    }
    return {name: value for name, value in arguments.items() if value is not None}


def engine_prompt(request: GenerationRequest) -> dict[str, Any]:
    """The prompt in the form that `Omni.generate` and the online endpoint use."""
    prompt: dict[str, Any] = {"prompt": request.prompt, "modalities": ["video"]}
    if request.negative_prompt is not None:
        prompt["negative_prompt"] = request.negative_prompt
    return prompt


def apply_request(defaults: Any, request: GenerationRequest) -> Any:
    """A copy of the configuration's sampling parameters, with what the request says on top.

    The keys are those the online endpoint sets, so that offline and online requests reach the pipeline alike.
    """
    sampling = copy.deepcopy(defaults)
    for name in ("height", "width", "num_frames", "num_inference_steps", "guidance_scale", "guidance_scale_2", "fps"):
        if (value := getattr(request, name)) is not None:
            setattr(sampling, name, value)
    if request.fps is not None:
        sampling.frame_rate = request.fps
    if request.boundary_ratio is not None:
        sampling.boundary_ratio = request.boundary_ratio
    # The number of frames a second time: vLLM-Omni's own field cannot tell one frame from "not given".
    for name in ("flow_shift", "sample_solver", "num_frames"):
        if (value := getattr(request, name)) is not None:
            sampling.extra_args[name] = value
    if not request.seed_is_random or sampling.seed is None:
        sampling.seed = request.seed
    return sampling
