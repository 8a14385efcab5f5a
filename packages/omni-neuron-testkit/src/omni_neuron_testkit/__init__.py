# SPDX-License-Identifier: Apache-2.0
"""Test support for diffusion models on vLLM-Omni. See the README of this distribution."""

from __future__ import annotations

from .__about__ import __version__
from .cache_analysis import CACHE_ALLOWANCE, CacheReport, compare_cached
from .captures import CapturedRun, CaptureError, read_run, write_step
from .error_trend import Trend, TrendLabel, classify_trend
from .grid import MEASURES, Accuracy, GridPrompt, measure_accuracy, prompt_grid, wilson_interval
from .judge import STRICT_OVERLAP, STRICT_STRAIGHTNESS, Verdict, judge, read_video
from .pass_rule import FLOAT32_ALLOWANCE, LIMITS, Comparison, Errors, compare_three_way, measure_errors
from .plots import Panel, plot_heat_map, plot_lines
from .rank_agreement import Assembled, assemble
from .report_page import VideoPair, comparison_page
from .shapes import (
    CAPTIONS,
    COLOURS,
    DIRECTIONS,
    SHAPES,
    Scene,
    Subject,
    all_subjects,
    coverage,
    random_scenes,
    render,
    subject_of,
)
from .step_compare import RunReport, compare_runs, compare_steps
from .video_quality import VideoQuality, video_quality

__all__ = [
    "CACHE_ALLOWANCE",
    "CAPTIONS",
    "COLOURS",
    "DIRECTIONS",
    "FLOAT32_ALLOWANCE",
    "LIMITS",
    "MEASURES",
    "SHAPES",
    "STRICT_OVERLAP",
    "STRICT_STRAIGHTNESS",
    "Accuracy",
    "Assembled",
    "CacheReport",
    "CaptureError",
    "CapturedRun",
    "Comparison",
    "Errors",
    "GridPrompt",
    "Panel",
    "RunReport",
    "Scene",
    "Subject",
    "Trend",
    "TrendLabel",
    "Verdict",
    "VideoPair",
    "VideoQuality",
    "__version__",
    "all_subjects",
    "assemble",
    "classify_trend",
    "compare_cached",
    "compare_runs",
    "compare_steps",
    "compare_three_way",
    "comparison_page",
    "coverage",
    "judge",
    "measure_accuracy",
    "measure_errors",
    "plot_heat_map",
    "plot_lines",
    "prompt_grid",
    "random_scenes",
    "read_run",
    "read_video",
    "render",
    "subject_of",
    "video_quality",
    "wilson_interval",
    "write_step",
]
