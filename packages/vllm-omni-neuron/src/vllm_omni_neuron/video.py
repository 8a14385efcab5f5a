# SPDX-License-Identifier: Apache-2.0
"""MP4 files, encoded exactly as vLLM-Omni's `POST /v1/videos/sync` encodes its response.

Equal frames at equal fps give equal bytes offline and online, because the encoder, its settings and the number of its
conversion threads are vLLM-Omni's own. Its names are private there; the version window of this package pins them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The codec settings and the frame rate of the online endpoint for a request that names neither.
ONLINE_CODEC_OPTIONS = {"preset": "ultrafast", "threads": "0"}
ONLINE_DEFAULT_FPS = 24.0


@dataclass(frozen=True)
class VideoInfo:
    """What a video file holds."""

    frames: int
    width: int
    height: int
    fps: float

    @property
    def seconds(self) -> float:
        """Length of the video."""
        return self.frames / self.fps


def encode_mp4(frames: Any, fps: float) -> bytes:
    """Encode one video as the online endpoint does.

    Args:
        frames: `[T, H, W, 3]`, a tensor, an array or a list of frames: uint8, or floating point in [0, 1] or [−1, 1]
            (vLLM-Omni's own rule: tensors are always read as [−1, 1], arrays only where a value lies outside [0, 1]).
        fps: Frames per second.

    Raises:
        ValueError: `fps` is not positive, or `frames` is not one video.
    """
    with _root_logger_kept():
        from vllm_omni.entrypoints.openai import serving_video
        from vllm_omni.entrypoints.openai.video_api_utils import _encode_video_bytes, _PlanarFrameConverter

    if not fps > 0:
        raise ValueError(f"fps is {fps}; it must be positive")
    converter = _PlanarFrameConverter(max_workers=serving_video._VIDEO_RESPONSE_FRAME_CONVERSION_WORKERS)
    try:
        encoded: bytes = _encode_video_bytes(
            frames, fps=fps, video_codec_options=dict(ONLINE_CODEC_OPTIONS), frame_converter=converter
        )
    finally:
        converter.shutdown()
    return encoded


@contextlib.contextmanager
def _root_logger_kept() -> Iterator[None]:
    """Import vLLM's server modules meanwhile: a library that they load raises the root logger's level to ERROR.

    It raises that of the handlers, too, which would silence the caller's own warnings from then on.
    """
    root = logging.getLogger()
    places: list[logging.Logger | logging.Handler] = [root, *root.handlers]
    levels = [(place, place.level) for place in places]
    try:
        yield
    finally:
        for place, level in levels:
            place.setLevel(level)


def frames_from_output(output: Any) -> Any:
    """The frames of the one video in a request's output.

    Raises:
        ValueError: The output holds no video, or more than one.
    """
    videos = videos_from_output(output)
    if len(videos) != 1:
        raise ValueError(f"expected one video in the output, found {len(videos)}")
    return videos[0]


def videos_from_output(output: Any) -> list[Any]:
    """The frames of each video in a request's output, as the online endpoint finds them.

    Raises:
        ValueError: The output holds none.
    """
    with _root_logger_kept():
        from vllm_omni.entrypoints.openai.serving_video import OmniOpenAIServingVideo

    multimodal = output.multimodal_output
    payload = output.images or (multimodal.get("video") if isinstance(multimodal, Mapping) else None)
    videos = OmniOpenAIServingVideo._normalize_video_outputs(payload)
    if not videos:
        raise ValueError("expected a video in the output, found none")
    return list(videos)


def fps_from_output(output: Any, requested: float | None) -> float:
    """Frames per second of the file: what was asked for, else what the model reports, else the online default."""
    if requested is not None:
        return float(requested)
    multimodal = output.multimodal_output
    reported = multimodal.get("fps") if isinstance(multimodal, Mapping) else None
    return float(reported) if reported else ONLINE_DEFAULT_FPS


def read_video_info(path: str | Path) -> VideoInfo:
    """Frame count (by decoding), size and frame rate of the video at `path`.

    Raises:
        ValueError: The file has no video stream.
    """
    import av

    with av.open(str(path)) as container:
        if not container.streams.video:
            raise ValueError(f"{path} has no video stream")
        stream = container.streams.video[0]
        frames = sum(1 for _ in container.decode(stream))
        return VideoInfo(frames, stream.codec_context.width, stream.codec_context.height, float(stream.average_rate))
