# SPDX-License-Identifier: Apache-2.0
"""The images of a request: read, brought to the output's size, and turned into pixels. No vLLM needed."""

from __future__ import annotations

import logging
import os
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from vllm_omni_neuron.sdk.request import GenerationRequest, RequestError, media_of

logger = logging.getLogger(__name__)

IMAGES = ("image", "last_image")
# A stretch by less than this cannot be seen.
NOTICED_STRETCH = 0.05


def load_images(prompt: Any) -> Any:
    """A prompt whose images are RGB images in memory, whatever they were.

    Args:
        prompt: vLLM-Omni's: a string, or a mapping whose `multi_modal_data` may hold `image` (the first frame) and
            `last_image`, each a PIL image, the path of a file, or a list of one of those.

    Returns:
        A copy; what was given stays as it is. Other media are left for `resolve_request` to judge.

    Raises:
        RequestError: several images in the place of one, a file that is missing or no image, something else.
    """
    media = media_of(prompt)
    if not media:
        return prompt
    images = {name: _read(name, media[name]) for name in IMAGES if name in media}
    return {**prompt, "multi_modal_data": {**media, **images}}


def fit_images(prompt: Any, request: GenerationRequest) -> Any:
    """A prompt whose images have the output's height and width.

    What was done is kept beside them, in `additional_information["image"]`: the image's `size` [width, height], the
    `policy`, and `aspect_error`, by how much it was stretched or (policy "crop") what share of it was cut off. Images
    that fit already are left alone, so that it does no harm to call this twice.

    Args:
        prompt: as `load_images` returns it.
        request: the output's size, and the policy: "resize" stretches the image, "crop" keeps the aspect ratio and cuts
            what is too much on two opposite sides.
    """
    media = media_of(prompt)
    if not media:
        return prompt
    size = (request.width, request.height)
    report = _report(media["image"], request)
    if report["aspect_error"] > NOTICED_STRETCH and request.image_policy == "resize":
        logger.warning(
            "the image of %d×%d pixels (width × height) is stretched by %.0f %% to %d×%d; image_policy = crop cuts it",
            *media["image"].size,
            100 * report["aspect_error"],
            *size,
        )
    fitted = {name: _fit(media[name], size, request.image_policy) for name in IMAGES if name in media}
    information = {"image": report, **(prompt.get("additional_information") or {})}
    return {**prompt, "multi_modal_data": {**media, **fitted}, "additional_information": information}


def image_report(prompt: Any) -> dict[str, Any] | None:
    """What `fit_images` keeps; None for a prompt without an image."""
    information = {} if isinstance(prompt, str) else prompt.get("additional_information") or {}
    return information.get("image")


def pixels(image: Image.Image) -> torch.Tensor:
    """An RGB image as `[3, H, W]` float32 within ±1."""
    values = torch.from_numpy(np.array(image, dtype=np.float32) / 255.0)
    return 2.0 * values.permute(2, 0, 1) - 1.0


def _read(name: str, value: Any) -> Image.Image:
    if isinstance(value, list | tuple):
        if len(value) != 1:
            raise RequestError(f"{name} is a list of {len(value)}: one image is needed")
        [value] = value
    try:
        if isinstance(value, str | os.PathLike):
            with Image.open(value) as file:
                image = ImageOps.exif_transpose(file).convert("RGB")
        elif isinstance(value, Image.Image):
            image = ImageOps.exif_transpose(value).convert("RGB")
        else:
            raise RequestError(f"{name} is a {type(value).__name__}: a PIL image or the path of a file is needed")
    except UnidentifiedImageError:
        raise RequestError(f"{name} = {str(value)!r} is not an image that can be read") from None
    except (OSError, Image.DecompressionBombError) as error:
        raise RequestError(f"{name} = {str(value)!r} cannot be read: {error}") from error
    if min(image.size) < 1:
        raise RequestError(f"{name} has {image.width}×{image.height} pixels: an image is needed")
    return image


def _fit(image: Image.Image, size: tuple[int, int], policy: str) -> Image.Image:
    if image.size == size:
        return image
    if policy == "crop":
        return ImageOps.fit(image, size, Image.Resampling.LANCZOS)
    return image.resize(size, Image.Resampling.LANCZOS)


def _report(image: Image.Image, request: GenerationRequest) -> dict[str, Any]:
    stretch = (image.width * request.height) / (image.height * request.width)
    stretch = max(stretch, 1 / stretch)
    error = stretch - 1 if request.image_policy == "resize" else 1 - 1 / stretch
    return {"size": list(image.size), "policy": request.image_policy, "aspect_error": round(error, 4)}
