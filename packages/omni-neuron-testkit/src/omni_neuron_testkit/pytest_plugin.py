# SPDX-License-Identifier: Apache-2.0
"""pytest fixtures of the test kit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .judge import Verdict, judge
from .shapes import Subject, subject_of


@pytest.fixture
def judge_video() -> Callable[..., Verdict]:
    """A function that judges frames and fails the test, saying what was seen, where they do not show the prompt.

    `judge_video(frames, "a red circle moving right", strict=False)` returns the verdict.
    """

    def check(frames: Any, prompt: str | Subject, *, strict: bool = False) -> Verdict:
        subject = subject_of(prompt) if isinstance(prompt, str) else prompt
        if subject is None:
            raise ValueError(f"{prompt!r} does not name one colour, one shape and one direction")
        verdict = judge(frames)
        if not verdict.matches(subject, strict=strict):
            pytest.fail(f"asked for {subject.caption()!r}{' (strict)' if strict else ''}, seen: {verdict}; {verdict!r}")
        return verdict

    return check
