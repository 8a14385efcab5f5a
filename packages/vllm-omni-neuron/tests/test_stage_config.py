# SPDX-License-Identifier: Apache-2.0
"""Stage YAMLs: what is accepted, and what each mistake is told."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest

from vllm_omni_neuron.stage_config import (
    StageConfigError,
    explain_stage_configs_path,
    load_stage_config,
    parse_stage_config,
    to_deploy_config,
    write_deploy_config,
)
from vllm_omni_neuron.stage_config.__main__ import with_current_table
from vllm_omni_neuron.stage_config.reference import keys

REPOSITORY = Path(__file__).parents[3]
EXAMPLE = REPOSITORY / "examples" / "wan22" / "stage_cpu_tp2.yaml"

# The documented shape, with every feature that a stage YAML can ask for.
FULL = {
    "stage_args": [
        {
            "stage_id": 0,
            "stage_type": "diffusion",
            "runtime": {"process": True, "devices": "0-63"},
            "engine_args": {
                "model_stage": "dit",
                "model_class_name": "WanPipeline",
                "dtype": "bfloat16",
                "boundary_ratio": 0.875,
                "flow_shift": 5.0,
                "vae_use_tiling": True,
                "enable_cpu_offload": True,
                "quantization": "fp8_row_mx",
                "cache_backend": "cache_dit",
                "cache_config": {"Fn_compute_blocks": 1, "Bn_compute_blocks": 0, "residual_diff_threshold": 0.24},
                "enforce_eager": True,
                "model_config": {
                    "tp_sequence_parallel": True,
                    "comfyui_fp8_model_path": "/weights/fp8",
                    "modules_to_not_convert": ["attn1", "ffn"],
                    "tensor_capture": {"modules": ["blocks.0-3.attn1"], "capture_dir": "capture"},
                },
                "parallel_config": {
                    "tensor_parallel_size": 4,
                    "ring_degree": 8,
                    "cfg_parallel_size": 2,
                    "vae_patch_parallel_size": 16,
                },
            },
            "final_output": True,
            "final_output_type": "video",
            "default_sampling_params": {"height": 480, "width": 832, "num_frames": 81, "fps": 16, "seed": 42},
        }
    ]
}


def changed(path: str, value: object = None, *, remove: bool = False) -> dict:
    """FULL with the dotted key below the stage set to `value`, or removed."""
    config = copy.deepcopy(FULL)
    section = config["stage_args"][0]
    *parents, name = path.split(".")
    for parent in parents:
        section = section.setdefault(parent, {})
    if remove:
        del section[name]
    else:
        section[name] = value
    return config


def problems(config: object) -> list[str]:
    with pytest.raises(StageConfigError) as caught:
        parse_stage_config(config)
    return caught.value.problems


def test_the_documented_shape_is_accepted() -> None:
    stage = parse_stage_config(FULL).stage
    assert stage.runtime.devices == list(range(64))
    assert stage.engine_args.parallel_config.world_size == 64
    assert stage.engine_args.settings.tp_sequence_parallel


def test_defaults_fill_a_minimal_file() -> None:
    deploy = to_deploy_config({"stage_args": [{"engine_args": {"model_class_name": "WanPipeline"}}]})
    assert deploy["dtype"] == "bfloat16"
    assert deploy["stages"][0]["devices"] == "0"
    assert deploy["stages"][0]["parallel_config"]["tensor_parallel_size"] == 1


@pytest.mark.parametrize(
    ("devices", "expected"),
    [("0-63", list(range(64))), ([*range(64)], list(range(64))), ("1-32,40-71", [*range(1, 33), *range(40, 72)])],
)
def test_devices(devices: object, expected: list[int]) -> None:
    assert parse_stage_config(changed("runtime.devices", devices)).stage.runtime.devices == expected


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("engine_args.parallel_config.tensor_parallel_szie", 4, "did you mean tensor_parallel_size?"),
        ("engine_args.tensor_parallel_size", 4, "belongs at engine_args.parallel_config.tensor_parallel_size"),
        ("engine_args.parallel_confg", {}, "did you mean parallel_config?"),
        ("devices", "0", "belongs at runtime.devices"),
        ("engine_args.gpu_memory_utilization", 0.9, "known here: model_stage, model_class_name"),
        ("default_sampling_params.num_frame", 81, "did you mean num_frames?"),
        ("engine_args.model_config.enable_ring_attention", True, "known here: tp_sequence_parallel"),
    ],
)
def test_an_unknown_key_names_its_path_and_the_nearest_known_one(path: str, value: object, expected: str) -> None:
    [problem] = problems(changed(path, value))
    assert problem.startswith(f"stage_args[0].{path}: unknown key; ")
    assert expected in problem


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("engine_args.dtype", "bf17", "expected 'auto', 'bfloat16'"),
        ("engine_args.quantization", "fp8", "expected 'fp8_row_mx', not fp8"),
        ("engine_args.cache_backend", "tea_cache", "expected 'none' or 'cache_dit', not tea_cache"),
        ("engine_args.boundary_ratio", 1.5, "less than or equal to 1, not 1.5"),
        ("engine_args.flow_shift", 0.0, "greater than 0, not 0.0"),
        ("engine_args.flow_shift", float("nan"), "finite number"),
        ("engine_args.parallel_config.tensor_parallel_size", 0, "greater than or equal to 1, not 0"),
        ("engine_args.parallel_config.tensor_parallel_size", -4, "greater than or equal to 1, not -4"),
        ("engine_args.parallel_config.tensor_parallel_size", "4", "valid integer, not '4'"),
        ("engine_args.parallel_config.tensor_parallel_size", True, "valid integer, not true"),
        ("engine_args.parallel_config.cfg_parallel_size", 3, "expected 1 or 2, not 3"),
        ("engine_args.parallel_config.ulysses_degree", 2, "Ulysses attention is not supported"),
        ("engine_args.parallel_config.vae_patch_parallel_size", 65, "more than the 64 ranks of this stage"),
        (
            "engine_args.parallel_config.sequence_parallel_size",
            8,
            "both ring_degree (8) and sequence_parallel_size (8)",
        ),
        ("runtime.devices", "0-3,2-61", "core 2 is named twice"),
        ("runtime.devices", [0, 0], "core(s) 0 named more than once"),
        ("runtime.devices", "0-", "is not a list of cores"),
        ("runtime.process", False, "expected True, not false"),
        ("stage_id", 1, "expected 0, not 1"),
        ("stage_type", "llm", "expected 'diffusion', not llm"),
        ("final_output_type", "image", "expected 'video', not image"),
        ("default_sampling_params.height", -480, "greater than or equal to 1, not -480"),
    ],
)
def test_a_bad_value_names_its_path_and_what_is_valid(path: str, value: object, expected: str) -> None:
    [problem] = problems(changed(path, value))
    assert expected in problem
    assert path.rpartition(".")[0] in problem


def test_a_missing_architecture() -> None:
    assert problems(changed("engine_args.model_class_name", remove=True)) == [
        "stage_args[0].engine_args.model_class_name: required, and missing"
    ]


def test_world_size_must_equal_the_number_of_devices() -> None:
    [problem] = problems(changed("runtime.devices", "0-31"))
    assert "runtime.devices names 32 core(s)" in problem
    assert "needs 64: TP 4 × ring 8 × CFG 2" in problem


@pytest.mark.parametrize("name", ["modules_to_not_convert", "comfyui_fp8_model_path"])
def test_settings_of_quantization_need_it(name: str) -> None:
    config = changed("engine_args.quantization", remove=True)
    settings = config["stage_args"][0]["engine_args"]["model_config"]
    settings.update({key: None for key in ("modules_to_not_convert", "comfyui_fp8_model_path") if key != name})
    [problem] = problems(config)
    assert f"model_config.{name} is only valid with quantization: fp8_row_mx" in problem


def test_settings_of_the_cache_need_it() -> None:
    [problem] = problems(changed("engine_args.cache_backend", remove=True))
    assert "cache_config is only valid with cache_backend: cache_dit" in problem


def test_every_problem_is_listed_at_once() -> None:
    config = changed("engine_args.dtype", "bf17")
    config["stage_args"][0]["runtime"]["device"] = "0"
    with pytest.raises(StageConfigError, match=re.escape("stage.yaml: 2 problems")):
        parse_stage_config(config, source="stage.yaml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "found an empty file"),
        ("- 1\n", "found a list"),
        ("stage_args: []\n", "at least 1 item"),
        ("stages: []\n", "this is a deploy configuration already"),
        ("stage_args: [\n", "not valid YAML"),
        ("stage_args: []\nstage_args: []\n", "key 'stage_args' is given twice, on lines 1 and 2"),
        ("stage_arg: []\n", "the one key at the top of the file is stage_args"),
    ],
)
def test_files_that_are_no_stage_configuration(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "stage.yaml"
    path.write_text(text)
    with pytest.raises(StageConfigError) as caught:
        load_stage_config(path)
    assert str(path) in str(caught.value)
    assert expected in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(StageConfigError, match="cannot be read: No such file"):
        load_stage_config(tmp_path / "none.yaml")


def test_sequence_parallel_size_is_the_ring_degree() -> None:
    config = changed("engine_args.parallel_config.ring_degree", remove=True)
    config["stage_args"][0]["engine_args"]["parallel_config"]["sequence_parallel_size"] = 8
    parallel = to_deploy_config(config)["stages"][0]["parallel_config"]
    assert parallel["ring_degree"] == 8
    assert "sequence_parallel_size" not in parallel


def test_the_migration_message_shows_the_file_to_write() -> None:
    message = explain_stage_configs_path(EXAMPLE)
    assert "--deploy-config" in message
    assert str(EXAMPLE.with_name("stage_cpu_tp2.deploy.yaml")) in message
    assert "    - stage_id: 0\n" in message


def test_the_migration_message_lists_what_cannot_be_translated(tmp_path: Path) -> None:
    path = tmp_path / "stage.yaml"
    path.write_text("stage_args: [{engine_args: {}}]\n")
    assert "engine_args.model_class_name: required, and missing" in explain_stage_configs_path(path)


def test_the_deploy_file_of_the_example_is_current(tmp_path: Path) -> None:
    written = write_deploy_config(EXAMPLE, tmp_path / "new.yaml")
    assert written.read_text() == EXAMPLE.with_name("stage_cpu_tp2.deploy.yaml").read_text()


def test_the_documentation_lists_the_keys_as_they_are() -> None:
    page = (REPOSITORY / "docs" / "stage-configuration.md").read_text(encoding="utf-8")
    assert page == with_current_table(page), "run: python -m vllm_omni_neuron.stage_config docs/stage-configuration.md"
    for key in keys():
        assert key.meaning, f"{key.path} has no description"
