# SPDX-License-Identifier: Apache-2.0
"""A request's images: which ones a model of Wan2.2 takes, and the size of the video that follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.errors import OmniClientError
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from omni_neuron_wan22 import GenerationRequest, RequestError, TinyWan, make_tiny_checkpoint
from omni_neuron_wan22.pipeline_i2v import get_neuron_wan22_pre_process_func
from omni_neuron_wan22.request import wan_rules
from vllm_omni_neuron.sdk import RequestRules, resolve_request

I2V = wan_rules("i2v", images="required", last_image="optional")
TI2V = wan_rules("ti2v", spatial_stride=32, images="optional")
WIDE = Image.new("RGB", (1000, 500), "red")


def request_of(media: dict[str, Any], **settings: Any) -> OmniDiffusionRequest:
    return OmniDiffusionRequest(
        prompt={"prompt": "a cat", "multi_modal_data": media},
        sampling_params=OmniDiffusionSamplingParams(**settings),
        request_id="test",
    )


def resolve(rules: RequestRules, media: dict[str, Any], **settings: Any) -> GenerationRequest:
    request = request_of(media, **settings)
    resolved = resolve_request(request.prompt, request.sampling_params, rules)
    assert isinstance(resolved, GenerationRequest)
    return resolved


def test_defaults_of_the_models() -> None:
    i2v = resolve(I2V, {"image": Image.new("RGB", (832, 480))})
    assert (i2v.height, i2v.width, i2v.num_frames, i2v.num_inference_steps) == (480, 832, 81, 40)
    assert (i2v.guidance_scale, i2v.boundary_ratio, i2v.fps, i2v.image_policy) == (5.0, 0.9, 16.0, "resize")
    ti2v = resolve(TI2V, {})
    assert (ti2v.height, ti2v.width, ti2v.num_frames, ti2v.num_inference_steps) == (704, 1280, 121, 50)
    assert (ti2v.guidance_scale, ti2v.boundary_ratio, ti2v.fps) == (5.0, 0.0, 24.0)
    # 16 pixels of the VAE times 2 of the patch.
    assert [getattr(resolve(TI2V, {}, height=720, width=1280), side) for side in ("height", "width")] == [704, 1280]


@pytest.mark.parametrize(
    ("rules", "size", "asked", "made"),
    [
        (I2V, (1000, 500), {"height": 480, "width": 832}, (480, 832)),
        (I2V, (1000, 500), {}, (432, 880)),  # the area of 480 × 832 at most, multiples of 16
        (I2V, (500, 1000), {}, (880, 432)),
        (I2V, (1000, 500), {"height": 320}, (320, 640)),
        (I2V, (1000, 500), {"width": 320}, (160, 320)),
        (TI2V, (1000, 1000), {}, (928, 928)),
        (TI2V, (3000, 100), {}, (160, 5184)),
    ],
)
def test_size(rules: RequestRules, size: tuple[int, int], asked: dict[str, int], made: tuple[int, int]) -> None:
    request = resolve(rules, {"image": Image.new("RGB", size)}, **asked)
    assert (request.height, request.width) == made
    sources = {side: request.sources[side] for side in ("height", "width")}
    assert sources == {side: "request" if side in asked else "image" for side in sources}


@pytest.mark.parametrize(
    ("rules", "media", "message"),
    [
        (I2V, {}, "there is no image, which this model needs"),
        (I2V, {"image": []}, "there is no image"),
        (I2V, {"image": WIDE, "audio": 1}, "carries audio; this model makes videos from text and image, last_image"),
        (TI2V, {"image": WIDE, "last_image": WIDE}, "carries last_image; this model makes videos from text and image"),
        (wan_rules(images="optional", last_image="optional"), {"last_image": WIDE}, "without image"),
        (wan_rules(images="required", last_image="required"), {"image": WIDE}, "there is no last_image"),
    ],
)
def test_images_that_the_model_does_not_take(rules: RequestRules, media: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        resolve(rules, media)


def test_settings_that_do_not_fit_the_image() -> None:
    with pytest.raises(RequestError, match="num_frames = 3: a first and a last frame need 5 or more"):
        resolve(I2V, {"image": WIDE, "last_image": WIDE}, num_frames=3)
    with pytest.raises(RequestError, match="image_policy = 'pad': valid values are resize, crop"):
        resolve(I2V, {"image": WIDE}, extra_args={"image_policy": "pad"})


@pytest.fixture(scope="module")
def image_to_video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = TinyWan(task="i2v", num_layers=1, vae_base_dim=8, text_layers=1)
    return make_tiny_checkpoint(tmp_path_factory.mktemp("i2v") / "tiny", sizes)


def test_before_a_worker_sees_the_request(image_to_video: Path, tmp_path: Path) -> None:
    WIDE.save(tmp_path / "wide.png")
    config = OmniDiffusionConfig(model=str(image_to_video), additional_config={"image_policy": "crop"})
    pre_process = get_neuron_wan22_pre_process_func(config)
    media = {"image": str(tmp_path / "wide.png"), "last_image": [WIDE]}
    request = pre_process(request_of(media, height=70, width=100))
    sent = request.prompt["multi_modal_data"]
    assert {name: image.size for name, image in sent.items()} == {"image": (96, 64), "last_image": (96, 64)}
    assert (request.sampling_params.height, request.sampling_params.width) == (64, 96)
    assert request.prompt["additional_information"]["image"]["policy"] == "crop"
    # The one that the engine's client gets as status 400.
    for wrong in ({}, {"image": "nowhere.png"}, {"image": WIDE, "video": 1}):
        with pytest.raises(OmniClientError):
            pre_process(request_of(wrong))


def test_an_engine_is_told_its_wrong_policy(image_to_video: Path) -> None:
    config = OmniDiffusionConfig(model=str(image_to_video), additional_config={"image_policy": "pad"})
    with pytest.raises(ValueError, match="image_policy = 'pad': valid values are resize, crop"):
        get_neuron_wan22_pre_process_func(config)
