# SPDX-License-Identifier: Apache-2.0
"""Tiny trained checkpoints of Wan2.2's two-expert layout. See the README of this distribution for what they can do."""

from __future__ import annotations

import shutil
from pathlib import Path

from .__about__ import __version__

FRAMES, HEIGHT, WIDTH = 17, 64, 64
"""The only size of video that the checkpoint was trained on, in frames and pixels."""

FLOW_SHIFT = 3.0
"""The shift of the noise levels that it was trained with; vLLM-Omni takes it as a setting of the engine."""


def model_path() -> Path:
    """The folder of the checkpoint, in diffusers' layout: `WanPipeline.from_pretrained(model_path())`.

    Raises:
        FileNotFoundError: this installation carries no checkpoint.
    """
    return _data("t2v")


def write_image_to_video(folder: str | Path) -> Path:
    """Write the image-to-video sibling, for `WanImageToVideoPipeline.from_pretrained(…)`.

    It has experts of its own, with the condition channels of I2V-A14B, and everything else of the text-to-video
    checkpoint; this distribution carries that once.

    Args:
        folder: made if missing; an earlier copy in it is overwritten.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: this installation carries no checkpoint.
    """
    folder = Path(folder)
    for source in (_data("t2v"), _data("i2v")):
        shutil.copytree(source, folder, dirs_exist_ok=True)
    return folder


def _data(name: str) -> Path:
    folder = Path(__file__).parent / name
    if not (folder / "model_index.json").is_file():
        raise FileNotFoundError(
            f"{folder} holds no checkpoint: this installation of omni-neuron-shapes was built without its data. "
            "tools/shapes/train.py of the repository makes it."
        )
    return folder


__all__ = ["FLOW_SHIFT", "FRAMES", "HEIGHT", "WIDTH", "__version__", "model_path", "write_image_to_video"]
