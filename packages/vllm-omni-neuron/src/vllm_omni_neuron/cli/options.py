# SPDX-License-Identifier: Apache-2.0
"""The options of a generation, for `generate` and for the scripts in examples/wan22: their types, checks and help.

Each is an annotated type: a parameter of that type becomes the option of the parameter's name. The functions at the end
turn options that belong together into fields of a `GenerateOptions`.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from .outputs import SUFFIXES

MAX_SEED = 2**63 - 1
DEFAULT_PROFILE_RUNS = 3
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_REQUEST, _ENGINE, _LAYOUT, _MEASURE = "Generation", "Engine", "Layout", "Measurement"


class Dtype(StrEnum):
    """Computation types."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class Quantization(StrEnum):
    """Weight formats other than the computation type."""

    FP8_ROW_MX = "fp8_row_mx"


class ImagePolicy(StrEnum):
    """Ways of an image to the video's size."""

    RESIZE = "resize"
    CROP = "crop"


class CacheBackend(StrEnum):
    """Ways to reuse results between steps."""

    NONE = "none"
    CACHE_DIT = "cache_dit"


def _number(valid: str, test: Callable[[float], bool]) -> Callable[[float | None], float | None]:
    """An option's callback that names the value and what is valid (typer's own ranges name the latter only)."""

    def check(value: float | None) -> float | None:
        if value is not None and not test(value):
            raise typer.BadParameter(f"{value} is not {valid}")
        return value

    return check


_COUNT = _number("1 or more", lambda value: value >= 1)
_POSITIVE = _number("a number above 0", lambda value: 0 < value < math.inf)
_GUIDANCE = _number("a number of 0 or more", lambda value: 0 <= value < math.inf)
_FINITE = _number("a finite number", math.isfinite)
_SHARE = _number("between 0 and 1", lambda value: 0 <= value <= 1)
_SEED = _number(f"between 0 and {MAX_SEED}", lambda value: 0 <= value <= MAX_SEED)


def _text(value: str) -> str:
    if not value.strip():
        raise typer.BadParameter("the prompt is empty; describe the video")
    return value


def _model(value: str) -> str:
    folder = Path(value).expanduser()
    if folder.is_dir():
        if not (folder / "model_index.json").is_file():
            raise typer.BadParameter(
                f"{value} has no model_index.json; expected a checkpoint folder in the layout of diffusers"
            )
        return str(folder)
    if folder.exists():
        raise typer.BadParameter(f"{value} is a file; expected a checkpoint folder in the layout of diffusers")
    if _HUB_NAME.fullmatch(value):
        raise typer.BadParameter(
            f"no folder {value}; if it is a name on the Hugging Face hub, download it first and give the folder: "
            f"hf download {value} --local-dir {folder.name}"
        )
    raise typer.BadParameter(f"no folder {value}; expected a checkpoint folder in the layout of diffusers")


def _output(value: Path | None) -> Path | None:
    if value is None:
        return None
    if value.suffix.lower() not in SUFFIXES.values():
        raise typer.BadParameter(f"{value} does not end in {' or '.join(SUFFIXES.values())}, the formats written")
    if value.is_dir():
        raise typer.BadParameter(f"{value} is a folder")
    folder = value.parent
    if not folder.is_dir():
        raise typer.BadParameter(f"the folder {folder} does not exist")
    if not os.access(value if value.exists() else folder, os.W_OK):
        raise typer.BadParameter(f"{value} cannot be written: no permission")
    return value


def _json_object(value: str | None) -> str | None:
    if value is not None:
        try:
            valid = isinstance(json.loads(value), dict)
        except json.JSONDecodeError:
            valid = False
        if not valid:
            raise typer.BadParameter(f"{value} is not a JSON object")
    return value


def _image(value: Path | None) -> Path | None:
    if value is None:
        return None
    from PIL import Image, UnidentifiedImageError

    if not value.is_file():
        raise typer.BadParameter(f"{value} is no file; expected an image")
    try:
        with Image.open(value) as image:
            image.verify()
    except (UnidentifiedImageError, OSError, SyntaxError) as error:  # PIL's plugins raise any of them
        raise typer.BadParameter(f"{value} is not an image that can be read: {error}") from error
    return value


Model = Annotated[str, typer.Option(callback=_model, help="Checkpoint folder in the layout of diffusers.")]
Prompt = Annotated[str, typer.Option(callback=_text, help="What the video shows.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        callback=_output,
        help="The MP4 to write, or the PNG of an image model; of several the names are numbered. Default: video.mp4 or "
        "image.png.",
    ),
]
Image = Annotated[
    Path | None,
    typer.Option(callback=_image, rich_help_panel=_REQUEST, help="The first frame, for image-to-video models."),
]
LastImage = Annotated[
    Path | None,
    typer.Option(callback=_image, rich_help_panel=_REQUEST, help="The last frame, where the model takes one."),
]
ImagePolicyOption = Annotated[
    ImagePolicy | None,
    typer.Option(
        "--image-policy",
        rich_help_panel=_REQUEST,
        help="How images come to the video's size: stretched, or cut on two sides. Default: the engine's, else resize.",
    ),
]
NegativePrompt = Annotated[
    str | None, typer.Option(rich_help_panel=_REQUEST, help="What the video does not show. Default: nothing.")
]
Height = Annotated[
    int | None, typer.Option(callback=_COUNT, rich_help_panel=_REQUEST, help="Pixels. Default: the model's.")
]
Width = Annotated[
    int | None, typer.Option(callback=_COUNT, rich_help_panel=_REQUEST, help="Pixels. Default: the model's.")
]
NumFrames = Annotated[
    int | None, typer.Option(callback=_COUNT, rich_help_panel=_REQUEST, help="Frames. Default: the model's.")
]
Steps = Annotated[
    int | None, typer.Option(callback=_COUNT, rich_help_panel=_REQUEST, help="Denoising steps. Default: the model's.")
]
GuidanceScale = Annotated[
    float | None,
    typer.Option(callback=_GUIDANCE, rich_help_panel=_REQUEST, help="Classifier-free guidance; 1 or less is off."),
]
GuidanceScale2 = Annotated[
    float | None,
    typer.Option(
        callback=_GUIDANCE, rich_help_panel=_REQUEST, help="Guidance of the low-noise expert. Default: the other's."
    ),
]
NoCfg = Annotated[
    bool,
    typer.Option("--no-cfg", rich_help_panel=_REQUEST, help="No guidance: one forward a step instead of two."),
]
Seed = Annotated[
    int | None,
    typer.Option(callback=_SEED, rich_help_panel=_REQUEST, help="Seed of the noise. Default: chosen and reported."),
]
Lora = Annotated[
    Path | None,
    typer.Option(exists=True, rich_help_panel=_REQUEST, help="A LoRA adapter, a file or a folder, for this request."),
]
LoraScale = Annotated[
    float | None,
    typer.Option(callback=_FINITE, rich_help_panel=_REQUEST, help="Strength of the adapter. Default: 1."),
]
NumOutputs = Annotated[
    int | None,
    typer.Option(
        callback=_COUNT, rich_help_panel=_REQUEST, help="Videos; video k has the seed of the first plus k. Default: 1."
    ),
]
Fps = Annotated[
    float | None,
    typer.Option(
        callback=_POSITIVE, rich_help_panel=_REQUEST, help="Frames per second of the file. Default: the model's."
    ),
]
FlowShift = Annotated[
    float | None, typer.Option(callback=_POSITIVE, rich_help_panel=_REQUEST, help="Shift of the schedule.")
]
BoundaryRatio = Annotated[
    float | None,
    typer.Option(callback=_SHARE, rich_help_panel=_REQUEST, help="Where the low-noise expert takes over."),
]
SampleSolver = Annotated[
    str | None, typer.Option(rich_help_panel=_REQUEST, help="Scheduler, as the model names it: unipc, euler.")
]
DtypeOption = Annotated[
    Dtype | None, typer.Option("--dtype", rich_help_panel=_ENGINE, help="Computation type. Default: bfloat16.")
]
QuantizationOption = Annotated[
    Quantization | None, typer.Option("--quantization", rich_help_panel=_ENGINE, help="Weight format of the DiT.")
]
ComfyFp8Path = Annotated[
    Path | None,
    typer.Option(
        "--comfyui-fp8-model-path",
        exists=True,
        rich_help_panel=_ENGINE,
        help="A ComfyUI FP8 checkpoint for the experts; needs --quantization.",
    ),
]
ModulesToNotConvert = Annotated[
    str | None,
    typer.Option(rich_help_panel=_ENGINE, help="Modules left in --dtype, with commas: attn1,attn2,ffn."),
]
CacheBackendOption = Annotated[
    CacheBackend | None,
    typer.Option("--cache-backend", rich_help_panel=_ENGINE, help="Reuse of results between steps."),
]
CacheConfig = Annotated[
    str | None,
    typer.Option(
        callback=_json_object,
        rich_help_panel=_ENGINE,
        help='Settings of --cache-backend as JSON: {"residual_diff_threshold": 0.24}.',
    ),
]
VaeTiling = Annotated[
    bool, typer.Option("--vae-use-tiling", rich_help_panel=_ENGINE, help="Decode in overlapping tiles.")
]
CpuOffload = Annotated[
    bool,
    typer.Option(
        "--enable-cpu-offload", rich_help_panel=_ENGINE, help="Keep the DiT's weights on the host while decoding."
    ),
]
TensorParallelSize = Annotated[
    int | None,
    typer.Option(
        "--tensor-parallel-size",
        "-tp",
        callback=_COUNT,
        rich_help_panel=_LAYOUT,
        help="Ranks that share each layer. Default: 1.",
    ),
]
RingDegree = Annotated[
    int | None,
    typer.Option(callback=_COUNT, rich_help_panel=_LAYOUT, help="Ranks that share the sequence. Default: 1."),
]
CfgParallelSize = Annotated[
    int | None,
    typer.Option(callback=_COUNT, rich_help_panel=_LAYOUT, help="2: guidance's branches side by side. Default: 1."),
]
VaePatchParallelSize = Annotated[
    int | None,
    typer.Option(callback=_COUNT, rich_help_panel=_LAYOUT, help="Ranks that share the VAE's tiles. Default: 1."),
]
StageConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--stage-config", exists=True, dir_okay=False, rich_help_panel=_ENGINE, help="A stage YAML (`stage_args`)."
    ),
]
DeployConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--deploy-config",
        exists=True,
        dir_okay=False,
        rich_help_panel=_ENGINE,
        help="A deploy configuration of vLLM-Omni 0.30.",
    ),
]
InitTimeout = Annotated[
    int | None,
    typer.Option(
        "--init-timeout",
        min=1,
        rich_help_panel=_ENGINE,
        help="Seconds that vLLM-Omni waits for the engine's start, a warm-up included. Its default: 600, a stage 300.",
    ),
]
Profile = Annotated[
    bool,
    typer.Option("--profile", rich_help_panel=_MEASURE, help="Warm up, then time generations stage by stage."),
]
ProfileRuns = Annotated[
    int, typer.Option(callback=_COUNT, rich_help_panel=_MEASURE, help="Timed generations of --profile.")
]
Json = Annotated[bool, typer.Option("--json", help="The summary as JSON on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no summary.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show the engine's own output.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the Python traceback of a failure.")]


def guidance(scale: float | None, scale_2: float | None, no_cfg: bool) -> dict[str, Any]:
    """Both scales of a request; `no_cfg` is guidance 1 for both experts.

    Raises:
        typer.BadParameter: a scale beside `no_cfg`.
    """
    if not no_cfg:
        return {"guidance_scale": scale, "guidance_scale_2": scale_2}
    for name, value in (("--guidance-scale", scale), ("--guidance-scale-2", scale_2)):
        if value is not None:
            raise typer.BadParameter(f"{value} contradicts --no-cfg, which is guidance 1", param_hint=name)
    return {"guidance_scale": 1.0, "guidance_scale_2": 1.0}


def images(first: Path | None, last: Path | None, policy: ImagePolicy | None) -> dict[str, Any]:
    """The fields of a request that concern images.

    Raises:
        typer.BadParameter: what needs the first image, without it.
    """
    if first is None:
        for name, value in (("--last-image", last), ("--image-policy", policy)):
            if value is not None:
                raise typer.BadParameter("is only valid with --image, the first frame", param_hint=name)
    return {"image": first, "last_image": last, "image_policy": None if policy is None else policy.value}


def adapter(lora: Path | None, scale: float | None) -> dict[str, Any]:
    """The fields of a request that concern LoRA.

    Raises:
        typer.BadParameter: a strength without an adapter.
    """
    if lora is None and scale is not None:
        raise typer.BadParameter("is only valid with --lora", param_hint="--lora-scale")
    return {"lora": lora, "lora_scale": scale}


def cached(backend: CacheBackend | None, config: str | None) -> dict[str, Any]:
    """The fields of a request that concern reuse between steps.

    Raises:
        typer.BadParameter: settings without a backend.
    """
    if config is not None and backend is not CacheBackend.CACHE_DIT:
        raise typer.BadParameter("is only valid with --cache-backend cache_dit", param_hint="--cache-config")
    return {
        "cache_backend": None if backend is None else backend.value,
        "cache_config": None if config is None else json.loads(config),
    }


def quantized(
    quantization: Quantization | None, comfyui_fp8_model_path: Path | None, modules_to_not_convert: str | None
) -> dict[str, Any]:
    """The fields of a request that concern quantisation."""
    names = None
    if modules_to_not_convert is not None:
        names = tuple(name.strip() for name in modules_to_not_convert.split(",") if name.strip())
    return {
        "quantization": None if quantization is None else quantization.value,
        "comfyui_fp8_model_path": None if comfyui_fp8_model_path is None else str(comfyui_fp8_model_path),
        "modules_to_not_convert": names,
    }
