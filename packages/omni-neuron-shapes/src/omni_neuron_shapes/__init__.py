# SPDX-License-Identifier: Apache-2.0
"""A tiny trained checkpoint of Wan2.2's two-expert layout. See the README of this distribution for what it can do."""

from __future__ import annotations

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
    folder = Path(__file__).parent / "t2v"
    if not (folder / "model_index.json").is_file():
        raise FileNotFoundError(
            f"{folder} holds no checkpoint: this installation of omni-neuron-shapes was built without its data. "
            "tools/shapes/train.py of the repository makes it."
        )
    return folder


__all__ = ["FLOW_SHIFT", "FRAMES", "HEIGHT", "WIDTH", "__version__", "model_path"]
