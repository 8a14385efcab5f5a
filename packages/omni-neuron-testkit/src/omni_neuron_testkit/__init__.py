# SPDX-License-Identifier: Apache-2.0
"""Test support for diffusion models on vLLM-Omni. See the README of this distribution."""

from __future__ import annotations

from .__about__ import __version__
from .grid import MEASURES, Accuracy, GridPrompt, measure_accuracy, prompt_grid, wilson_interval
from .judge import STRICT_OVERLAP, STRICT_STRAIGHTNESS, Verdict, judge, read_video
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

__all__ = [
    "CAPTIONS",
    "COLOURS",
    "DIRECTIONS",
    "MEASURES",
    "SHAPES",
    "STRICT_OVERLAP",
    "STRICT_STRAIGHTNESS",
    "Accuracy",
    "GridPrompt",
    "Scene",
    "Subject",
    "Verdict",
    "__version__",
    "all_subjects",
    "coverage",
    "judge",
    "measure_accuracy",
    "prompt_grid",
    "random_scenes",
    "read_video",
    "render",
    "subject_of",
    "wilson_interval",
]
