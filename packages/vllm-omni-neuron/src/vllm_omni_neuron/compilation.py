# SPDX-License-Identifier: Apache-2.0
"""What the model runner needs to compile: the kind of a component, the shape of a request, requests to warm up with."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from PIL import Image
from torch import nn
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from omni_neuron_runtime import Component
from vllm_omni_neuron.sdk.spec import ComponentKind, ModelSpec

KINDS: dict[str, Component] = {"_dit_modules": "transformer", "_encoder_modules": "text_encoder", "_vae_modules": "vae"}
# Whose compiler's arguments a component of a `ModelSpec` gets.
COMPILER_KINDS: dict[ComponentKind, Component] = {
    "transformer": "transformer",
    "text_encoder": "text_encoder",
    "image_encoder": "text_encoder",
    "vae": "vae",
    "vae_encoder": "vae_encoder",
}
# Enough that every expert has a step at the usual flow shifts: at a shift of 12 the third sigma of four is 0.92 and the
# last one 0.80, below A14B's boundary of 0.875.
WARMUP_STEPS = 4


def component_kinds(pipeline: nn.Module) -> dict[str, Component]:
    """The kind of every component that a pipeline declares, by name; it decides the compiler's arguments.

    Its `spec` says so, or where it has none, the lists that vLLM-Omni reads.
    """
    spec = getattr(pipeline, "spec", None)
    if isinstance(spec, ModelSpec):
        return {component.name: COMPILER_KINDS[component.kind] for component in spec.components}
    return {name: kind for attribute, kind in KINDS.items() for name in getattr(pipeline, attribute, ())}


def shape_of(requests: Sequence[Any]) -> str:
    """Height × width × frames of the first request, such as "480×832×81", for messages; empty where it has none."""
    if not requests:
        return ""
    parameters = requests[0].sampling_params
    sizes = [getattr(parameters, name, None) for name in ("height", "width", "num_frames")]
    return "×".join(str(size) for size in sizes if size) if all(sizes[:2]) else ""


def warmup_requests(shapes: Sequence[str], pipeline: Any = None) -> Iterator[OmniDiffusionRequest]:
    """A guided request of a few steps for each shape.

    Args:
        shapes: such as "480x832x81": height, width and frames; or "1024x1024" for a model of images.
        pipeline: of one that declares image input (`support_image_input`, as for vLLM-Omni's own dummy run) the
            requests bring a black image of the shape.

    Raises:
        ValueError: a shape that is not written so.
    """
    for index, shape in enumerate(shapes):
        match = re.fullmatch(r"(\d+)[x×](\d+)(?:[x×](\d+))?", str(shape))
        if match is None:
            raise ValueError(
                f"warmup_shapes: {shape!r} is not valid; write height x width x frames, such as 480x832x81, or of "
                "images height x width"
            )
        height, width, frames = (int(size or 1) for size in match.groups())
        # One frame that is asked for is repeated here: in `num_frames` a 1 means that no number was given.
        extra: dict[str, Any] = {"num_frames": frames} if match[3] else {}
        prompt: Any = {"prompt": "warm-up", "negative_prompt": "warm-up"}
        if getattr(pipeline, "support_image_input", False):
            image = Image.new(getattr(pipeline, "color_format", "RGB"), (width, height))
            prompt["multi_modal_data"] = {"image": image}
        yield OmniDiffusionRequest(
            prompt=prompt,
            sampling_params=OmniDiffusionSamplingParams(
                height=height,
                width=width,
                num_frames=frames,
                num_inference_steps=WARMUP_STEPS,
                seed=0,
                guidance_scale=4.0,
                extra_args=extra,
            ),
            request_id=f"neuron-warm-up-{index}",
        )
