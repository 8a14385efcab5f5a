# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-neuron compare` on rendered videos and on captures of the plugin's own tensor capture."""

from __future__ import annotations

import json
import sys

import av
import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from omni_neuron_testkit import Subject, render
from vllm_omni_neuron.capture import Ranks, TensorCapture
from vllm_omni_neuron.cli import app


def write_video(path, frames):
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=16)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for picture in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")))
        container.mux(stream.encode())
    return path


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """Two videos of one size, one smaller and one shorter."""
    folder = tmp_path_factory.mktemp("compare")
    red, blue = ((render(Subject(c, "circle", "up"))[:5] * 255).astype(np.uint8) for c in ("red", "blue"))
    variants = {"red": red, "blue": blue, "small": red[:, :32, :32], "short": red[:3]}
    return {name: write_video(folder / f"{name}.mp4", frames) for name, frames in variants.items()}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Pipeline:
    def __init__(self, dtype):
        self.transformer = Model().to(dtype)

    def predict_noise(self, x, timestep):
        return self.transformer(x)


def capture(folder, dtype=torch.float32, wrong_step=None):
    """Four steps of a little model, on two CP ranks that each have half of the tokens."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(4, 1, 64, 16, generator=generator)
    ranks = [0] if folder.name == "reference" else [0, 1]
    for rank in ranks:
        pipeline = Pipeline(dtype)
        settings = {"modules": ["blocks.0-1"], "capture_dir": str(folder)}
        recorder = TensorCapture(settings, {"transformer": pipeline.transformer}, lambda rank=rank: Ranks(0, rank, 0))
        recorder.observe(pipeline)
        recorder.enable("fox")
        for step, timestep in enumerate((999.0, 700.0, 400.0, 100.0)):
            if step == wrong_step:
                pipeline.transformer.blocks[1].weight.data *= 1.2
            part = tokens[step].chunk(len(ranks), dim=1)[rank]
            pipeline.predict_noise(x=part.to(dtype), timestep=torch.tensor(timestep))
    return folder


def compare(*arguments):
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


def test_videos(videos, tmp_path):
    page = tmp_path / "page.html"
    result = compare(videos["red"], videos["blue"], "-o", page)
    assert result.exit_code == 0 and "PSNR" in result.stdout and str(page) in result.stdout
    assert "data:video/mp4;base64," in page.read_text()


def test_captures_and_videos(videos, tmp_path):
    reference, low = capture(tmp_path / "reference"), capture(tmp_path / "low", torch.bfloat16)
    ours = capture(tmp_path / "ours", torch.bfloat16)
    page = tmp_path / "page.html"
    arguments = (
        videos["red"],
        videos["red"],
        "--captures",
        reference,
        ours,
        "--low-precision",
        low,
        "--json",
        "-o",
        page,
    )
    result = compare(*arguments)
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["passed"] is True and figures["videos"]["identical"] is True
    assert [len(step["tensors"]) for step in figures["captures"]["steps"]] == [2] * 4
    assert figures["captures"]["ratios"] == pytest.approx([1.0] * 4)
    assert "The captures pass" in page.read_text()


def test_captures_that_fail(tmp_path):
    reference, ours = capture(tmp_path / "reference"), capture(tmp_path / "ours", wrong_step=3)
    result = compare(reference, ours, "-o", tmp_path / "page.html")
    assert result.exit_code == 1
    assert "fail" in result.stdout and "step 3: transformer.blocks.1: l2 error" in result.stderr
    assert compare(reference, reference, "-o", tmp_path / "page.html").exit_code == 0


def test_wrong_usage(videos, tmp_path):
    red, page = videos["red"], tmp_path / "page.html"
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.mp4").write_text("no video")
    for arguments, message in [
        ((red, videos["small"]), "the video is 32×32 pixels (width × height), the reference 64×64"),
        ((red, videos["short"]), "the video has 3 frames, the reference 5"),
        ((red, tmp_path / "nothing.mp4"), "nothing.mp4"),
        ((red, tmp_path / "notes.mp4"), "notes.mp4"),
        ((red, tmp_path / "empty"), "is a folder"),
        ((tmp_path / "empty", tmp_path / "empty"), "holds no captured step"),
        ((red, red, "--low-precision", tmp_path / "empty"), "--low-precision"),
    ]:
        result = compare(*arguments, "-o", page)
        assert result.exit_code == 2 and message in result.stderr.replace("\n", " "), (message, result.output)
    assert not page.exists()


def test_without_a_library(videos, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "skimage.metrics", None)
    result = compare(videos["red"], videos["red"], "-o", tmp_path / "page.html")
    assert result.exit_code == 1 and "uv pip install 'vllm-omni-neuron[compare]'" in result.stderr
