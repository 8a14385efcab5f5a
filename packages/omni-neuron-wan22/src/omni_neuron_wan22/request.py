# SPDX-License-Identifier: Apache-2.0
"""What a request asks for, after defaults, engine settings and checks: one frozen object that the pipeline follows.

Every setting is looked up in one order: the request, then the engine's configuration, then (for `boundary_ratio`) the
checkpoint's index, then the default here. Where each was found is part of the result.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from omni_neuron_wan22.scheduler import SAMPLE_SOLVERS

logger = logging.getLogger(__name__)

DEFAULT_HEIGHT = 480
DEFAULT_WIDTH = 832
DEFAULT_NUM_FRAMES = 81
DEFAULT_NUM_INFERENCE_STEPS = 40
DEFAULT_GUIDANCE_SCALE = 4.0
DEFAULT_FLOW_SHIFT = 5.0
DEFAULT_BOUNDARY_RATIO = 0.875
DEFAULT_FPS = 16
DEFAULT_MAX_SEQUENCE_LENGTH = 512
OUTPUT_TYPES = ("np", "pt", "pil", "latent")
IMAGE_POLICIES = ("resize", "crop")
MAX_SEED = 2**63 - 1
ImageUse = Literal["none", "optional", "required"]
# Where the sources stand in `extra_args` of a request that was resolved before; see `resolve_request`.
SOURCES = "_sources"


class RequestError(ValueError):
    """A request that cannot be served; the message names the setting, its value and what would be valid."""


@dataclass(frozen=True)
class ModelDefaults:
    """What a request of this model gets where nothing else says; the values here are T2V-A14B's."""

    height: int = DEFAULT_HEIGHT
    width: int = DEFAULT_WIDTH
    num_frames: int = DEFAULT_NUM_FRAMES
    num_inference_steps: int = DEFAULT_NUM_INFERENCE_STEPS
    guidance_scale: float = DEFAULT_GUIDANCE_SCALE
    boundary_ratio: float = DEFAULT_BOUNDARY_RATIO
    fps: int = DEFAULT_FPS


I2V_DEFAULTS = ModelDefaults(guidance_scale=5.0, boundary_ratio=0.9)
# One expert, which takes every step: the boundary is 0.
TI2V_DEFAULTS = ModelDefaults(704, 1280, 121, num_inference_steps=50, guidance_scale=5.0, boundary_ratio=0.0, fps=24)


@dataclass(frozen=True)
class GenerationRequest:
    """A checked request.

    Attributes:
        prompt: the text as given; never empty.
        negative_prompt: what to steer away from; empty is allowed.
        height, width: pixels, multiples of the VAE's and the patch's joint stride.
        num_frames: video frames, 4 k + 1.
        num_inference_steps: solver steps.
        guidance_scale: guidance of the high-noise expert; 1 or less means none.
        guidance_scale_2: guidance of the low-noise expert.
        boundary_ratio: timesteps of at least this share of 1000 belong to the high-noise expert.
        flow_shift: shift of the noise schedule.
        sample_solver: one of `SAMPLE_SOLVERS`.
        num_outputs_per_prompt: videos; video k of a seeded request has the seed `seed + k`.
        seed: of the first video's noise; None where the caller brought generators.
        fps: frames a second of the container; does not change what is generated.
        max_sequence_length: text tokens.
        output_type: one of `OUTPUT_TYPES`.
        image_policy: how an image comes to the video's size, one of `IMAGE_POLICIES`.
        sources: where each setting was found: "request", "engine", "checkpoint" or "default"; "guidance_scale" where
            `guidance_scale_2` follows it, "image" where a size follows the image's.
    """

    prompt: str
    negative_prompt: str
    height: int
    width: int
    num_frames: int
    num_inference_steps: int
    guidance_scale: float
    guidance_scale_2: float
    boundary_ratio: float
    flow_shift: float
    sample_solver: str
    seed: int | None
    fps: float
    max_sequence_length: int
    output_type: str
    num_outputs_per_prompt: int = 1
    image_policy: str = IMAGE_POLICIES[0]
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def seeds(self) -> list[int | None]:
        """The seed of each video's noise; None where the caller brought generators."""
        return [None if self.seed is None else self.seed + number for number in range(self.num_outputs_per_prompt)]

    @property
    def uses_guidance(self) -> bool:
        """Whether any step needs the negative prompt."""
        return self.guidance_scale > 1.0 or self.guidance_scale_2 > 1.0


@dataclass(frozen=True)
class EngineDefaults:
    """What the engine's configuration and the checkpoint contribute to a request.

    Attributes:
        boundary_ratio, flow_shift: the engine's.
        checkpoint_boundary_ratio: of the checkpoint's index.
        image_policy: the engine's.
        model: what is left to the model.
        spatial_stride: pixels that height and width must be multiples of.
        temporal_stride: video frames per latent frame.
        images, last_image: which images a request brings.
    """

    boundary_ratio: float | None = None
    flow_shift: float | None = None
    checkpoint_boundary_ratio: float | None = None
    image_policy: str | None = None
    model: ModelDefaults = ModelDefaults()
    spatial_stride: int = 16
    temporal_stride: int = 4
    images: ImageUse = "none"
    last_image: ImageUse = "none"


def resolve_request(prompt: Any, sampling_params: Any, defaults: EngineDefaults) -> GenerationRequest:
    """Check a request and fill its gaps.

    Args:
        prompt: a string, or a mapping with `prompt` and optionally `negative_prompt` and `multi_modal_data`, whose
            `image` and `last_image` are PIL images (see `load_images`).
        sampling_params: vLLM-Omni's `OmniDiffusionSamplingParams`. A request that was resolved before and filled with
            the result carries the sources of then in `extra_args[SOURCES]`.
        defaults: engine and checkpoint.

    Raises:
        RequestError: an empty prompt, a size or count below 1, an unknown solver or output type, an image that the
            model does not take or none where it needs one.
    """
    text, negative = _prompts(prompt)
    media = _media(prompt, defaults)
    model = defaults.model
    extra = getattr(sampling_params, "extra_args", None) or {}
    found = _Lookup()
    # "Not given" is 1 in vLLM-Omni's parameters, the right count for an image; a video has Wan's 81.
    frames = sampling_params.num_frames
    frames = extra.get("num_frames") if frames in (None, 1) else frames
    frames = found("num_frames", frames, default=model.num_frames)

    scale = _scale("guidance_scale", sampling_params.guidance_scale, sampling_params.guidance_scale_provided)
    scale = found("guidance_scale", scale, default=model.guidance_scale)
    scale_2 = _scale("guidance_scale_2", sampling_params.guidance_scale_2, sampling_params.guidance_scale_2_provided)
    scale_2 = found("guidance_scale_2", scale_2, guidance_scale=scale)
    boundary = found(
        "boundary_ratio",
        sampling_params.boundary_ratio,
        engine=defaults.boundary_ratio,
        checkpoint=defaults.checkpoint_boundary_ratio,
        default=model.boundary_ratio,
    )
    shift = found("flow_shift", extra.get("flow_shift"), engine=defaults.flow_shift, default=DEFAULT_FLOW_SHIFT)
    steps = found("num_inference_steps", sampling_params.num_inference_steps, default=model.num_inference_steps)
    outputs = sampling_params.num_outputs_per_prompt
    outputs = found("num_outputs_per_prompt", None if outputs == 1 else outputs, default=1)
    length = found("max_sequence_length", sampling_params.max_sequence_length, default=DEFAULT_MAX_SEQUENCE_LENGTH)
    solver = found("sample_solver", extra.get("sample_solver"), default="unipc")
    of_image = _size_of_image(media.get("image"), sampling_params.height, sampling_params.width, defaults)
    height = found("height", sampling_params.height, image=of_image[0], default=model.height)
    width = found("width", sampling_params.width, image=of_image[1], default=model.width)
    fps = found("fps", sampling_params.resolved_frame_rate, default=model.fps)
    policy = IMAGE_POLICIES[0]
    if media:
        policy = found("image_policy", extra.get("image_policy"), engine=defaults.image_policy, default=policy)
    return GenerationRequest(
        prompt=text,
        negative_prompt=negative,
        height=_size("height", height, defaults.spatial_stride),
        width=_size("width", width, defaults.spatial_stride),
        num_frames=_frames(frames, defaults.temporal_stride, at_least=2 if "last_image" in media else 1),
        num_inference_steps=_positive("num_inference_steps", steps),
        guidance_scale=scale,
        guidance_scale_2=scale_2,
        boundary_ratio=_boundary_ratio(boundary),
        flow_shift=_flow_shift(shift),
        sample_solver=_choice("sample_solver", solver, SAMPLE_SOLVERS),
        num_outputs_per_prompt=_positive("num_outputs_per_prompt", outputs),
        seed=_seed(sampling_params.seed, outputs),
        fps=_fps(fps),
        max_sequence_length=_positive("max_sequence_length", length),
        output_type=_choice("output_type", _first(sampling_params.output_type, "np"), OUTPUT_TYPES),
        image_policy=_choice("image_policy", policy, IMAGE_POLICIES),
        sources=dict(extra.get(SOURCES, found.sources)),
    )


class _Lookup:
    """Takes each setting from the first place that has it, and keeps which that was."""

    def __init__(self) -> None:
        self.sources: dict[str, str] = {}

    def __call__(self, name: str, request: Any, **others: Any) -> Any:
        for source, value in {"request": request, **others}.items():
            if value is not None:
                self.sources[name] = source
                return value
        raise ValueError(f"{name} has no default")


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _prompts(prompt: Any) -> tuple[str, str]:
    if isinstance(prompt, str):
        prompt = {"prompt": prompt}
    for name in ("prompt_embeds", "negative_prompt_embeds"):
        if prompt.get(name) is not None:
            raise RequestError(f"{name} is given; this version encodes the prompt itself, pass `prompt`")
    text = prompt.get("prompt")
    if not isinstance(text, str) or not text.strip():
        raise RequestError(f"prompt = {text!r}: a text that is not empty is needed")
    negative = prompt.get("negative_prompt") or ""
    if not isinstance(negative, str):
        raise RequestError(f"negative_prompt = {negative!r}: a text is needed")
    return text, negative


def media_of(prompt: Any) -> dict[str, Any]:
    """What `multi_modal_data` of a prompt holds, by name; None and an empty list are nothing."""
    data = {} if isinstance(prompt, str) else prompt.get("multi_modal_data") or {}
    return {
        name: value for name, value in data.items() if not (value is None or (isinstance(value, list) and not value))
    }


def _media(prompt: Any, defaults: EngineDefaults) -> dict[str, Any]:
    """`media_of` the prompt, if it is what the model takes."""
    media = media_of(prompt)
    uses = {"image": defaults.images, "last_image": defaults.last_image}
    refused = [name for name in media if uses.get(name, "none") == "none"]
    if refused:
        taken = [name for name, use in uses.items() if use != "none"]
        what = f"text and {', '.join(taken)}" if taken else "text only"
        raise RequestError(f"the request carries {', '.join(refused)}; this model makes videos from {what}")
    for name, use in uses.items():
        if use == "required" and name not in media:
            raise RequestError(
                f"there is no {name}, which this model needs: a PIL image or the path of a file, in "
                f'{{"prompt": …, "multi_modal_data": {{"{name}": …}}}}'
            )
    if "last_image" in media and "image" not in media:
        raise RequestError("last_image is given without image, the first frame")
    return media


def _size_of_image(
    image: Any, height: int | None, width: int | None, defaults: EngineDefaults
) -> tuple[int | None, int | None]:
    """Height and width for a video of the image's aspect ratio: near the model's area, or fitting the side given."""
    if image is None or (height is not None and width is not None):
        return None, None
    stride, aspect = defaults.spatial_stride, image.height / image.width
    area = defaults.model.height * defaults.model.width
    by_height = math.sqrt(area * aspect) if width is None else width * aspect
    by_width = math.sqrt(area / aspect) if height is None else height / aspect
    made_height, made_width = (max(stride, round(size) // stride * stride) for size in (by_height, by_width))
    logger.info("height × width of %d×%d follow the image's aspect ratio", height or made_height, width or made_width)
    return made_height, made_width


def _scale(name: str, value: float | None, provided: bool) -> float | None:
    """The guidance scale if the caller gave one (vLLM-Omni fills the field and says so in a second one)."""
    if value is None or not provided:
        return None
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise RequestError(f"{name} = {value!r}: a number of at least 0 is needed (1 or less: no guidance)")
    return float(value)


def _positive(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RequestError(f"{name} = {value!r}: a whole number of at least 1 is needed")
    return value


def _size(name: str, value: Any, stride: int) -> int:
    pixels = _positive(name, value)
    rounded = pixels // stride * stride
    if rounded == 0:
        raise RequestError(f"{name} = {pixels}: the smallest size is {stride} pixels")
    if rounded != pixels:
        logger.warning("%s = %d is not a multiple of %d; generating %d", name, pixels, stride, rounded)
    return rounded


def _frames(value: Any, stride: int, at_least: int = 1) -> int:
    frames = _positive("num_frames", value)
    if frames // stride * stride + 1 < at_least:
        raise RequestError(f"num_frames = {frames}: a first and a last frame need {stride + 1} or more")
    adjusted = frames if frames % stride == 1 else frames // stride * stride + 1
    if adjusted != frames:
        logger.warning("num_frames = %d is not %d k + 1; generating %d frames", frames, stride, adjusted)
    return adjusted


def _number(value: Any) -> float:
    """`value` as a number, NaN where it is none."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return math.nan


def _boundary_ratio(value: Any) -> float:
    boundary = _number(value)
    if not 0.0 <= boundary <= 1.0:
        raise RequestError(f"boundary_ratio = {value!r}: a share of the 1000 timesteps, 0 to 1, is needed")
    return boundary


def _fps(value: Any) -> float:
    fps = _number(value)
    if not fps > 0 or not math.isfinite(fps):
        raise RequestError(f"fps = {value!r}: a positive number of frames a second is needed")
    return fps


def _seed(value: Any, outputs: int) -> int | None:
    if value is None:
        return None
    last = MAX_SEED - outputs + 1
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= last:
        raise RequestError(f"seed = {value!r}: a whole number from 0 to {last} is needed")
    return value


def _flow_shift(value: Any) -> float:
    shift = _number(value)
    if not shift > 0 or not math.isfinite(shift):
        raise RequestError(f"flow_shift = {value!r}: a positive number is needed (Wan2.2: 5 for 720p, 12 for 480p)")
    return shift


def _choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    chosen = str(value).strip().lower()
    if chosen not in choices:
        raise RequestError(f"{name} = {value!r}: valid values are {', '.join(choices)}")
    return chosen
