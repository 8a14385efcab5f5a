# SPDX-License-Identifier: Apache-2.0
"""From the stage YAML to vLLM-Omni 0.30's deploy configuration.

What moves, and why:

- `runtime.devices` ranges become a comma-separated list; 0.30 does not expand ranges.
- `sequence_parallel_size` becomes `ring_degree`; 0.30 derives the former and drops a given one without a word.
- `dtype` and nothing else moves to the top of the file, where 0.30 keeps what all stages share.
- `quantization` moves into `model_config`: 0.30 only takes methods of its own registry in `quantization`.
- `default_sampling_params.num_frames: 1` is repeated in `extra_args`: 0.30 cannot tell one frame from "not given".
- `stage_type`, `model_stage`, `final_output`, `final_output_type` and `runtime.process` vanish: 0.30 has them in the
  topology that `pipeline` names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from .loader import StageConfigError, load_stage_config, parse_stage_config
from .schema import EngineArgs, SamplingDefaults, StageConfig

# vLLM-Omni's one topology of a single diffusion stage that gives a video. `model_class_name` below it selects the
# pipeline, whatever its architecture, and unlike a topology of our own it is known before plugins are loaded.
SINGLE_STAGE_VIDEO_PIPELINE = "wan2_2_ti2v"


def to_deploy_config(stage_config: StageConfig | Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """The deploy configuration that says what `stage_config` (a file, a mapping or a checked one) says.

    Raises:
        StageConfigError: `stage_config` cannot be used.
    """
    if isinstance(stage_config, str | Path):
        stage_config = load_stage_config(stage_config)
    elif not isinstance(stage_config, StageConfig):
        stage_config = parse_stage_config(stage_config)
    stage = stage_config.stage
    parallel = stage.engine_args.parallel_config
    devices = stage.runtime.devices or range(parallel.world_size)
    entry: dict[str, Any] = {
        "stage_id": stage.stage_id,
        "devices": ",".join(map(str, devices)),
        **_engine_fields(stage.engine_args),
        "parallel_config": {
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "ring_degree": parallel.context_parallel_size,
            "cfg_parallel_size": parallel.cfg_parallel_size,
            "vae_patch_parallel_size": parallel.vae_patch_parallel_size,
        },
    }
    if stage.default_sampling_params is not None:
        entry["default_sampling_params"] = _sampling_fields(stage.default_sampling_params)
    return {
        "pipeline": SINGLE_STAGE_VIDEO_PIPELINE,
        "async_chunk": False,
        "dtype": stage.engine_args.dtype,
        "stages": [entry],
    }


def _sampling_fields(defaults: SamplingDefaults) -> dict[str, Any]:
    fields = defaults.model_dump(exclude_none=True)
    if defaults.num_frames == 1:
        fields["extra_args"] = {"num_frames": 1, **fields.get("extra_args", {})}
    return fields


def _engine_fields(engine: EngineArgs) -> dict[str, Any]:
    fields = engine.model_dump(
        exclude_none=True, exclude={"model_stage", "dtype", "quantization", "settings", "parallel_config"}
    )
    settings = engine.settings.model_dump(exclude_none=True, exclude_defaults=True)
    if engine.quantization is not None:
        settings["quantization"] = engine.quantization
    if settings:
        fields["model_config"] = settings
    return fields


def deploy_yaml(stage_config: StageConfig | Mapping[str, Any] | str | Path) -> str:
    """`to_deploy_config` as the text of a YAML file."""
    return yaml.safe_dump(to_deploy_config(stage_config), sort_keys=False, allow_unicode=True)


def write_deploy_config(stage_config: StageConfig | Mapping[str, Any] | str | Path, path: str | Path) -> Path:
    """Write the deploy configuration to `path` and return it.

    Raises:
        StageConfigError: `stage_config` cannot be used.
        OSError: `path` cannot be written.
    """
    path = Path(path)
    path.write_text(deploy_yaml(stage_config), encoding="utf-8")
    return path


def explain_stage_configs_path(path: str | Path) -> str:
    """What to tell somebody who passes the removed `stage_configs_path`: the file to write instead, and its text.

    Where the stage YAML itself cannot be used, the message lists its problems.
    """
    path = Path(path)
    target = path.with_name(f"{path.stem}.deploy.yaml")
    removed = "vLLM-Omni 0.30 removed stage_configs_path (--stage-configs-path); it reads a deploy configuration."
    try:
        text = deploy_yaml(path)
    except StageConfigError as error:
        return f"{removed}\nThe stage configuration cannot be translated as it is.\n{error}"
    indented = "".join(f"    {line}\n" for line in text.splitlines())
    return (
        f"{removed}\n"
        f"Write {target} with this content (`vllm-omni-neuron convert-stage-config {path} -o {target}` does):\n\n"
        f"{indented}\n"
        f'then pass --deploy-config {target}, or deploy_config="{target}" to Omni(...).'
    )
