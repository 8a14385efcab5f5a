# SPDX-License-Identifier: Apache-2.0
"""What Wan2.2's requests have beyond those of every model, and its defaults. No vLLM needed."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omni_neuron_wan22.scheduler import SAMPLE_SOLVERS
from vllm_omni_neuron import sdk
from vllm_omni_neuron.sdk import (
    ImageUse,
    RequestError,
    RequestRules,
    Setting,
    check_choice,
    check_guidance_scale,
    check_number,
)

if TYPE_CHECKING:
    from omni_neuron_wan22.checkpoint import Task

__all__ = ["DEFAULTS", "GenerationRequest", "ModelDefaults", "RequestError", "wan_rules"]

DEFAULT_NUM_INFERENCE_STEPS = 40
DEFAULT_FLOW_SHIFT = 5.0
DEFAULT_MAX_SEQUENCE_LENGTH = 512


@dataclass(frozen=True, kw_only=True)
class GenerationRequest(sdk.GenerationRequest):
    """A checked request.

    Attributes:
        guidance_scale: of the high-noise expert; 1 or less means none.
        guidance_scale_2: of the low-noise expert.
        boundary_ratio: timesteps of at least this share of 1000 belong to the high-noise expert.
        flow_shift: shift of the noise schedule.
        sample_solver: one of `SAMPLE_SOLVERS`.
    """

    guidance_scale_2: float
    boundary_ratio: float
    flow_shift: float
    sample_solver: str


@dataclass(frozen=True)
class ModelDefaults:
    """What a request gets where nothing else says; the values here are T2V-A14B's."""

    height: int = 480
    width: int = 832
    num_frames: int = 81
    num_inference_steps: int = DEFAULT_NUM_INFERENCE_STEPS
    guidance_scale: float = 4.0
    boundary_ratio: float = 0.875
    fps: int = 16


DEFAULTS: dict[Task, ModelDefaults] = {
    "t2v": ModelDefaults(),
    "i2v": ModelDefaults(guidance_scale=5.0, boundary_ratio=0.9),
    # One expert, which takes every step: the boundary is 0.
    "ti2v": ModelDefaults(704, 1280, 121, num_inference_steps=50, guidance_scale=5.0, boundary_ratio=0.0, fps=24),
}


def wan_rules(
    task: Task = "t2v",
    *,
    boundary_ratio: float | None = None,
    checkpoint_boundary_ratio: float | None = None,
    flow_shift: float | None = None,
    image_policy: str | None = None,
    spatial_stride: int = 16,
    temporal_stride: int = 4,
    images: ImageUse = "none",
    last_image: ImageUse = "none",
) -> RequestRules:
    """What Wan2.2 says about requests.

    Args:
        task: whose defaults.
        boundary_ratio, flow_shift, image_policy: the engine's.
        checkpoint_boundary_ratio: of the checkpoint's index.
        spatial_stride: pixels that height and width must be multiples of.
        temporal_stride: video frames per latent frame.
        images, last_image: which images a request brings.
    """
    defaults = DEFAULTS[task]
    share = "a share of the 1000 timesteps, 0 to 1,"
    shift = "a positive number (default 5; vLLM-Omni notes 12 for 480p)"
    return RequestRules(
        height=defaults.height,
        width=defaults.width,
        num_frames=defaults.num_frames,
        num_inference_steps=defaults.num_inference_steps,
        guidance_scale=defaults.guidance_scale,
        max_sequence_length=DEFAULT_MAX_SEQUENCE_LENGTH,
        fps=defaults.fps,
        spatial_stride=spatial_stride,
        temporal_stride=temporal_stride,
        images=images,
        last_image=last_image,
        image_policy=image_policy,
        settings=(
            Setting("guidance_scale_2", None, check_guidance_scale, follows="guidance_scale"),
            Setting(
                "boundary_ratio",
                defaults.boundary_ratio,
                functools.partial(check_number, needed=share, at_least=0, at_most=1),
                engine=boundary_ratio,
                checkpoint=checkpoint_boundary_ratio,
            ),
            Setting(
                "flow_shift",
                DEFAULT_FLOW_SHIFT,
                functools.partial(check_number, needed=shift, above=0),
                engine=flow_shift,
            ),
            Setting("sample_solver", "unipc", functools.partial(check_choice, choices=SAMPLE_SOLVERS)),
        ),
        request_class=GenerationRequest,
    )
