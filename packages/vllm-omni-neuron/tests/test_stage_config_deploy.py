# SPDX-License-Identifier: Apache-2.0
"""A translated stage YAML, read by vLLM-Omni's own resolver: every value arrives."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from vllm_omni_neuron.stage_config import to_deploy_config, write_deploy_config
from vllm_omni_neuron.stage_config.schema import CacheConfig, SamplingDefaults

FULL = {
    "stage_args": [
        {
            "runtime": {"process": True, "devices": "0-63"},
            "engine_args": {
                "model_class_name": "WanPipeline",
                "dtype": "float16",
                "boundary_ratio": 0.9,
                "flow_shift": 12.0,
                "vae_use_tiling": True,
                "enable_cpu_offload": True,
                "quantization": "fp8_row_mx",
                "cache_backend": "cache_dit",
                "cache_config": {"Fn_compute_blocks": 2, "max_warmup_steps": 7, "residual_diff_threshold": 0.11},
                "enforce_eager": True,
                "model_config": {"tp_sequence_parallel": True, "modules_to_not_convert": ["ffn"]},
                "parallel_config": {
                    "tensor_parallel_size": 4,
                    "sequence_parallel_size": 8,
                    "cfg_parallel_size": 2,
                    "vae_patch_parallel_size": 16,
                },
            },
            "default_sampling_params": {
                "height": 480,
                "width": 832,
                "num_frames": 81,
                "fps": 16,
                "num_inference_steps": 40,
                "guidance_scale": 4.0,
                "guidance_scale_2": 3.0,
                "seed": 42,
                "extra_args": {"sample_solver": "euler"},
            },
        }
    ]
}


def resolve(tmp_path: Path, stage_config: dict, model_class_name: str) -> tuple[Any, Any]:
    """The stage as vLLM-Omni resolves it, and the OmniDiffusionConfig that its engine builds from that."""
    from vllm_omni.config.omni_config import extract_diffusion_stage_config_kwargs
    from vllm_omni.config.resolver import resolve_omni_config
    from vllm_omni.diffusion.data import OmniDiffusionConfig
    from vllm_omni.engine.stage_init_utils import build_engine_args_dict_from_omni_stage_config

    model = tmp_path / "model"
    model.mkdir()
    (model / "model_index.json").write_text(json.dumps({"_class_name": model_class_name, "_diffusers_version": "0.40"}))
    deploy = write_deploy_config(stage_config, tmp_path / "stage.deploy.yaml")
    resolution = resolve_omni_config(
        str(model),
        trust_remote_code=None,
        deploy_config_path=str(deploy),
        cli_overrides={},
        stage_overrides=None,
        strategy_config_path=None,
    )
    [stage] = resolution.stage_configs
    arguments = extract_diffusion_stage_config_kwargs(
        build_engine_args_dict_from_omni_stage_config(stage, str(model)),
        stage_id=0,
        include_engine_adapter_metadata=True,
    )
    return stage, OmniDiffusionConfig(**{name: value for name, value in arguments.items() if value is not None})


def test_every_value_arrives_in_the_engine(tmp_path: Path) -> None:
    import torch

    stage, config = resolve(tmp_path, FULL, "WanPipeline")

    assert stage.stage_type.value == "diffusion"
    assert (stage.final_output, stage.final_output_type) == (True, "video")
    assert stage.runtime_config.devices == ",".join(str(core) for core in range(64))
    assert config.model_class_name == "WanPipeline"
    assert config.dtype is torch.float16
    assert (config.boundary_ratio, config.flow_shift) == (0.9, 12.0)
    assert (config.vae_use_tiling, config.enable_cpu_offload, config.enforce_eager) == (True, True, True)
    assert config.cache_backend == "cache_dit"
    assert config.cache_config.Fn_compute_blocks == 2
    assert config.cache_config.max_warmup_steps == 7
    assert config.cache_config.residual_diff_threshold == 0.11
    parallel = config.parallel_config
    assert (parallel.tensor_parallel_size, parallel.ring_degree, parallel.cfg_parallel_size) == (4, 8, 2)
    assert (parallel.vae_patch_parallel_size, parallel.ulysses_degree, parallel.world_size) == (16, 1, 64)
    assert config.model_config == {
        "tp_sequence_parallel": True,
        "modules_to_not_convert": ["ffn"],
        "quantization": "fp8_row_mx",
    }
    assert config.quantization_config is None


def test_request_defaults_arrive_in_the_engine(tmp_path: Path) -> None:
    from vllm_omni.engine.stage_init_utils import extract_stage_metadata_from_omni_stage_config

    stage, _ = resolve(tmp_path, FULL, "WanPipeline")
    sampling = extract_stage_metadata_from_omni_stage_config(stage).default_sampling_params
    given = FULL["stage_args"][0]["default_sampling_params"]
    assert {name: getattr(sampling, name) for name in given} == given


def test_one_frame_is_said_where_the_model_can_tell_it_from_not_given() -> None:
    engine_args = {"model_class_name": "WanPipeline"}
    stage = {"engine_args": engine_args, "default_sampling_params": {"num_frames": 1, "extra_args": {"flow_shift": 3}}}
    [entry] = to_deploy_config({"stage_args": [stage]})["stages"]
    assert entry["default_sampling_params"] == {"num_frames": 1, "extra_args": {"num_frames": 1, "flow_shift": 3}}


def test_the_topology_serves_any_architecture(tmp_path: Path) -> None:
    stage_config = {"stage_args": [{"engine_args": {"model_class_name": "SomebodysVideoPipeline"}}]}
    stage, config = resolve(tmp_path, stage_config, "SomebodysVideoPipeline")
    assert config.model_class_name == "SomebodysVideoPipeline"
    assert stage.final_output_type == "video"


@pytest.mark.parametrize(
    ("section", "target"),
    [
        (CacheConfig, "vllm_omni.diffusion.data.DiffusionCacheConfig"),
        (SamplingDefaults, "vllm_omni.inputs.data.OmniDiffusionSamplingParams"),
    ],
)
def test_keys_carried_through_exist_in_vllm_omni(section: type, target: str) -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    known = {field.name for field in dataclasses.fields(resolve_obj_by_qualname(target))}
    assert set(section.model_fields) <= known


def test_dtypes_are_those_that_vllm_omni_maps(tmp_path: Path) -> None:
    """vLLM-Omni takes bfloat16 for a name it does not know; a name that means another type shows that it is known."""
    import torch

    other = {"stage_args": [{"engine_args": {"model_class_name": "WanPipeline", "dtype": "half"}}]}
    _, config = resolve(tmp_path, other, "WanPipeline")
    assert config.dtype is torch.float16
    assert to_deploy_config(other)["dtype"] == "half"
