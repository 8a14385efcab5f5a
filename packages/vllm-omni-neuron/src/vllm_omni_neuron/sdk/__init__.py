# SPDX-License-Identifier: Apache-2.0
"""The model SDK: what a model package needs beside the layers of `omni_neuron_parallel` and `omni_neuron_runtime`.

Names are imported when they are asked for; importing this package imports neither vLLM nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_omni_neuron.sdk.checkpoint import (
        DiffusersCheckpoint,
        check_tensors,
        default_dtype,
        load_tensors,
        make_on_meta,
    )
    from vllm_omni_neuron.sdk.config import (
        ModelConfig,
        ModelConfigError,
        check_tensor_parallel,
        read_json,
    )
    from vllm_omni_neuron.sdk.denoising import (
        Prediction,
        Trajectory,
    )
    from vllm_omni_neuron.sdk.engine_checks import (
        check_compiled_ring,
        check_engine_config,
        topology_of,
    )
    from vllm_omni_neuron.sdk.engine_hooks import (
        EngineHooks,
    )
    from vllm_omni_neuron.sdk.images import (
        fit_images,
        image_report,
        load_images,
        pixels,
    )
    from vllm_omni_neuron.sdk.mapping import (
        Coverage,
        Mapping,
        mapping_coverage,
        numbered,
        prefixed,
        with_biases,
    )
    from vllm_omni_neuron.sdk.pipeline import (
        NeuronDiffusionPipeline,
    )
    from vllm_omni_neuron.sdk.processing import (
        ClientRequestError,
        post_process_func,
        pre_process_func,
    )
    from vllm_omni_neuron.sdk.profiles import (
        BASE_PROFILE,
        Conflict,
        EnvironmentProfile,
        MergedProfile,
        ProfileError,
        merge_profiles,
    )
    from vllm_omni_neuron.sdk.request import (
        GenerationRequest,
        ImageUse,
        RequestError,
        RequestRules,
        Setting,
        check_choice,
        check_guidance_scale,
        check_number,
        check_positive,
        media_of,
        resolve_request,
    )
    from vllm_omni_neuron.sdk.schedules import (
        flow_match_timesteps,
    )
    from vllm_omni_neuron.sdk.sharded import (
        ShardedComponent,
    )
    from vllm_omni_neuron.sdk.spec import (
        FEATURES,
        SDK_VERSION,
        SPEC_AXES,
        ComponentKind,
        ComponentSpec,
        Dtype,
        Feature,
        ModelSpec,
        Output,
        SpecAxis,
        SpecError,
        load_spec,
        model_spec,
    )
    from vllm_omni_neuron.sdk.stage_clock import (
        StageClock,
    )
    from vllm_omni_neuron.sdk.text import (
        tokenize,
    )
    from vllm_omni_neuron.sdk.tiny import (
        ascii_tokenizer,
        perturb_constants,
        save_components,
        write_model_index,
    )
    from vllm_omni_neuron.sdk.unsharded import (
        load_transformers,
        on_output_rank,
    )
    from vllm_omni_neuron.sdk.vae import (
        DiffusersVae,
        VaeTiling,
        load_diffusers_vae,
    )

_HOMES = {
    "checkpoint": [
        "DiffusersCheckpoint",
        "check_tensors",
        "default_dtype",
        "load_tensors",
        "make_on_meta",
    ],
    "config": [
        "ModelConfig",
        "ModelConfigError",
        "check_tensor_parallel",
        "read_json",
    ],
    "denoising": [
        "Prediction",
        "Trajectory",
    ],
    "engine_checks": [
        "check_compiled_ring",
        "check_engine_config",
        "topology_of",
    ],
    "engine_hooks": [
        "EngineHooks",
    ],
    "images": [
        "fit_images",
        "image_report",
        "load_images",
        "pixels",
    ],
    "mapping": [
        "Coverage",
        "Mapping",
        "mapping_coverage",
        "numbered",
        "prefixed",
        "with_biases",
    ],
    "pipeline": [
        "NeuronDiffusionPipeline",
    ],
    "processing": [
        "ClientRequestError",
        "post_process_func",
        "pre_process_func",
    ],
    "request": [
        "GenerationRequest",
        "ImageUse",
        "RequestError",
        "RequestRules",
        "Setting",
        "check_choice",
        "check_guidance_scale",
        "check_number",
        "check_positive",
        "media_of",
        "resolve_request",
    ],
    "profiles": [
        "BASE_PROFILE",
        "Conflict",
        "EnvironmentProfile",
        "MergedProfile",
        "ProfileError",
        "merge_profiles",
    ],
    "schedules": ["flow_match_timesteps"],
    "sharded": ["ShardedComponent"],
    "spec": [
        "FEATURES",
        "SDK_VERSION",
        "SPEC_AXES",
        "ComponentKind",
        "ComponentSpec",
        "Dtype",
        "Feature",
        "ModelSpec",
        "Output",
        "SpecAxis",
        "SpecError",
        "load_spec",
        "model_spec",
    ],
    "stage_clock": [
        "StageClock",
    ],
    "text": [
        "tokenize",
    ],
    "tiny": [
        "ascii_tokenizer",
        "perturb_constants",
        "save_components",
        "write_model_index",
    ],
    "unsharded": [
        "load_transformers",
        "on_output_rank",
    ],
    "vae": [
        "DiffusersVae",
        "VaeTiling",
        "load_diffusers_vae",
    ],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "BASE_PROFILE",
    "FEATURES",
    "SDK_VERSION",
    "SPEC_AXES",
    "ClientRequestError",
    "ComponentKind",
    "ComponentSpec",
    "Conflict",
    "Coverage",
    "DiffusersCheckpoint",
    "DiffusersVae",
    "Dtype",
    "EngineHooks",
    "EnvironmentProfile",
    "Feature",
    "GenerationRequest",
    "ImageUse",
    "Mapping",
    "MergedProfile",
    "ModelConfig",
    "ModelConfigError",
    "ModelSpec",
    "NeuronDiffusionPipeline",
    "Output",
    "Prediction",
    "ProfileError",
    "RequestError",
    "RequestRules",
    "Setting",
    "ShardedComponent",
    "SpecAxis",
    "SpecError",
    "StageClock",
    "Trajectory",
    "VaeTiling",
    "ascii_tokenizer",
    "check_choice",
    "check_compiled_ring",
    "check_engine_config",
    "check_guidance_scale",
    "check_number",
    "check_positive",
    "check_tensor_parallel",
    "check_tensors",
    "default_dtype",
    "fit_images",
    "flow_match_timesteps",
    "image_report",
    "load_diffusers_vae",
    "load_images",
    "load_spec",
    "load_tensors",
    "load_transformers",
    "make_on_meta",
    "mapping_coverage",
    "media_of",
    "merge_profiles",
    "model_spec",
    "numbered",
    "on_output_rank",
    "perturb_constants",
    "pixels",
    "post_process_func",
    "pre_process_func",
    "prefixed",
    "read_json",
    "resolve_request",
    "save_components",
    "tokenize",
    "topology_of",
    "with_biases",
    "write_model_index",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
