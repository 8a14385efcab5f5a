# SPDX-License-Identifier: Apache-2.0
"""MP4 files: the bytes of vLLM-Omni's online endpoint for the same frames."""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_omni_neuron import video
from vllm_omni_neuron.video import VideoInfo, encode_mp4, fps_from_output, frames_from_output, read_video_info


def frames(kind: str) -> np.ndarray | torch.Tensor:
    """Nine frames of 48×32 in the given representation."""
    pixels = np.random.default_rng(0).random((9, 32, 48, 3), dtype=np.float32)
    return {
        "uint8": (pixels * 255).astype(np.uint8),
        "float": pixels,
        "signed": pixels * 2 - 1,
        "tensor": torch.from_numpy(pixels * 2 - 1),
    }[kind]


@pytest.mark.parametrize("kind", ["uint8", "float", "signed", "tensor"])
def test_bytes_equal_those_of_the_online_endpoint(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through what answers `POST /v1/videos/sync`; only the generation before it is replaced."""
    with video._root_logger_kept():
        from vllm_omni.entrypoints.openai.protocol.videos import VideoGenerationRequest
        from vllm_omni.entrypoints.openai.serving_video import OmniOpenAIServingVideo

    output = SimpleNamespace(
        images=[frames(kind)], multimodal_output={"fps": 16.0, "metadata": {}}, stage_durations={}, peak_memory_mb=0.0
    )

    async def generation(*args: object, **kwargs: object) -> SimpleNamespace:
        return output

    serving = OmniOpenAIServingVideo(SimpleNamespace(), model_name="m", stage_configs=[])
    monkeypatch.setattr(serving, "_run_generation", generation)
    try:
        online, *_ = asyncio.run(serving.generate_video_bytes(VideoGenerationRequest(prompt="p"), "request"))
    finally:
        serving.shutdown()
    assert encode_mp4(frames_from_output(output), fps_from_output(output, None)) == online


def test_a_file_reads_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    path.write_bytes(encode_mp4(frames("uint8"), 12))
    assert read_video_info(path) == VideoInfo(frames=9, width=48, height=32, fps=12.0)
    assert read_video_info(path).seconds == 0.75


def test_fps_must_be_positive() -> None:
    with pytest.raises(ValueError, match="fps is 0; it must be positive"):
        encode_mp4(frames("uint8"), 0)


def test_fps_are_asked_for_or_reported_or_those_of_the_endpoint() -> None:
    reported = SimpleNamespace(multimodal_output={"fps": 16.0})
    assert fps_from_output(reported, 8.0) == 8.0
    assert fps_from_output(reported, None) == 16.0
    assert fps_from_output(SimpleNamespace(multimodal_output={}), None) == 24.0


def test_one_video_is_expected() -> None:
    one = frames("uint8")
    assert frames_from_output(SimpleNamespace(images=[one[None]], multimodal_output={})).shape == (9, 32, 48, 3)
    for images in ([], [np.stack([one, one])]):
        with pytest.raises(ValueError, match=r"expected (a|one) video in the output"):
            frames_from_output(SimpleNamespace(images=images, multimodal_output={}))


def test_a_file_without_video(tmp_path: Path) -> None:
    path = tmp_path / "audio.wav"
    import wave

    with wave.open(str(path), "wb") as audio:
        audio.setnchannels(1)
        audio.setsampwidth(2)
        audio.setframerate(8000)
        audio.writeframes(bytes(1600))
    with pytest.raises(ValueError, match="has no video stream"):
        read_video_info(path)


def test_importing_vllms_server_does_not_silence_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    guilty = "model_hosting_container_standards.logging_config"
    root = logging.getLogger()
    places = [root, *root.handlers]
    before = [place.level for place in places]
    monkeypatch.delitem(sys.modules, guilty, raising=False)
    with video._root_logger_kept():
        importlib.import_module(guilty)
        assert root.level == logging.ERROR
    assert [place.level for place in places] == before
