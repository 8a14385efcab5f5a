# SPDX-License-Identifier: Apache-2.0
"""The engine calls of `generate` and of the examples: everything that needs vLLM-Omni, behind one function."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What a request may set, by the name that vLLM-Omni's sampling parameters (or their `extra_args`) have for it.
SAMPLING_FIELDS = (
    "height",
    "width",
    "num_frames",
    "num_inference_steps",
    "guidance_scale",
    "guidance_scale_2",
    "boundary_ratio",
    "num_outputs_per_prompt",
    "fps",
)
EXTRA_FIELDS = ("flow_shift", "sample_solver", "image_policy")
LAYOUT_FIELDS = ("tensor_parallel_size", "ring_degree", "cfg_parallel_size", "vae_patch_parallel_size")
# vLLM-Omni's, of the whole and of a stage; here there is one stage.
_START_LIMITS = ("init_timeout", "stage_init_timeout")
# Values by which vLLM-Omni's sampling parameters say that nothing was given.
_NOT_GIVEN = {"num_frames": 1, "num_outputs_per_prompt": 1}


@dataclass(frozen=True)
class GenerateOptions:
    """A prompt and what the user asked for; None leaves a setting to the configuration file, then to the model."""

    model: str
    prompt: str
    seed: int
    seed_is_random: bool
    negative_prompt: str | None = None
    image: Path | None = None
    last_image: Path | None = None
    image_policy: str | None = None
    lora: Path | None = None
    lora_scale: float | None = None
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    num_outputs_per_prompt: int | None = None
    fps: float | None = None
    flow_shift: float | None = None
    boundary_ratio: float | None = None
    sample_solver: str | None = None
    tensor_parallel_size: int | None = None
    ring_degree: int | None = None
    cfg_parallel_size: int | None = None
    vae_patch_parallel_size: int | None = None
    dtype: str | None = None
    vae_use_tiling: bool | None = None
    enable_cpu_offload: bool | None = None
    quantization: str | None = None
    comfyui_fp8_model_path: str | None = None
    modules_to_not_convert: tuple[str, ...] | None = None
    cache_backend: str | None = None
    cache_config: Mapping[str, Any] | None = None
    deploy_config: Path | None = None
    init_timeout: int | None = None


@dataclass(frozen=True)
class Run:
    """One generation: vLLM-Omni's output of the request, and wall-clock seconds."""

    output: Any
    seconds: float


@dataclass(frozen=True)
class GenerationResult:
    """What an engine did for a request.

    Attributes:
        runs: the generations; more than one where they were timed.
        sampling: what was asked of the pipeline.
        configured: the settings that came from the configuration file's sampling parameters.
        start_seconds: from the import of vLLM-Omni until the engine took requests.
        warm_up: the generation before the timed ones; None where nothing was timed.
    """

    runs: tuple[Run, ...]
    sampling: Any
    configured: frozenset[str]
    start_seconds: float
    warm_up: Run | None = None


def run_engine(
    request: GenerateOptions, phase: Callable[[str], None], profile_runs: int | None = None
) -> GenerationResult:
    """Start an engine, generate, and stop the engine.

    Args:
        request: What to generate.
        phase: Called with the name of each phase as it begins.
        profile_runs: Generate once to warm up and then this often, with every step measured. None: generate once.

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
        defaults = omni.default_sampling_params_list[0]
        sampling = apply_request(defaults, request)
        if request.lora is not None:
            add_lora(sampling, request.lora, request.lora_scale)
        if profile_runs is not None:
            sampling.extra_args["profile"] = True
        prompt = engine_prompt(request)
        ready = time.perf_counter()

        def run(name: str) -> Run:
            phase(name)
            begun = time.perf_counter()
            [output] = omni.generate(dict(prompt), copy.deepcopy(sampling), use_tqdm=False)
            return Run(output, time.perf_counter() - begun)

        warm_up = None if profile_runs is None else run("warming up")
        runs = [
            run("encoding the prompt" if profile_runs is None else f"timing generation {number + 1} of {profile_runs}")
            for number in range(profile_runs or 1)
        ]
        phase("stopping the engine")
    finally:
        omni.close()
    return GenerationResult(tuple(runs), sampling, configured_settings(defaults), ready - started, warm_up)


def engine_arguments(request: GenerateOptions) -> dict[str, Any]:
    """Keyword arguments of `Omni` beside the model.

    With a configuration file all but the limits of the start are in that file already, see `with_engine_settings`.
    """
    limits = dict.fromkeys(() if request.init_timeout is None else _START_LIMITS, request.init_timeout)
    if request.deploy_config is not None:
        return {"deploy_config": str(request.deploy_config), **limits}
    arguments: dict[str, Any] = {name: getattr(request, name) for name in LAYOUT_FIELDS} | limits
    # vLLM-Omni hands this one on for architectures that it knows itself, and drops `model_config`.
    arguments |= {**_engine_settings(request), "additional_config": _model_settings(request) or None}
    return {name: value for name, value in arguments.items() if value is not None}


def with_engine_settings(deploy: Mapping[str, Any], request: GenerateOptions) -> dict[str, Any]:
    """A deploy configuration with the request's engine settings on top.

    Raises:
        ValueError: there is not one stage to put them into.
    """
    settings, model_settings = _engine_settings(request), _model_settings(request)
    dtype = settings.pop("dtype", None)
    if not settings and not model_settings and dtype is None:
        return dict(deploy)
    stages = deploy.get("stages")
    if not isinstance(stages, list) or len(stages) != 1 or not isinstance(stages[0], Mapping):
        names = ", ".join([*settings, *model_settings, *(["dtype"] if dtype is not None else [])])
        raise ValueError(f"{names}: the file has not one stage to apply them to; write them into it")
    stage = {**stages[0], **settings}
    if model_settings:
        stage["model_config"] = {**stage.get("model_config", {}), **model_settings}
    return {**deploy, **({} if dtype is None else {"dtype": dtype}), "stages": [stage]}


def _engine_settings(request: GenerateOptions) -> dict[str, Any]:
    cache = ("cache_backend", "cache_config")
    names = ("dtype", "flow_shift", "boundary_ratio", "vae_use_tiling", "enable_cpu_offload", *cache)
    return {name: value for name in names if (value := getattr(request, name)) is not None}


def _model_settings(request: GenerateOptions) -> dict[str, Any]:
    """What the model package reads itself; vLLM-Omni's own `quantization` takes only methods of its registry."""
    settings = {name: getattr(request, name) for name in ("quantization", "comfyui_fp8_model_path")}
    if request.modules_to_not_convert is not None:
        settings["modules_to_not_convert"] = list(request.modules_to_not_convert)
    return {name: value for name, value in settings.items() if value is not None}


def engine_prompt(request: GenerateOptions) -> dict[str, Any]:
    """The prompt in the form that `Omni.generate` and the online endpoint use, images included.

    Raises:
        OSError: an image cannot be read.
    """
    prompt: dict[str, Any] = {"prompt": request.prompt, "modalities": ["video"]}
    if request.negative_prompt is not None:
        prompt["negative_prompt"] = request.negative_prompt
    images = {"image": request.image, "last_image": request.last_image}
    media = {name: _read_image(path) for name, path in images.items() if path is not None}
    if media:
        prompt["multi_modal_data"] = media
    return prompt


def _read_image(path: Path) -> Any:
    from PIL import Image, ImageOps

    with Image.open(path) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def apply_request(defaults: Any, request: GenerateOptions) -> Any:
    """A copy of the configuration's sampling parameters, with what the request says on top.

    The keys are those the online endpoint sets, so that offline and online requests reach the pipeline alike.
    """
    sampling = copy.deepcopy(defaults)
    for name in SAMPLING_FIELDS:
        if (value := getattr(request, name)) is not None:
            setattr(sampling, name, value)
    if request.fps is not None:
        sampling.frame_rate = request.fps
    # The number of frames a second time: vLLM-Omni's own field cannot tell one frame from "not given".
    for name in (*EXTRA_FIELDS, "num_frames"):
        if (value := getattr(request, name)) is not None:
            sampling.extra_args[name] = value
    if not request.seed_is_random or sampling.seed is None:
        sampling.seed = request.seed
    return sampling


def add_lora(sampling: Any, path: Path, scale: float | None) -> None:
    """Let sampling parameters name the adapter at `path`, as vLLM-Omni's online endpoint does."""
    from vllm_omni.lora.request import LoRARequest
    from vllm_omni.lora.utils import stable_lora_int_id

    absolute = str(path.resolve())  # workers may have another current folder
    sampling.lora_request = LoRARequest(path.stem, stable_lora_int_id(absolute), absolute)
    if scale is not None:
        sampling.lora_scale = scale


def configured_settings(defaults: Any) -> frozenset[str]:
    """The settings that the configuration's sampling parameters hold."""
    fields = {name for name in SAMPLING_FIELDS if getattr(defaults, name, None) not in (None, _NOT_GIVEN.get(name))}
    extra = {name for name in (*EXTRA_FIELDS, "num_frames") if defaults.extra_args.get(name) is not None}
    return frozenset(fields | extra)
