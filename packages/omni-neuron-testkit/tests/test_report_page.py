# SPDX-License-Identifier: Apache-2.0
"""Plots and the comparison page."""

from __future__ import annotations

import base64
import json
import re

import numpy as np
import pytest

from omni_neuron_testkit import (
    Panel,
    VideoPair,
    compare_steps,
    comparison_page,
    plot_heat_map,
    plot_lines,
    video_quality,
)

RANDOM = np.random.default_rng(0)
FRAMES = RANDOM.integers(0, 200, (5, 24, 32, 3)).astype(np.uint8)


@pytest.fixture(scope="module")
def report():
    reference = [RANDOM.normal(size=(8, 8)) for _ in range(4)]
    low, ours = ([r + size * RANDOM.normal(size=r.shape) for r in reference] for size in (0.01, 0.04))
    return compare_steps(reference, low, ours, [900.0, 700.0, 400.0, 100.0], name="<blocks> & co")


def test_lines_are_there():
    panels = [Panel("first: a", {"loss": [1.0, None, 0.1]}, log=True), Panel("second", {"": [3.0, 4.0]}, limit=3.5)]
    drawing = plot_lines(panels)
    assert "first: a" in drawing and "second" in drawing and "loss" in drawing and "limit" in drawing
    assert "axes_2" in drawing and "axes_3" not in drawing
    assert drawing == plot_lines(panels)
    with pytest.raises(ValueError, match="nothing to plot"):
        plot_lines([])


def test_heat_map_names_its_rows():
    drawing = plot_heat_map(
        [[1.0, None], [0.5, 2.0]], ["blocks.0", "blocks.1"], title="t", x_label="step", colour_label="r"
    )
    assert "blocks.0" in drawing and "blocks.1" in drawing
    with pytest.raises(ValueError, match="nothing to plot"):
        plot_heat_map([[None]], ["blocks.0"], title="t", x_label="step", colour_label="r")


def test_page_is_self_contained(report, tmp_path):
    paths = (tmp_path / "a.mp4", tmp_path / "b.mp4")
    for path in paths:
        path.write_bytes(b"not really a video: " + path.name.encode())
    other = FRAMES.copy()
    other[3, :, :, 0] += 5
    videos = VideoPair(*paths, FRAMES, other, video_quality(other, FRAMES))
    page = comparison_page(("a.mp4", "b</script>.mp4"), videos=videos, report=report)

    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert sources and all(source.startswith("data:") for source in sources)
    assert "http" not in page and "@import" not in page
    embedded = [base64.b64decode(source.partition(",")[2]) for source in sources if source.startswith("data:video/mp4")]
    assert embedded == [path.read_bytes() for path in paths]
    assert sum(source.startswith("data:image/png") for source in sources) == 3 * 5
    assert sum(source.startswith("data:image/svg") for source in sources) == 3
    assert "The captures fail" in page and "&lt;blocks&gt; &amp; co" in page and "<blocks>" not in page
    assert "b</script>" not in page
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', page, re.S)[1])
    assert figures["videos"]["worst_frame"] == 3 and figures["captures"]["passed"] is False


def test_captures_alone_and_nothing(report):
    page = comparison_page(("a", "b"), report=report)
    assert "<video" not in page and "The captures fail" in page
    with pytest.raises(ValueError, match="neither"):
        comparison_page(("a", "b"))
