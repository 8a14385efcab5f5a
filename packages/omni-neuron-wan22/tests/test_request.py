# SPDX-License-Identifier: Apache-2.0
"""What a request becomes: defaults, rounding with a warning, and refusals that name the setting."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from omni_neuron_wan22 import GenerationRequest, RequestError
from omni_neuron_wan22.request import wan_rules
from vllm_omni_neuron.sdk import RequestRules, resolve_request


def resolve(prompt: Any = "a cat", rules: RequestRules | None = None, **settings: Any) -> GenerationRequest:
    # As the engine makes it: the request object marks which guidance scales the caller gave.
    request = OmniDiffusionRequest(
        prompt=prompt, sampling_params=OmniDiffusionSamplingParams(**settings), request_id="test"
    )
    resolved = resolve_request(request.prompt, request.sampling_params, rules or wan_rules())
    assert isinstance(resolved, GenerationRequest)
    return resolved


def test_defaults_are_those_of_wan() -> None:
    request = resolve()
    assert (request.height, request.width, request.num_frames, request.num_inference_steps) == (480, 832, 81, 40)
    assert (request.guidance_scale, request.guidance_scale_2) == (4.0, 4.0)
    assert (request.boundary_ratio, request.flow_shift, request.sample_solver) == (0.875, 5.0, "unipc")
    assert (request.fps, request.output_type, request.max_sequence_length) == (16.0, "np", 512)
    assert request.seed is not None  # vLLM-Omni draws one, so that all ranks have the same


@pytest.mark.parametrize(
    ("asked", "made"), [(80, 81), (81, 81), (82, 81), (83, 81), (84, 85), (17, 17), (2, 1), (4, 5)]
)
def test_frame_counts_become_4k_plus_1(asked: int, made: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert resolve(num_frames=asked).num_frames == made
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == (asked != made)
    assert all(str(asked) in warning and str(made) in warning for warning in warnings)


def test_one_frame_on_request() -> None:
    # num_frames = 1 is vLLM-Omni's way to say nothing; an explicit single frame comes as an extra argument.
    assert resolve(num_frames=1).num_frames == 81
    assert resolve(extra_args={"num_frames": 1}).num_frames == 1


@pytest.mark.parametrize(
    ("asked", "made"), [((720, 1280), (720, 1280)), ((725, 1283), (720, 1280)), ((17, 31), (16, 16))]
)
def test_sizes_are_rounded_down(
    asked: tuple[int, int], made: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        request = resolve(height=asked[0], width=asked[1])
    assert (request.height, request.width) == made
    warned = {name for name in ("height", "width") if name in caplog.text}
    assert warned == {name for name, a, b in zip(("height", "width"), asked, made, strict=True) if a != b}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"height": 0}, "height = 0: a whole number of at least 1"),
        ({"width": -16}, "width = -16"),
        ({"height": 8}, "height = 8: the smallest size is 16"),
        ({"num_frames": 0}, "num_frames = 0"),
        ({"num_frames": -3}, "num_frames = -3"),
        ({"num_inference_steps": 0}, "num_inference_steps = 0"),
        ({"guidance_scale": -1.0}, "guidance_scale = -1.0"),
        ({"guidance_scale": float("nan")}, "guidance_scale = nan"),
        ({"boundary_ratio": 1.5}, "boundary_ratio = 1.5"),
        ({"extra_args": {"flow_shift": "fast"}}, "flow_shift = 'fast'"),
        ({"extra_args": {"sample_solver": "ddim"}}, "sample_solver = 'ddim': valid values are unipc, euler"),
        ({"output_type": "gif"}, "output_type = 'gif': valid values are np, pt, pil, latent"),
        ({"extra_args": {"flow_shift": 0}}, "flow_shift = 0: a positive number"),
        ({"boundary_ratio": "half"}, "boundary_ratio = 'half'"),
        ({"num_inference_steps": 2.5}, "num_inference_steps = 2.5: a whole number"),
        ({"guidance_scale_2": float("inf")}, "guidance_scale_2 = inf"),
        ({"fps": 0}, "fps = 0.0: a positive number"),
        ({"seed": -1}, "seed = -1: a whole number from 0 to 9223372036854775807"),
        ({"seed": 2**63 - 1, "num_outputs_per_prompt": 3}, "a whole number from 0 to 9223372036854775805"),
        ({"num_outputs_per_prompt": 1.5}, "num_outputs_per_prompt = 1.5: a whole number"),
        ({"prompt": ""}, "prompt = ''"),
        ({"prompt": "  \n"}, "prompt = "),
        ({"prompt": {"prompt": "x", "multi_modal_data": {"image": object()}}}, "carries image; .* text only"),
        ({"prompt": {"prompt": "x", "multi_modal_data": {"last_image": object()}}}, "carries last_image; .* text only"),
        ({"prompt": {"prompt": "x", "negative_prompt": 3}}, "negative_prompt = 3"),
        ({"num_outputs_per_prompt": 0}, "num_outputs_per_prompt = 0"),
        ({"prompt": {"prompt": "x", "prompt_embeds": torch.zeros(1)}}, "prompt_embeds"),
    ],
)
def test_refusals_name_setting_value_and_valid_values(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        resolve(**settings)


def test_request_then_engine_then_default() -> None:
    engine = wan_rules(boundary_ratio=0.9, flow_shift=12.0)
    assert resolve(rules=engine).flow_shift == 12.0
    assert resolve(rules=engine).boundary_ratio == 0.9
    overridden = resolve(rules=engine, boundary_ratio=0.5, extra_args={"flow_shift": 3, "sample_solver": "Euler"})
    assert (overridden.flow_shift, overridden.boundary_ratio, overridden.sample_solver) == (3.0, 0.5, "euler")


def test_sources_say_where_each_setting_was_found() -> None:
    engine = wan_rules(flow_shift=12.0, checkpoint_boundary_ratio=0.9)
    request = resolve(rules=engine, height=64, num_frames=9, extra_args={"sample_solver": "euler"})
    assert (request.boundary_ratio, request.flow_shift) == (0.9, 12.0)
    assert request.sources == {
        "height": "request",
        "width": "default",
        "num_frames": "request",
        "num_inference_steps": "default",
        "num_outputs_per_prompt": "default",
        "guidance_scale": "default",
        "guidance_scale_2": "guidance_scale",
        "boundary_ratio": "checkpoint",
        "flow_shift": "engine",
        "sample_solver": "request",
        "fps": "default",
        "max_sequence_length": "default",
    }
    engine = wan_rules(boundary_ratio=0.8, checkpoint_boundary_ratio=0.9)
    assert resolve(rules=engine).boundary_ratio == 0.8
    assert resolve(rules=engine).sources["boundary_ratio"] == "engine"


def test_each_video_has_a_seed_of_its_own() -> None:
    assert resolve(seed=7, num_outputs_per_prompt=3).seeds == [7, 8, 9]
    assert resolve(generator=torch.Generator(), num_outputs_per_prompt=2).seeds == [None, None]


def test_guidance_reaches_both_experts() -> None:
    assert resolve(guidance_scale=3.0).guidance_scale_2 == 3.0
    request = resolve(guidance_scale=3.0, guidance_scale_2=1.0)
    assert (request.guidance_scale, request.guidance_scale_2) == (3.0, 1.0)
    assert resolve(guidance_scale=0.0).guidance_scale_2 == 0.0


def test_frame_rate_changes_the_container_only() -> None:
    request = resolve(fps=24, num_frames=33)
    assert (request.fps, request.num_frames) == (24.0, 33)


@pytest.mark.parametrize(
    ("asked", "frames"), [({}, 81), ({"fps": 24}, 81), ({"seconds": "5", "fps": 16}, 81), ({"num_frames": 33}, 33)]
)
def test_frames_of_an_online_request(asked: dict[str, Any], frames: int) -> None:
    """The endpoint makes a count of seconds and fps; without one the model's counts, and fps changes none of it."""
    from vllm_omni.entrypoints.openai.protocol.videos import VideoGenerationRequest

    online = VideoGenerationRequest(prompt="a cat", **asked).resolve_video_params(default_fps=None)
    settings = {} if online.num_frames is None else {"num_frames": online.num_frames}
    assert resolve(fps=online.fps, **settings).num_frames == frames
