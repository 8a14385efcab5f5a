# SPDX-License-Identifier: Apache-2.0
"""Images of a request: what may stand for one, and how it comes to the output's size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vllm_omni_neuron.sdk import GenerationRequest, RequestError, fit_images, load_images, pixels

WIDE = Image.new("RGB", (1000, 500), "red")


@pytest.mark.parametrize("kind", ["path", "text", "image", "list", "palette", "transparent"])
def test_what_may_stand_for_an_image(kind: str, tmp_path: Path) -> None:
    image = Image.new("RGB", (6, 4), (10, 20, 30))
    path = tmp_path / "image.png"
    image.save(path)
    value = {
        "path": path,
        "text": str(path),
        "image": image,
        "list": [image],
        "palette": image.quantize(4),
        "transparent": image.convert("RGBA"),
    }[kind]
    prompt = {"prompt": "a cat", "multi_modal_data": {"image": value}}
    loaded = load_images(prompt)["multi_modal_data"]["image"]
    assert (loaded.mode, loaded.size, loaded.getpixel((5, 3))) == ("RGB", (6, 4), (10, 20, 30))
    assert prompt["multi_modal_data"]["image"] is value


def test_a_photograph_is_turned_as_its_camera_was_held(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees to see it upright
    Image.new("RGB", (6, 4)).save(tmp_path / "photo.jpg", exif=exif)
    loaded = load_images({"prompt": "a cat", "multi_modal_data": {"image": str(tmp_path / "photo.jpg")}})
    assert loaded["multi_modal_data"]["image"].size == (4, 6)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("nowhere.png", "image = 'nowhere.png' cannot be read: .*No such file"),
        (__file__, "is not an image that can be read"),
        (object(), "image is a object: a PIL image or the path of a file is needed"),
        ([WIDE, WIDE], "image is a list of 2: one image is needed"),
        (np.zeros((4, 6, 3), np.uint8), "image is a ndarray"),
    ],
)
def test_what_is_no_image(value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        load_images({"prompt": "a cat", "multi_modal_data": {"image": value}})


def test_a_truncated_file(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    Image.effect_noise((64, 64), 90).save(path)
    path.write_bytes(path.read_bytes()[:-1500])
    with pytest.raises(RequestError, match=r"image\.png' cannot be read: .*truncated"):
        load_images({"prompt": "a cat", "multi_modal_data": {"image": str(path)}})


@pytest.mark.parametrize(("policy", "left"), [("resize", "blue"), ("crop", "red")])
def test_policies(policy: str, left: str, caplog: pytest.LogCaptureFixture) -> None:
    """Twice as wide as the video: blue at both ends, red in the middle half."""
    image = Image.new("RGB", (64, 32), "blue")
    image.paste("red", (16, 0, 48, 32))
    request = GenerationRequest(
        prompt="a cat",
        negative_prompt="",
        height=32,
        width=32,
        num_frames=1,
        num_inference_steps=1,
        guidance_scale=1.0,
        seed=0,
        fps=1,
        max_sequence_length=8,
        output_type="pil",
        image_policy=policy,
    )
    fitted = fit_images({"prompt": "a cat", "multi_modal_data": {"image": image}}, request)
    made = fitted["multi_modal_data"]["image"]
    assert made.size == (32, 32)
    assert made.getpixel((2, 16)) == Image.new("RGB", (1, 1), left).getpixel((0, 0))
    error = {"resize": 1.0, "crop": 0.5}[policy]
    assert fitted["additional_information"]["image"] == {"size": [64, 32], "policy": policy, "aspect_error": error}
    assert ("stretched by 100 %" in caplog.text) == (policy == "resize")
    again = fit_images(fitted, request)
    assert again["multi_modal_data"]["image"] is made
    assert again["additional_information"] == fitted["additional_information"]


def test_pixels() -> None:
    values = pixels(Image.new("RGB", (3, 2), (0, 255, 51)))
    assert values.shape == (3, 2, 3)
    np.testing.assert_allclose(values[:, 0, 0].numpy(), [-1.0, 1.0, -0.6], atol=1e-6)
