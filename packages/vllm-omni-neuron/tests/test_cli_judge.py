# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-neuron judge` on rendered videos."""

from __future__ import annotations

import json
import sys

import av
import numpy as np
import pytest
from typer.testing import CliRunner

from omni_neuron_testkit import Subject, render
from vllm_omni_neuron.cli import app


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    path = tmp_path_factory.mktemp("judge") / "clip.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=16)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for picture in (render(Subject("blue", "triangle", "up")) * 255).astype(np.uint8):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return path


def judge(*arguments):
    return CliRunner().invoke(app, ["judge", *map(str, arguments)])


def test_says_what_it_sees(video):
    result = judge(video)
    assert result.exit_code == 0
    assert "blue" in result.stdout and "triangle" in result.stdout and "up" in result.stdout
    assert "well-formed" in result.stdout


def test_as_asked(video):
    result = judge(video, "--prompt", "A blue triangle moving up.", "--strict")
    assert result.exit_code == 0 and "as asked" in result.stdout


def test_not_as_asked(video):
    result = judge(video, "--prompt", "a blue triangle moving down", "--json")
    assert result.exit_code == 1
    verdict = json.loads(result.stdout)
    assert verdict["right"] is False and verdict["direction"] == "up" and verdict["well_formed"] is True


def test_a_prompt_without_a_subject_is_wrong_usage(video):
    result = judge(video, "--prompt", "a panda")
    assert result.exit_code == 2 and "does not name exactly one of each" in result.stderr


def test_strict_needs_a_prompt(video):
    assert judge(video, "--strict").exit_code == 2


def test_a_file_that_is_no_video(tmp_path):
    path = tmp_path / "notes.mp4"
    path.write_text("no video")
    result = judge(path)
    assert result.exit_code == 2 and "notes.mp4" in result.stderr


def test_without_the_testkit(video, monkeypatch):
    monkeypatch.setitem(sys.modules, "omni_neuron_testkit", None)
    result = judge(video)
    assert result.exit_code == 1 and "uv pip install omni-neuron-testkit" in result.stderr
