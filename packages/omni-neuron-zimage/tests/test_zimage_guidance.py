# SPDX-License-Identifier: Apache-2.0
"""Settings of guidance, and a scheduler with a fixed shift, against diffusers' pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from omni_neuron_testkit.conformance import KitRequest, diffusers_reference
from omni_neuron_zimage.pipeline import NeuronZImagePipeline
from omni_neuron_zimage.tiny import TinyZImage, make_tiny_checkpoint
from vllm_omni_neuron.sdk import RequestError


@pytest.fixture(scope="module")
def fixed_shift(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the published checkpoints have it."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("zimage") / "fixed", TinyZImage(dynamic_shifting=False))


@pytest.fixture(scope="module")
def pipeline(fixed_shift: Path) -> NeuronZImagePipeline:
    config = OmniDiffusionConfig(model=str(fixed_shift), model_class_name="ZImagePipeline", dtype=torch.float32)
    made = NeuronZImagePipeline(od_config=config)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.mark.parametrize(
    ("scale", "settings"),
    [
        (0.0, {}),  # Z-Image-Turbo's: no guidance
        (0.5, {}),  # guidance, although the scale is below 1
        (4.0, {"cfg_normalization": True}),
        (4.0, {"cfg_normalization": 0.9, "cfg_truncation": 0.4}),
    ],
)
def test_guidance_is_that_of_diffusers(
    pipeline: NeuronZImagePipeline, fixed_shift: Path, scale: float, settings: dict[str, Any]
) -> None:
    from diffusers import ZImagePipeline

    asked = KitRequest(height=48, num_inference_steps=4, guidance_scale=scale, more={"max_sequence_length": 64})
    expected = diffusers_reference(ZImagePipeline, fixed_shift, asked, torch.float32, **settings).latents
    sampling = OmniDiffusionSamplingParams(**asked.sampling(), extra_args=settings)
    engine_request = OmniDiffusionRequest(asked.prompt_input(), sampling, request_id="test")
    with torch.no_grad():
        request = pipeline.resolve(engine_request.prompt, engine_request.sampling_params)
        latents = pipeline.diffuse(pipeline.prepare_latents(request), pipeline.encode(request))
    assert float((latents - expected).norm() / expected.norm()) < 1e-5
    if settings.get("cfg_truncation"):
        assert [pipeline.choose_model(float(t), request)[1] for t in pipeline.scheduler.timesteps] != [scale] * 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cfg_normalization": "much"}, "cfg_normalization = 'much': true, false or a number of at least 0 is needed"),
        ({"cfg_truncation": -1}, "cfg_truncation = -1: a number of at least 0 is needed"),
    ],
)
def test_wrong_settings_are_named(pipeline: NeuronZImagePipeline, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        pipeline.resolve("a cat", OmniDiffusionSamplingParams(extra_args=settings))


def test_what_is_too_long_for_the_positions_is_named(pipeline: NeuronZImagePipeline) -> None:
    for asked, message in (
        ({"height": 2048}, "height = 2048: the model's largest is 1024"),
        ({"max_sequence_length": 1000}, "max_sequence_length = 1000: the model's largest is 992"),
    ):
        request = pipeline.resolve("a cat", OmniDiffusionSamplingParams(**{"height": 64, "width": 64, **asked}))
        with pytest.raises(RequestError, match=message):
            pipeline.check_request(request, pipeline.checkpoint, pipeline.od_config)
