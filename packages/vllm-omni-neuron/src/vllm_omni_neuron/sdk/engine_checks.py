# SPDX-License-Identifier: Apache-2.0
"""What of vLLM-Omni's engine configuration a model cannot run, by its `ModelSpec`: said before a worker starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import torch
from vllm_omni.diffusion.lora.manager import LoRABackend

import omni_neuron_runtime as runtime
from omni_neuron_parallel import Axis, ContextMethod, Topology, check_cfg_parallel_size, place_on_fabric
from vllm_omni_neuron.sdk.config import ModelConfigError
from vllm_omni_neuron.sdk.engine_hooks import EngineHooks
from vllm_omni_neuron.sdk.request import IMAGE_POLICIES
from vllm_omni_neuron.sdk.spec import Feature, ModelSpec
from vllm_omni_neuron.settings import model_settings

# By axis of a spec: the option of vLLM-Omni's parallel configuration. `sp` is a setting of the model's.
_AXIS_OPTIONS: dict[Axis, str] = {
    "tp": "tensor_parallel_size",
    "cp": "ring_degree",
    "cfg": "cfg_parallel_size",
    "vae_patch": "vae_patch_parallel_size",
}


def check_engine_config(od_config: Any, pipeline_class: type[EngineHooks]) -> Any:
    """Refuse an engine configuration that cannot run, before any worker starts.

    Args:
        od_config: vLLM-Omni's `OmniDiffusionConfig`.
        pipeline_class: its `spec` says what is supported, its hooks check the rest.

    Returns:
        The checkpoint, as `pipeline_class.open_checkpoint` returns it.

    Raises:
        ModelConfigError: an unsupported layout, dtype or feature, or a checkpoint that does not fit.
        CheckpointError: damaged weights.
    """
    spec = pipeline_class.spec
    _check_layout(od_config, spec)
    _check_settings(od_config, spec)
    for feature, setting in _asked_for(od_config):
        if not spec.supports(feature):
            raise ModelConfigError(f"{setting}: not supported by {spec.title}: {spec.why_not(feature)}; leave it unset")
    checkpoint = pipeline_class.open_checkpoint(od_config)
    pipeline_class.check_engine(od_config, checkpoint)
    if od_config.lora_path:
        _check_lora(od_config, pipeline_class, checkpoint)
    return checkpoint


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


def _check_layout(od_config: Any, spec: ModelSpec) -> None:
    """Refuse parallel settings that have no meaning here, do not fit each other, or that the model cannot use."""
    parallel = od_config.parallel_config
    for name in ("ulysses_degree", "allgather_degree"):
        value = getattr(parallel, name)
        if value != 1:
            raise ModelConfigError(
                f"{name} = {value}: on Neuron ring_degree is the size of context parallelism, however keys and values "
                f"travel; use {name} = 1 and ring_degree = {value}"
            )
    if parallel.pipeline_parallel_size != 1:
        raise ModelConfigError(
            f"pipeline_parallel_size = {parallel.pipeline_parallel_size}: ranks are laid out over TP × CP × CFG; use 1"
        )
    if parallel.vae_patch_parallel_size > 1 and parallel.vae_parallel_mode != "tile":
        raise ModelConfigError(f"vae_parallel_mode = {parallel.vae_parallel_mode!r}: the valid value is 'tile'")
    try:
        if "cfg" in spec.axes:
            check_cfg_parallel_size(parallel.cfg_parallel_size, num_branches=spec.branches)
        topology = topology_of(parallel)
        # Unless it is named, only Lite can tell the chip; the workers, which have a core, then check for themselves.
        if runtime.env.is_set("NEURON_PLATFORM_TARGET_OVERRIDE"):
            place_on_fabric(topology)
    except ValueError as error:
        raise ModelConfigError(str(error)) from error
    for axis, option in _AXIS_OPTIONS.items():
        largest = spec.axes.get(axis, 1)
        size = topology.size(axis)
        if largest is not None and size > largest:
            valid = "1" if largest == 1 else f"1 to {largest}"
            raise ModelConfigError(f"{option} = {size}: the valid size for {spec.title} is {valid}")
    if model_settings(od_config).get("tp_sequence_parallel") and "sp" not in spec.axes:
        raise ModelConfigError(f"tp_sequence_parallel: {spec.title} does not split tokens over TP; leave it unset")


def _check_settings(od_config: Any, spec: ModelSpec) -> None:
    settings = model_settings(od_config)
    choices: dict[str, tuple[str, ...]] = {"context_method": get_args(ContextMethod), "image_policy": IMAGE_POLICIES}
    for name, valid in choices.items():
        if settings.get(name, valid[0]) not in valid:
            raise ModelConfigError(f"{name} = {settings[name]!r}: valid values are {', '.join(valid)}")
    if od_config.enable_layerwise_offload:
        raise ModelConfigError(
            f"enable_layerwise_offload = {od_config.enable_layerwise_offload!r}: not in this version; leave it unset"
        )
    if od_config.quantization_config:
        own = (
            "the model's own is given as `quantization` in a stage YAML or in additional_config"
            if spec.supports("fp8")
            else f"{spec.title} has none of its own: {spec.why_not('fp8')}; leave it unset"
        )
        raise ModelConfigError(
            f"quantization_config = {od_config.quantization_config!r}: vLLM-Omni's methods do not run on Neuron; {own}"
        )
    if od_config.dtype not in [getattr(torch, dtype) for dtype in spec.dtypes]:
        raise ModelConfigError(f"dtype = {od_config.dtype}: valid values are {' and '.join(spec.dtypes)}")
    if od_config.cache_backend not in (None, "none", "cache_dit"):
        backends = "none, cache_dit" if spec.supports("cache_dit") else "none"
        raise ModelConfigError(f"cache_backend = {od_config.cache_backend!r}: valid are {backends}")


def _asked_for(od_config: Any) -> Iterator[tuple[Feature, str]]:
    """The features that the engine is to use, each with the setting that says so."""
    for name, feature in _SWITCHES.items():
        if getattr(od_config, name):
            yield feature, f"{name} = {getattr(od_config, name)!r}"
    if od_config.cache_backend == "cache_dit":
        yield "cache_dit", f"cache_backend = {od_config.cache_backend!r}"
    settings = model_settings(od_config)
    for name, feature in _SETTINGS.items():
        if settings.get(name):
            yield feature, f"{name} = {settings[name]!r}"
    if settings.get("context_method") == "ring":
        yield "context_ring", "context_method = 'ring'"
    # Not the platform's: that makes the backend ready, and the device must not start before a worker has its core.
    backend = None if od_config.enforce_eager else runtime.compile_backend_name()
    if backend is not None:
        yield "compile", f"compilation with {backend!r} (enforce_eager = True runs without)"


def check_compiled_ring(od_config: Any, reason: str) -> None:
    """Refuse `context_method = "ring"` where it would be compiled for a device.

    For models whose attention no kernel's ring takes; torch's own, which takes all, is compiled for the host only.

    Args:
        od_config: vLLM-Omni's `OmniDiffusionConfig`.
        reason: why no kernel's ring takes the model's attention.

    Raises:
        ModelConfigError: "ring" with context parallelism, on a device, and not `enforce_eager`.
    """
    asked = model_settings(od_config).get("context_method") == "ring"
    if not asked or od_config.parallel_config.sequence_parallel_size == 1 or od_config.enforce_eager:
        return
    backend = runtime.compile_backend_name()
    if backend is not None and backend not in runtime.OWN_BACKENDS:
        raise ModelConfigError(
            f"context_method = 'ring' cannot be compiled with {backend!r}: {reason}; valid are gather and auto"
        )


_SWITCHES: dict[str, Feature] = {
    "enable_cpu_offload": "cpu_offload",
    "vae_use_tiling": "vae_tiling",
    "lora_path": "lora",
    "enable_sleep_mode": "sleep",
}
_SETTINGS: dict[str, Feature] = {
    "quantization": "fp8",
    "tensor_capture": "tensor_capture",
    "warmup_shapes": "warmup_shapes",
}


def _check_lora(od_config: Any, pipeline_class: type[EngineHooks], checkpoint: Any) -> None:
    """Refuse adapters that the workers could not load at their start."""
    if od_config.lora_backend != LoRABackend.PEFT:
        raise ModelConfigError(
            f"lora_backend = {str(od_config.lora_backend)!r}: the valid one is {LoRABackend.PEFT.value!r}"
        )
    paths = [od_config.lora_path] if isinstance(od_config.lora_path, str) else od_config.lora_path
    if len(paths) > od_config.max_cpu_loras:
        raise ModelConfigError(
            f"lora_path names {len(paths)} adapters, and max_cpu_loras = {od_config.max_cpu_loras}; set it to "
            f"{len(paths)} or more"
        )
    for path in paths:
        try:
            pipeline_class.check_lora(path, checkpoint)
        except ValueError as error:
            raise ModelConfigError(f"lora_path: {error}") from error
