# SPDX-License-Identifier: Apache-2.0
"""What vLLM-Omni's engine configuration means for Wan2.2, and what of it cannot run: said before a worker starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import torch
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.lora.manager import LoRABackend
from vllm_omni.errors import OmniClientError

from omni_neuron_parallel import ContextMethod, Topology, check_cfg_parallel_size
from omni_neuron_wan22.cache_settings import CACHE_BACKENDS, check_cache_config
from omni_neuron_wan22.checkpoint import Task, WanCheckpoint
from omni_neuron_wan22.config import WanConfigError
from omni_neuron_wan22.fp8_settings import METHOD, Fp8Settings
from omni_neuron_wan22.lora_adapter import LoraError, read_adapter
from omni_neuron_wan22.request import (
    I2V_DEFAULTS,
    IMAGE_POLICIES,
    TI2V_DEFAULTS,
    EngineDefaults,
    GenerationRequest,
    ImageUse,
    ModelDefaults,
    RequestError,
)
from vllm_omni_neuron import model_settings

IMAGE_TO_VIDEO = "WanImageToVideoPipeline"
MODEL_DEFAULTS: dict[Task, ModelDefaults] = {"t2v": ModelDefaults(), "i2v": I2V_DEFAULTS, "ti2v": TI2V_DEFAULTS}


class ClientRequestError(OmniClientError, RequestError):
    """A `RequestError` that vLLM-Omni's server answers with status 400 instead of 500."""


def engine_defaults(od_config: OmniDiffusionConfig, checkpoint: WanCheckpoint) -> EngineDefaults:
    """What the engine's configuration and the checkpoint say where a request does not."""
    vae = checkpoint.vae_config
    transformer = checkpoint.transformer_config(checkpoint.experts[0])
    architecture = od_config.model_class_name or checkpoint.index.get("_class_name")
    images: dict[Task, ImageUse] = {
        "t2v": "none",
        "i2v": "required",
        "ti2v": "required" if architecture == IMAGE_TO_VIDEO else "optional",
    }
    # CLIP's embedding of a last frame needs positions that tell it from the first one's.
    with_embeds: ImageUse = "none" if transformer.pos_embed_seq_len is None else "required"
    last_image: ImageUse = "none" if checkpoint.task != "i2v" else "optional"
    return EngineDefaults(
        boundary_ratio=od_config.boundary_ratio,
        flow_shift=od_config.flow_shift,
        checkpoint_boundary_ratio=checkpoint.boundary_ratio,
        image_policy=model_settings(od_config).get("image_policy"),
        model=MODEL_DEFAULTS[checkpoint.task],
        spatial_stride=vae.scale_factor_spatial * transformer.patch_size[1],
        temporal_stride=vae.scale_factor_temporal,
        images=images[checkpoint.task],
        last_image=last_image if transformer.image_dim is None else with_embeds,
    )


def check_engine_config(od_config: OmniDiffusionConfig) -> WanCheckpoint:
    """Refuse an engine configuration that this version cannot run, before any worker starts.

    Raises:
        WanConfigError: an unsupported layout or feature, or a checkpoint that does not fit.
        CheckpointError: damaged weights.
    """
    _check_layout(od_config.parallel_config)
    settings = model_settings(od_config)
    if settings.get("context_method", "auto") not in get_args(ContextMethod):
        raise WanConfigError(
            f"context_method = {settings['context_method']!r}: valid values are {', '.join(get_args(ContextMethod))}"
        )
    if settings.get("image_policy", IMAGE_POLICIES[0]) not in IMAGE_POLICIES:
        raise WanConfigError(
            f"image_policy = {settings['image_policy']!r}: valid values are {', '.join(IMAGE_POLICIES)}"
        )
    if od_config.enable_layerwise_offload:
        raise WanConfigError(
            f"enable_layerwise_offload = {od_config.enable_layerwise_offload!r}: not in this version of "
            "omni-neuron-wan22; leave it unset"
        )
    if od_config.quantization_config:
        raise WanConfigError(
            f"quantization_config = {od_config.quantization_config!r}: vLLM-Omni's methods do not run on Neuron; the "
            f"valid one is {METHOD}, given as `quantization` in a stage YAML or in additional_config"
        )
    if od_config.dtype not in (torch.bfloat16, torch.float32):
        # UMT5's feed-forward overflows float16, and the video would be black.
        raise WanConfigError(f"dtype = {od_config.dtype}: valid values are bfloat16 and float32")
    if od_config.cache_backend not in (None, *CACHE_BACKENDS):
        raise WanConfigError(f"cache_backend = {od_config.cache_backend!r}: valid are {', '.join(CACHE_BACKENDS)}")
    checkpoint = checkpoint_of(od_config)
    if checkpoint.fp8 is not None:
        checkpoint.fp8.check_place(od_config.dtype)
    checkpoint.check(
        tensor_parallel_size=od_config.parallel_config.tensor_parallel_size, boundary_ratio=od_config.boundary_ratio
    )
    if od_config.cache_backend == "cache_dit":
        blocks = min(checkpoint.transformer_config(expert).num_layers for expert in checkpoint.experts)
        check_cache_config(od_config.cache_config, blocks)
    if od_config.lora_path:
        _check_lora(od_config, checkpoint)
    return checkpoint


def _check_lora(od_config: OmniDiffusionConfig, checkpoint: WanCheckpoint) -> None:
    """Refuse adapters that the workers could not load at their start."""
    if od_config.lora_backend != LoRABackend.PEFT:
        raise WanConfigError(
            f"lora_backend = {str(od_config.lora_backend)!r}: the valid one is {LoRABackend.PEFT.value!r}"
        )
    paths = [od_config.lora_path] if isinstance(od_config.lora_path, str) else od_config.lora_path
    if len(paths) > od_config.max_cpu_loras:
        raise WanConfigError(
            f"lora_path names {len(paths)} adapters, and max_cpu_loras = {od_config.max_cpu_loras}; set it to "
            f"{len(paths)} or more"
        )
    for path in paths:
        try:
            read_adapter(path, checkpoint)
        except LoraError as error:
            raise WanConfigError(f"lora_path: {error}") from error


def checkpoint_of(od_config: OmniDiffusionConfig) -> WanCheckpoint:
    """The checkpoint folder, and where FP8 weights of its experts are.

    Raises:
        WanConfigError: settings of FP8 that do not fit each other.
    """
    return WanCheckpoint(Path(str(od_config.model)), Fp8Settings.from_settings(model_settings(od_config)))


def _check_layout(parallel: Any) -> None:
    """Refuse vLLM-Omni's parallel settings that have no meaning here, or that do not fit each other."""
    for name in ("ulysses_degree", "allgather_degree"):
        value = getattr(parallel, name)
        if value != 1:
            raise WanConfigError(
                f"{name} = {value}: on Neuron ring_degree is the size of context parallelism, however keys and values "
                f"travel; use {name} = 1 and ring_degree = {value}"
            )
    if parallel.pipeline_parallel_size != 1:
        raise WanConfigError(
            f"pipeline_parallel_size = {parallel.pipeline_parallel_size}: ranks are laid out over TP × CP × CFG; use 1"
        )
    if parallel.vae_patch_parallel_size > 1 and parallel.vae_parallel_mode != "tile":
        raise WanConfigError(f"vae_parallel_mode = {parallel.vae_parallel_mode!r}: the valid value is 'tile'")
    try:
        check_cfg_parallel_size(parallel.cfg_parallel_size, num_branches=2)
        topology_of(parallel)
    except ValueError as error:
        raise WanConfigError(str(error)) from error


def topology_of(parallel: Any) -> Topology:
    """The layout of vLLM-Omni's parallel configuration; its sequence parallelism is our context parallelism.

    Raises:
        ValueError: sizes that do not fit each other.
    """
    return Topology(
        tp=parallel.tensor_parallel_size,
        cp=parallel.sequence_parallel_size,
        cfg=parallel.cfg_parallel_size,
        vae_patch=parallel.vae_patch_parallel_size,
    )


def check_experts(request: GenerationRequest, checkpoint: WanCheckpoint, engine_boundary: float | None) -> None:
    """Refuse a boundary whose expert the engine has not loaded.

    Raises:
        RequestError: the engine was started for one expert, the request needs the other.
    """
    loaded = checkpoint.experts_in_use(engine_boundary)
    needed = checkpoint.experts_in_use(request.boundary_ratio)
    missing = [expert for expert in needed if expert not in loaded]
    if missing:
        raise RequestError(
            f"boundary_ratio = {request.boundary_ratio} needs {', '.join(missing)}, which the engine did not load "
            f"because it was started with boundary_ratio = {engine_boundary}"
        )


def check_sequence(request: GenerationRequest, checkpoint: WanCheckpoint, topology: Topology) -> None:
    """Refuse a video with fewer tokens than there are ranks to share them.

    Raises:
        RequestError: a context-parallel rank would have nothing to do.
    """
    vae, patch = checkpoint.vae_config, checkpoint.transformer_config(checkpoint.experts[0]).patch_size
    frames = (request.num_frames - 1) // vae.scale_factor_temporal + 1
    rows, columns = (size // vae.scale_factor_spatial for size in (request.height, request.width))
    tokens = (frames // patch[0]) * (rows // patch[1]) * (columns // patch[2])
    try:
        topology.check(num_tokens=tokens)
    except ValueError as error:
        raise RequestError(
            f"height {request.height}, width {request.width} and {request.num_frames} frames: {error}"
        ) from error
