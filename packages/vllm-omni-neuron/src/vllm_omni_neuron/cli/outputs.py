# SPDX-License-Identifier: Apache-2.0
"""The files of a generation: its videos or images, with numbered names where they are several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from vllm_omni_neuron.sdk import Output, SpecError, model_spec

if TYPE_CHECKING:
    from vllm_omni_neuron.video import VideoInfo

SUFFIXES: dict[Output, str] = {"video": ".mp4", "image": ".png"}


class FileInfo(NamedTuple):
    """What a file holds; an image has one frame and no frame rate."""

    width: int
    height: int
    frames: int = 1
    fps: float | None = None


def output_of(model: str) -> Output:
    """What the model of a checkpoint folder makes, by its spec; a model without one makes videos."""
    index = Path(model).expanduser() / "model_index.json"
    try:
        return model_spec(str(json.loads(index.read_text(encoding="utf-8")).get("_class_name"))).output
    except (SpecError, ValueError):
        return "video"  # what is wrong with the folder the engine says


def output_path(model: str, asked: Path | None) -> Path:
    """The file to write: what was asked for, else `video.mp4` or `image.png`.

    Raises:
        typer.BadParameter: a name that does not end as files of this model do.
    """
    made = output_of(model)
    if asked is None:
        return Path(made + SUFFIXES[made])
    if asked.suffix.lower() != SUFFIXES[made]:
        raise typer.BadParameter(
            f"{asked}: this model makes {made}s; the name must end in {SUFFIXES[made]}", param_hint="--output"
        )
    return asked


def numbered_paths(output: Path, count: int) -> list[Path]:
    """`video.mp4` for one video, `video-1.mp4` and so on for several, in the order of their seeds."""
    if count == 1:
        return [output]
    width = len(str(count))
    return [output.with_name(f"{output.stem}-{number:0{width}}{output.suffix}") for number in range(1, count + 1)]


def write_outputs(result_output: Any, output: Path, fps: float | None) -> dict[Path, FileInfo]:
    """Write every video or image of vLLM-Omni's `result_output`, videos encoded as its online endpoint does.

    Args:
        result_output: Of the request.
        output: The file, or what the numbered names derive from; its suffix says which of the two.
        fps: Frames per second that the user asked for.

    Returns:
        What each file holds; of a video read back from it.

    Raises:
        ValueError: the output holds none.
    """
    if output.suffix.lower() == SUFFIXES["image"]:
        return _write_images(result_output, output)
    from vllm_omni_neuron.video import encode_mp4, fps_from_output, read_video_info, videos_from_output

    videos = videos_from_output(result_output)
    rate = fps_from_output(result_output, fps)
    written = {}
    for path, frames in zip(numbered_paths(output, len(videos)), videos, strict=True):
        path.write_bytes(encode_mp4(frames, rate))
        written[path] = _info(read_video_info(path))
    return written


def _write_images(result_output: Any, output: Path) -> dict[Path, FileInfo]:
    images = list(result_output.images or [])
    if not images:
        raise ValueError("expected an image in the output, found none")
    written = {}
    for path, image in zip(numbered_paths(output, len(images)), images, strict=True):
        image.save(path)
        written[path] = FileInfo(*image.size)
    return written


def _info(video: VideoInfo) -> FileInfo:
    return FileInfo(video.width, video.height, video.frames, video.fps)
