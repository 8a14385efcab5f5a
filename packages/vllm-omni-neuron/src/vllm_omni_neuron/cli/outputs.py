# SPDX-License-Identifier: Apache-2.0
"""The files of a generation: its videos, with numbered names where they are several."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_omni_neuron.video import VideoInfo


def video_paths(output: Path, count: int) -> list[Path]:
    """`video.mp4` for one video, `video-1.mp4` and so on for several, in the order of their seeds."""
    if count == 1:
        return [output]
    width = len(str(count))
    return [output.with_name(f"{output.stem}-{number:0{width}}{output.suffix}") for number in range(1, count + 1)]


def write_videos(result_output: Any, output: Path, fps: float | None) -> dict[Path, VideoInfo]:
    """Write every video of vLLM-Omni's `result_output`, encoded as its online endpoint does.

    Args:
        result_output: Of the request.
        output: The file, or what the numbered names derive from.
        fps: Frames per second that the user asked for.

    Returns:
        What each file holds, read back from it.
    """
    from vllm_omni_neuron.video import encode_mp4, fps_from_output, read_video_info, videos_from_output

    videos = videos_from_output(result_output)
    rate = fps_from_output(result_output, fps)
    written = {}
    for path, frames in zip(video_paths(output, len(videos)), videos, strict=True):
        path.write_bytes(encode_mp4(frames, rate))
        written[path] = read_video_info(path)
    return written
