# SPDX-License-Identifier: Apache-2.0
"""The keys of a stage YAML, as pydantic models. `docs/stage-configuration.md` is generated from them.

Every model forbids unknown keys and is strict about types: `"4"` is not 4, and `yes` is not a number. Checks that need
more than one key live in the model that holds both.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from omni_neuron_runtime import parse_core_ranges

PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]

# vLLM-Omni maps exactly these to torch dtypes and silently takes bfloat16 for any other string.
Dtype = Literal["auto", "bfloat16", "bf16", "float16", "fp16", "half", "float32", "fp32", "float"]


class Section(BaseModel):
    """A mapping of the YAML file: strict types, no unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=(), populate_by_name=False)


def _device_list(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError('expected core numbers such as "0-3,7"')
    if isinstance(value, int):
        value = str(value)
    if isinstance(value, str):
        return parse_core_ranges(value)
    return value


class Runtime(Section):
    """Where the stage runs."""

    process: Literal[True] = Field(
        default=True,
        description="The stage runs in its own process; vLLM-Omni 0.30 has no other way here.",
    )
    devices: Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(_device_list)] | None = Field(
        default=None,
        description='Neuron cores as numbers and ranges, such as `"0-63"` or `"0-3,7"`. Their number must equal '
        "TP × ring × CFG. Without it, cores 0 to that number − 1.",
    )

    @model_validator(mode="after")
    def _devices_are_distinct(self) -> Runtime:
        if self.devices is not None:
            if not self.devices:
                raise ValueError("devices: name at least one core, or leave the key out")
            repeated = sorted({core for core in self.devices if self.devices.count(core) > 1})
            if repeated:
                raise ValueError(f"devices: core(s) {', '.join(map(str, repeated))} named more than once")
        return self


class ParallelConfig(Section):
    """How the world of ranks is cut: world size = TP × ring × CFG, TP fastest."""

    tensor_parallel_size: PositiveInt = Field(
        default=1, description="Tensor parallelism. The model says which sizes it takes."
    )
    ring_degree: PositiveInt | None = Field(
        default=None, description="Context parallelism: the sequence is cut over this many ranks. Default 1."
    )
    sequence_parallel_size: PositiveInt | None = Field(
        default=None, description="Another name of `ring_degree`. Give one of the two."
    )
    ulysses_degree: PositiveInt = Field(
        default=1, description="Only 1: Ulysses attention is not supported, use `ring_degree`."
    )
    cfg_parallel_size: Literal[1, 2] = Field(
        default=1, description="2 computes the two branches of classifier-free guidance on two halves of the ranks."
    )
    vae_patch_parallel_size: PositiveInt = Field(
        default=1, description="Ranks that decode video patches. At most the world size."
    )

    @model_validator(mode="after")
    def _one_sequence_axis(self) -> ParallelConfig:
        if self.ring_degree is not None and self.sequence_parallel_size is not None:
            raise ValueError(
                f"both ring_degree ({self.ring_degree}) and sequence_parallel_size ({self.sequence_parallel_size}) are "
                "given, and both set the context-parallel size; keep ring_degree"
            )
        if self.ulysses_degree > 1:
            raise ValueError(
                f"ulysses_degree is {self.ulysses_degree}: Ulysses attention is not supported; cut the sequence with "
                f"ring_degree: {self.ulysses_degree} instead"
            )
        if self.vae_patch_parallel_size > self.world_size:
            raise ValueError(
                f"vae_patch_parallel_size is {self.vae_patch_parallel_size}, more than the {self.world_size} ranks of "
                "this stage (TP × ring × CFG)"
            )
        return self

    @property
    def context_parallel_size(self) -> int:
        """The size of the context-parallel axis, whichever key gave it."""
        return self.ring_degree or self.sequence_parallel_size or 1

    @property
    def world_size(self) -> int:
        """The number of ranks: TP × ring × CFG."""
        return math.prod((self.tensor_parallel_size, self.context_parallel_size, self.cfg_parallel_size))


class TensorCapture(Section):
    """Which intermediate tensors to write to files."""

    modules: list[str] = Field(
        description="Module names, with ranges such as `blocks.0-3.attn1`, or regular expressions."
    )
    capture_dir: str = Field(description="The folder for the files.")
    capture_filter: str | None = Field(
        default=None, description="A regular expression on tensor names. Default: all of them."
    )


class ModelSettings(Section):
    """`model_config`: what the model package reads itself."""

    tp_sequence_parallel: bool = Field(
        default=False, description="Keep activations between tensor-parallel blocks cut along the sequence."
    )
    context_method: Literal["auto", "gather", "ring"] = Field(
        default="auto",
        description="How self-attention meets other context-parallel ranks' keys: gathered, in a ring, or as fits.",
    )
    comfyui_fp8_model_path: str | None = Field(
        default=None,
        description="A ComfyUI FP8 checkpoint for the experts. Needs `quantization: fp8_row_mx`.",
    )
    modules_to_not_convert: list[str] | None = Field(
        default=None, description="Modules left in `dtype` under quantization. Needs `quantization: fp8_row_mx`."
    )
    image_policy: Literal["resize", "crop"] | None = Field(
        default=None,
        description="How images of requests that do not say so come to the video's size: stretched, or cut.",
    )
    tensor_capture: TensorCapture | None = Field(default=None, description="Write intermediate tensors to files.")
    warmup_shapes: list[str] | None = Field(
        default=None,
        description="Shapes to compile for at start-up, as height x width x frames, such as 480x832x81.",
    )


class CacheConfig(Section):
    """`cache_config`: settings of Cache-DiT. Keys left out keep vLLM-Omni's defaults."""

    Fn_compute_blocks: PositiveInt | None = Field(default=None, description="First blocks that are always computed.")
    Bn_compute_blocks: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Last blocks that are always computed."
    )
    max_warmup_steps: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Steps before anything is reused."
    )
    max_cached_steps: Annotated[int, Field(ge=-1)] | None = Field(
        default=None, description="Most steps that may be reused; −1 for no limit."
    )
    residual_diff_threshold: PositiveFloat | None = Field(
        default=None, description="Relative residual difference below which a step is reused."
    )
    max_continuous_cached_steps: Annotated[int, Field(ge=-1)] | None = Field(
        default=None, description="Most steps reused in a row; −1 for no limit."
    )
    enable_taylorseer: bool | None = Field(default=None, description="Extrapolate reused residuals.")
    taylorseer_order: PositiveInt | None = Field(default=None, description="Order of that extrapolation.")
    scm_steps_mask_policy: str | None = Field(default=None, description="A preset of steps to compute.")
    scm_steps_policy: Literal["dynamic", "static"] | None = Field(
        default=None, description="Whether that preset may be relaxed."
    )


class EngineArgs(Section):
    """What the engine is started with."""

    model_stage: str | None = Field(
        default=None,
        description="A label of older files, without effect: 0.30 has it in its topology.",
    )
    model_class_name: Annotated[str, Field(min_length=1)] = Field(
        description="The architecture, such as `WanPipeline`; `vllm-omni-neuron models` lists those installed."
    )
    dtype: Dtype = Field(default="bfloat16", description="Computation type.")
    boundary_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = Field(
        default=None, description="Timestep, as a fraction of the schedule's, at which the low-noise expert takes over."
    )
    flow_shift: PositiveFloat | None = Field(default=None, description="Shift of the flow-matching schedule.")
    vae_use_tiling: bool = Field(default=False, description="Decode in overlapping tiles.")
    enable_cpu_offload: bool = Field(default=False, description="Keep weights that are not in use on the host.")
    quantization: Literal["fp8_row_mx"] | None = Field(default=None, description="Weight format other than `dtype`.")
    cache_backend: Literal["none", "cache_dit"] | None = Field(
        default=None, description="Reuse of results between steps."
    )
    cache_config: CacheConfig | None = Field(default=None, description="Settings of `cache_backend`.")
    enforce_eager: bool = Field(default=False, description="Run without compiling graphs.")
    settings: ModelSettings = Field(
        default_factory=ModelSettings,
        alias="model_config",
        description="What the model package reads itself.",
    )
    parallel_config: ParallelConfig = Field(default_factory=ParallelConfig, description="How the ranks are cut.")

    @model_validator(mode="after")
    def _settings_have_their_feature(self) -> EngineArgs:
        if self.quantization is None:
            for name in ("comfyui_fp8_model_path", "modules_to_not_convert"):
                if getattr(self.settings, name) is not None:
                    raise ValueError(f"model_config.{name} is only valid with quantization: fp8_row_mx")
        if self.cache_config is not None and self.cache_backend != "cache_dit":
            raise ValueError("cache_config is only valid with cache_backend: cache_dit")
        return self


class SamplingDefaults(Section):
    """`default_sampling_params`: what a request gets that does not say otherwise."""

    height: PositiveInt | None = Field(default=None, description="Pixels.")
    width: PositiveInt | None = Field(default=None, description="Pixels.")
    num_frames: PositiveInt | None = Field(default=None, description="Frames of the video.")
    fps: PositiveFloat | None = Field(default=None, description="Frames per second of the file.")
    num_inference_steps: PositiveInt | None = Field(default=None, description="Denoising steps.")
    guidance_scale: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        default=None, description="Classifier-free guidance; 1.0 turns it off."
    )
    guidance_scale_2: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        default=None, description="Guidance of the other expert, as the model defines it."
    )
    boundary_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = Field(
        default=None, description="As in `engine_args`."
    )
    seed: Annotated[int, Field(ge=0)] | None = Field(default=None, description="Seed of the initial noise.")
    num_outputs_per_prompt: PositiveInt | None = Field(default=None, description="Videos per request.")
    max_sequence_length: PositiveInt | None = Field(default=None, description="Tokens of the prompt.")
    generator_device: str | None = Field(default=None, description="Where the seeded generator lives.")
    extra_args: dict[str, Any] | None = Field(
        default=None, description="What the model package reads itself, such as `sample_solver` and `flow_shift`."
    )


class StageEntry(Section):
    """One entry of `stage_args`."""

    stage_id: Literal[0] = Field(default=0, description="0: there is one stage.")
    stage_type: Literal["diffusion"] = Field(
        default="diffusion", description="Only diffusion stages run on this plugin."
    )
    runtime: Runtime = Field(default_factory=Runtime, description="Where the stage runs.")
    engine_args: EngineArgs = Field(description="What the engine is started with.")
    final_output: Literal[True] = Field(default=True, description="The stage's output is the request's.")
    final_output_type: Literal["video"] = Field(default="video", description="What the stage gives.")
    default_sampling_params: SamplingDefaults | None = Field(default=None, description="Defaults of requests.")

    @model_validator(mode="after")
    def _world_size_is_the_number_of_devices(self) -> StageEntry:
        devices, parallel = self.runtime.devices, self.engine_args.parallel_config
        if devices is not None and len(devices) != parallel.world_size:
            raise ValueError(
                f"runtime.devices names {len(devices)} core(s), but engine_args.parallel_config needs "
                f"{parallel.world_size}: TP {parallel.tensor_parallel_size} × ring {parallel.context_parallel_size} × "
                f"CFG {parallel.cfg_parallel_size}; make the two agree"
            )
        return self


class StageConfig(Section):
    """A whole file."""

    stage_args: Annotated[list[StageEntry], Field(min_length=1, max_length=1)] = Field(
        description="The stages; these models have one."
    )

    @property
    def stage(self) -> StageEntry:
        """The one stage."""
        return self.stage_args[0]
