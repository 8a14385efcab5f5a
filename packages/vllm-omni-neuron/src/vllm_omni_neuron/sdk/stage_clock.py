# SPDX-License-Identifier: Apache-2.0
"""How long the stages and the denoising steps of one generation take."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from vllm_omni.platforms import current_omni_platform

STAGES = ("text", "denoise", "vae", "transfer")


class StageClock:
    """Wall-clock seconds of stages and steps. The only place that waits for the device in order to measure.

    A device works on while Python goes ahead. It is waited for at the end of every stage, so that a stage's time is its
    own, and at the end of every step only where that is asked for: then no step is prepared while another one runs.

    Args:
        measure_steps: measure denoising steps, too.

    Attributes:
        seconds: by stage, 0 for those of `STAGES` that have not run; a stage that runs more than once adds up.
        steps: seconds of each step, by component; empty unless they are measured.
    """

    def __init__(self, measure_steps: bool = False) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self.steps: dict[str, list[float]] = {}
        self._measure_steps = measure_steps

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Measure a stage."""
        started = time.perf_counter()
        yield
        current_omni_platform.synchronize()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started

    @contextlib.contextmanager
    def step(self, component: str) -> Iterator[None]:
        """Measure a denoising step of `component`, where steps are measured."""
        started = time.perf_counter()
        yield
        if self._measure_steps:
            current_omni_platform.synchronize()
            self.steps.setdefault(component, []).append(time.perf_counter() - started)
