# SPDX-License-Identifier: Apache-2.0
"""What a request asks for, after defaults, engine settings and checks: one frozen object that a pipeline follows.

Every setting is looked up in one order: the request, then the engine's configuration, then the checkpoint, then the
model's default. Where each was found is part of the result. No vLLM needed.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

logger = logging.getLogger(__name__)

OUTPUT_TYPES = ("np", "pt", "pil", "latent")
# By what a model makes.
DEFAULT_OUTPUT_TYPES = {"image": "pil", "video": "np"}
IMAGE_POLICIES = ("resize", "crop")
MAX_SEED = 2**63 - 1
ImageUse = Literal["none", "optional", "required"]
"""Whether a request brings an image."""
# Where the sources stand in `extra_args` of a request that was resolved before; see `resolve_request`.
SOURCES = "_sources"
# What the pipeline and the lookups read of `extra_args` beside a model's own settings.
_EXTRA = ("guidance_scale", "image_policy", "profile", SOURCES)


class RequestError(ValueError):
    """A request that cannot be served; the message names the setting, its value and what would be valid."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A checked request. A model with settings of its own adds fields in a subclass; see `Setting`.

    Attributes:
        prompt: the text as given; never empty.
        negative_prompt: what to steer away from; empty is allowed.
        height, width: pixels, multiples of `RequestRules.spatial_stride`.
        num_frames: video frames, a multiple of `RequestRules.temporal_stride` and one; 1 for an image.
        num_inference_steps: solver steps.
        guidance_scale: of classifier-free guidance; 1 or less usually means none.
        seed: of the first output's noise; None where the caller brought generators or latents.
        fps: frames a second of the container; does not change what is generated.
        max_sequence_length: text tokens.
        output_type: one of `OUTPUT_TYPES`.
        num_outputs_per_prompt: outputs; number k of a seeded request has the seed `seed + k`.
        image_policy: how an image comes to the output's size, one of `IMAGE_POLICIES`.
        sources: where each setting was found: "request", "engine", "checkpoint" or "default"; the other setting's name
            where one follows another, "image" where a size follows the image's.
    """

    prompt: str
    negative_prompt: str
    height: int
    width: int
    num_frames: int
    num_inference_steps: int
    guidance_scale: float
    seed: int | None
    fps: float
    max_sequence_length: int
    output_type: str
    num_outputs_per_prompt: int = 1
    image_policy: str = IMAGE_POLICIES[0]
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def seeds(self) -> list[int | None]:
        """The seed of each output's noise; None where the caller brought generators."""
        return [None if self.seed is None else self.seed + number for number in range(self.num_outputs_per_prompt)]


@dataclass(frozen=True)
class Setting:
    """A model's own setting, which becomes the field `name` of its request class.

    It is looked up in vLLM-Omni's sampling parameter of that name (unless it has vLLM-Omni's own default), in
    `extra_args`, in the engine's configuration, in the checkpoint, in the setting that it follows; then there is the
    default. None means not given everywhere.

    Attributes:
        name: of the setting and of the field.
        default: where nothing else says.
        check: takes name and value, returns the value to use, raises `RequestError`; see `check_positive`,
            `check_number` and `check_choice`.
        engine, checkpoint: what these say, if anything.
        follows: a setting that is resolved before, whose value stands in.
    """

    name: str
    default: Any
    check: Callable[[str, Any], Any]
    engine: Any = None
    checkpoint: Any = None
    follows: str | None = None


@dataclass(frozen=True, kw_only=True)
class RequestRules:
    """What a model, its checkpoint and the engine say about requests.

    Attributes:
        height, width, num_inference_steps, guidance_scale, max_sequence_length: defaults.
        num_frames, fps: of a video model, likewise.
        spatial_stride: pixels that height and width must be multiples of.
        temporal_stride: video frames per latent frame; None for an image model.
        images, last_image: which images a request brings.
        image_policy: the engine's; None for the default.
        output_type: where the request does not say; None for "np" of a video and "pil" of an image.
        settings: the model's own, in the order in which they are resolved.
        request_class: with a field for each of `settings`.
    """

    height: int
    width: int
    num_inference_steps: int
    guidance_scale: float
    max_sequence_length: int
    spatial_stride: int
    temporal_stride: int | None = None
    num_frames: int = 1
    fps: float = 16
    images: ImageUse = "none"
    last_image: ImageUse = "none"
    image_policy: str | None = None
    output_type: str | None = None
    settings: tuple[Setting, ...] = ()
    request_class: type[GenerationRequest] = GenerationRequest

    def __post_init__(self) -> None:
        fields = {field.name for field in dataclasses.fields(self.request_class)}
        unknown = [setting.name for setting in self.settings if setting.name not in fields]
        if unknown:
            raise ValueError(f"{self.request_class.__name__} has no field {', '.join(unknown)}, which settings names")

    @property
    def output(self) -> Literal["image", "video"]:
        """What the model makes."""
        return "image" if self.temporal_stride is None else "video"


def resolve_request(prompt: Any, sampling_params: Any, rules: RequestRules) -> GenerationRequest:
    """Check a request and fill its gaps.

    Args:
        prompt: a string, or a mapping with `prompt` and optionally `negative_prompt` and `multi_modal_data`, whose
            `image` and `last_image` are PIL images (see `load_images`).
        sampling_params: vLLM-Omni's `OmniDiffusionSamplingParams`. A name in `extra_args` that nothing reads is warned
            of. A request that was resolved before and filled with the result carries the sources of then in
            `extra_args[SOURCES]`.
        rules: of model, checkpoint and engine.

    Returns:
        A `rules.request_class`.

    Raises:
        RequestError: an empty prompt, a size or count below 1, an unknown output type, a `generator_device` other than
            the host, where noise is drawn, an image that the model does not take or none where it needs one, a setting
            of the model's own that its check refuses.
    """
    text, negative = _prompts(prompt)
    # Checked here, where it is an error of the request; torch would refuse it in the workers, on every rank.
    check_choice("generator_device", getattr(sampling_params, "generator_device", None) or "cpu", choices=("cpu",))
    media = _media(prompt, rules)
    extra = getattr(sampling_params, "extra_args", None) or {}
    if SOURCES not in extra:  # the workers resolve it again
        _warn_of_unknown(extra, rules)
    found = _Lookup()
    values: dict[str, Any] = {"num_frames": 1, "fps": 1.0}
    if rules.temporal_stride is None:
        _refuse_frames(sampling_params.num_frames)
    else:
        # "Not given" is 1 in vLLM-Omni's parameters, the right count for an image; a video has the model's.
        frames = sampling_params.num_frames
        frames = found("num_frames", extra.get("num_frames") if frames in (None, 1) else frames, rules.num_frames)
        fps = found("fps", sampling_params.resolved_frame_rate, rules.fps)
        values = {
            "num_frames": _frames(frames, rules.temporal_stride, at_least=2 if "last_image" in media else 1),
            "fps": check_number("fps", fps, needed="a positive number of frames a second", above=0),
        }
    scale = found("guidance_scale", _given("guidance_scale", sampling_params, extra), rules.guidance_scale)
    values["guidance_scale"] = check_guidance_scale("guidance_scale", scale)
    for setting in rules.settings:
        sources = {"engine": setting.engine, "checkpoint": setting.checkpoint}
        if setting.follows is not None:
            sources[setting.follows] = values[setting.follows]
        value = found(setting.name, _given(setting.name, sampling_params, extra), setting.default, **sources)
        values[setting.name] = setting.check(setting.name, value)
    steps = found("num_inference_steps", sampling_params.num_inference_steps, rules.num_inference_steps)
    outputs = sampling_params.num_outputs_per_prompt
    outputs = found("num_outputs_per_prompt", None if outputs == 1 else outputs, 1)
    length = found("max_sequence_length", sampling_params.max_sequence_length, rules.max_sequence_length)
    of_image = _size_of_image(media.get("image"), sampling_params.height, sampling_params.width, rules)
    height = found("height", sampling_params.height, rules.height, image=of_image[0])
    width = found("width", sampling_params.width, rules.width, image=of_image[1])
    policy = IMAGE_POLICIES[0]
    if media:
        policy = found("image_policy", extra.get("image_policy"), policy, engine=rules.image_policy)
    output_type = sampling_params.output_type or rules.output_type or DEFAULT_OUTPUT_TYPES[rules.output]
    return rules.request_class(
        prompt=text,
        negative_prompt=negative,
        height=_size("height", height, rules.spatial_stride),
        width=_size("width", width, rules.spatial_stride),
        num_inference_steps=check_positive("num_inference_steps", steps),
        num_outputs_per_prompt=check_positive("num_outputs_per_prompt", outputs),
        seed=_seed(sampling_params.seed, outputs),
        max_sequence_length=check_positive("max_sequence_length", length),
        output_type=check_choice("output_type", output_type, choices=OUTPUT_TYPES),
        image_policy=check_choice("image_policy", policy, choices=IMAGE_POLICIES),
        sources=dict(extra.get(SOURCES, found.sources)),
        **values,
    )


def check_positive(name: str, value: Any) -> int:
    """`value`, if it is a whole number of at least 1.

    Raises:
        RequestError: it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RequestError(f"{name} = {value!r}: a whole number of at least 1 is needed")
    return value


def check_number(
    name: str,
    value: Any,
    *,
    needed: str = "a number",
    above: float = -math.inf,
    at_least: float = -math.inf,
    at_most: float = math.inf,
) -> float:
    """`value` as a number, if it is finite and within the limits; for a `Setting`, with `functools.partial`.

    Args:
        name: of the setting.
        value: a number, or a text that is one.
        needed: what is valid, in words, for the message.
        above: a lower limit that is not valid itself.
        at_least, at_most: limits that are.

    Raises:
        RequestError: it is none, or outside.
    """
    number = _number(value)
    if not (above < number and at_least <= number <= at_most and math.isfinite(number)):
        raise RequestError(f"{name} = {value!r}: {needed} is needed")
    return number


def check_guidance_scale(name: str, value: Any) -> float:
    """`value`, if it can be a guidance scale: a finite number of at least 0.

    Raises:
        RequestError: it cannot.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise RequestError(f"{name} = {value!r}: a number of at least 0 is needed (1 or less: no guidance)")
    return float(value)


def check_choice(name: str, value: Any, *, choices: tuple[str, ...]) -> str:
    """The one of `choices` (lower case) that `value` is, whatever its case; for a `Setting`, with `functools.partial`.

    Raises:
        RequestError: it is none of them.
    """
    chosen = str(value).strip().lower()
    if chosen not in choices:
        raise RequestError(f"{name} = {value!r}: valid values are {', '.join(choices)}")
    return chosen


def media_of(prompt: Any) -> dict[str, Any]:
    """What `multi_modal_data` of a prompt holds, by name; None and an empty list are nothing."""
    data = {} if isinstance(prompt, str) else prompt.get("multi_modal_data") or {}
    return {
        name: value for name, value in data.items() if not (value is None or (isinstance(value, list) and not value))
    }


class _Lookup:
    """Takes each setting from the first place that has it, and keeps which that was."""

    def __init__(self) -> None:
        self.sources: dict[str, str] = {}

    def __call__(self, name: str, request: Any, default: Any, **others: Any) -> Any:
        for source, value in {"request": request, **others}.items():
            if value is not None:
                self.sources[name] = source
                return value
        self.sources[name] = "default"
        return default


def _given(name: str, sampling_params: Any, extra: Mapping[str, Any]) -> Any:
    """What the caller says of a setting; None for nothing.

    vLLM-Omni fills in some fields itself: what is its own default counts as not given, or, where it says so in a second
    field, what the caller has not given.
    """
    value = getattr(sampling_params, name, None)
    given = getattr(sampling_params, f"{name}_provided", value != getattr(type(sampling_params), name, None))
    return value if value is not None and given else extra.get(name)


def _warn_of_unknown(extra: Mapping[str, Any], rules: RequestRules) -> None:
    """Other names may be somebody else's, vLLM-Omni's for one; more likely they are misspelt."""
    settings = [setting.name for setting in rules.settings]
    known = {*settings, *_EXTRA, *(() if rules.temporal_stride is None else ("num_frames",))}
    unknown = [name for name in extra if name not in known]
    if unknown:
        valid = ", ".join(sorted(known - {SOURCES}))
        logger.warning("extra_args has %s, which nothing here reads; valid are %s", ", ".join(unknown), valid)


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


def _media(prompt: Any, rules: RequestRules) -> dict[str, Any]:
    """`media_of` the prompt, if it is what the model takes."""
    media = media_of(prompt)
    uses = {"image": rules.images, "last_image": rules.last_image}
    refused = [name for name in media if uses.get(name, "none") == "none"]
    if refused:
        taken = [name for name, use in uses.items() if use != "none"]
        what = f"text and {', '.join(taken)}" if taken else "text only"
        raise RequestError(f"the request carries {', '.join(refused)}; this model makes {rules.output}s from {what}")
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
    image: Any, height: int | None, width: int | None, rules: RequestRules
) -> tuple[int | None, int | None]:
    """Height and width for an output of the image's aspect ratio: near the model's area, or fitting the side given."""
    if image is None or (height is not None and width is not None):
        return None, None
    stride, aspect = rules.spatial_stride, image.height / image.width
    area = rules.height * rules.width
    by_height = math.sqrt(area * aspect) if width is None else width * aspect
    by_width = math.sqrt(area / aspect) if height is None else height / aspect
    made_height, made_width = (max(stride, round(size) // stride * stride) for size in (by_height, by_width))
    logger.info("height × width of %d×%d follow the image's aspect ratio", height or made_height, width or made_width)
    return made_height, made_width


def _size(name: str, value: Any, stride: int) -> int:
    pixels = check_positive(name, value)
    rounded = pixels // stride * stride
    if rounded == 0:
        raise RequestError(f"{name} = {pixels}: the smallest size is {stride} pixels")
    if rounded != pixels:
        logger.warning("%s = %d is not a multiple of %d; generating %d", name, pixels, stride, rounded)
    return rounded


def _refuse_frames(value: Any) -> None:
    if value not in (None, 1):
        raise RequestError(f"num_frames = {value!r}: this model makes images; leave it unset")


def _frames(value: Any, stride: int, at_least: int = 1) -> int:
    frames = check_positive("num_frames", value)
    adjusted = frames if (frames - 1) % stride == 0 else frames // stride * stride + 1
    if adjusted < at_least:
        raise RequestError(f"num_frames = {frames}: a first and a last frame need {stride + 1} or more")
    if adjusted != frames:
        logger.warning("num_frames = %d is not %d k + 1; generating %d frames", frames, stride, adjusted)
    return adjusted


def _number(value: Any) -> float:
    """`value` as a number, NaN where it is none."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return math.nan


def _seed(value: Any, outputs: int) -> int | None:
    if value is None:
        return None
    last = MAX_SEED - outputs + 1
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= last:
        raise RequestError(f"seed = {value!r}: a whole number from 0 to {last} is needed")
    return value
