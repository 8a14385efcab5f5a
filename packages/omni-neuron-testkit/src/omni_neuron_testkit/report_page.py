# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page about two runs: videos side by side, differences, plots and figures."""

from __future__ import annotations

import base64
import io
import mimetypes
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .pass_rule import LIMITS, Step
from .plots import Panel, plot_heat_map, plot_lines
from .step_compare import RunReport
from .video_quality import VideoQuality, check_comparable

Frames = npt.NDArray[np.uint8]

_PICTURES = 6  # frames that are shown with their differences
_PICTURE_WIDTH = 480  # pixels, at most
_MAX_GAIN = 32.0  # of differences, so that the rounding of two equal videos does not fill the page
_WORST_TENSORS = 40  # rows of the page's table; the JSON has all


@dataclass(frozen=True)
class VideoPair:
    """Two videos for the page.

    Attributes:
        first, second: their files, as they are.
        first_frames, second_frames: uint8 `[T, H, W, 3]`, of equal shape.
        quality: of the second against the first.
    """

    first: Path
    second: Path
    first_frames: Frames
    second_frames: Frames
    quality: VideoQuality


def comparison_page(
    names: tuple[str, str], *, videos: VideoPair | None = None, report: RunReport | None = None, note: str = ""
) -> str:
    """The page as text. It loads nothing: videos and pictures are in it.

    Args:
        names: of the two runs, the reference first.
        videos: what to show side by side.
        report: of their captures.
        note: a line below the title.

    Raises:
        ValueError: neither videos nor a report.
        ModuleNotFoundError: a library of `omni-neuron-testkit[accuracy]` is not installed.
    """
    import jinja2

    if videos is None and report is None:
        raise ValueError("there is neither a pair of videos nor a report of captures to show")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    source = resources.files(__package__).joinpath("report_page.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source).render(
        names=names,
        note=note,
        videos=None if videos is None else _videos_context(videos),
        report=report,
        limits=LIMITS,
        worst=[] if report is None else _worst_tensors(report.steps),
        plots=[_data_uri("image/svg+xml", svg.encode()) for svg in _plots(videos, report)],
        figures={
            "videos": None if videos is None else videos.quality.as_json(),
            "captures": None if report is None else report.as_json(),
        },
    )


def _videos_context(videos: VideoPair) -> dict[str, Any]:
    first, second = videos.first_frames, videos.second_frames
    check_comparable(second, first)
    difference = np.abs(np.subtract(first, second, dtype=np.int16))
    largest = int(difference.max())
    gain = min(_MAX_GAIN, 255 / largest) if largest else 1.0
    spread = np.linspace(0, len(first) - 1, min(_PICTURES, len(first))).round().astype(int)
    chosen = sorted({*spread.tolist(), videos.quality.worst_frame})
    return {
        "sources": [_data_uri(_mime_type(path), path.read_bytes()) for path in (videos.first, videos.second)],
        "quality": videos.quality,
        "size": f"{first.shape[2]}×{first.shape[1]}, {len(first)} frames",
        "largest": largest,
        "gain": gain,
        "pictures": [
            {
                "frame": frame,
                "first": _picture(first[frame]),
                "second": _picture(second[frame]),
                "difference": _picture(np.minimum(255, difference[frame] * gain).astype(np.uint8)),
            }
            for frame in chosen
        ],
    }


def _plots(videos: VideoPair | None, report: RunReport | None) -> list[str]:
    plots = []
    if videos is not None:
        quality = videos.quality
        panels = [Panel("SSIM of each frame", {"": quality.frame_ssim}, x_label="frame", y_label="SSIM")]
        if not quality.identical:
            panels.append(Panel("PSNR of each frame", {"": quality.frame_psnr}, x_label="frame", y_label="PSNR, dB"))
        plots.append(plot_lines(panels))
    if report is not None and any(ratio is not None for ratio in report.ratios()):
        ratio = Panel(
            "Worst l2 error of each step, over the low-precision reference's",
            {"ratio": report.ratios()},
            x_label="step",
            y_label="ratio",
            limit=LIMITS["l2"],
        )
        plots.append(plot_lines([ratio, _errors_panel(report.steps)]))
        rows, values = report.heat_map()
        plots.append(
            plot_heat_map(
                values, rows, title="Ratio of l2 errors by tensor and step", x_label="step", colour_label="ratio"
            )
        )
    return plots


def _errors_panel(steps: tuple[Step, ...]) -> Panel:
    ours: list[float | None] = []
    theirs: list[float | None] = []
    for step in steps:
        worst = step.worst
        ours.append(None if worst is None or worst.errors is None else worst.errors.l2)
        theirs.append(None if worst is None or worst.low_precision is None else worst.low_precision.l2)
    lines = {"ours": ours}
    if any(theirs):
        lines["low-precision reference"] = theirs
    logarithmic = any(value for line in lines.values() for value in line)
    return Panel("Relative l2 error of each step's worst tensor", lines, x_label="step", y_label="l2", log=logarithmic)


def _worst_tensors(steps: tuple[Step, ...]) -> list[tuple[Step, Any]]:
    measured = [(step, comparison) for step in steps for comparison in step.comparisons if comparison.used is not None]
    return sorted(measured, key=lambda row: row[1].used or 0.0, reverse=True)[:_WORST_TENSORS]


def _picture(frame: Frames) -> str:
    from PIL import Image

    image = Image.fromarray(frame)
    image.thumbnail((_PICTURE_WIDTH, _PICTURE_WIDTH * 4))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return _data_uri("image/png", buffer.getvalue())


def _mime_type(path: Path) -> str:
    return mimetypes.guess_type(path.name)[0] or "video/mp4"


def _data_uri(mime_type: str, content: bytes) -> str:
    return f"data:{mime_type};base64,{base64.b64encode(content).decode()}"
