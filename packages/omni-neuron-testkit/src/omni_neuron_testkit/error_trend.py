# SPDX-License-Identifier: Apache-2.0
"""How errors develop over the denoising steps: stable, accumulating, or a spike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

FEWEST_STEPS = 3
_TIE = 1.1


class TrendLabel(StrEnum):
    """What errors do from the first to the last step."""

    STABLE = "stable"
    ACCUMULATING = "accumulating"
    SPIKE = "spike"


@dataclass(frozen=True)
class Trend:
    """How errors develop.

    Attributes:
        label: the class.
        growth: median of the last third over median of the first third; infinite where the first is zero.
        rising: share of the pairs of steps of which the later has the larger error; two within 10 % count half.
        worst_step: position of the largest error.
    """

    label: TrendLabel
    growth: float
    rising: float
    worst_step: int


def classify_trend(
    errors: Sequence[float],
    *,
    negligible: float = 0.0,
    spike: float = 3.0,
    growth: float = 2.0,
    rising: float = 0.7,
) -> Trend:
    """Classify errors, or ratios of errors, in the order of the steps, the late low-noise ones included.

    Accumulating is asked first: errors of which the last third is `growth` times the first third, with the largest one
    and without it, and of which the share `rising` of all pairs of steps rise, however steeply. Then a spike: one that
    is more than `spike` times the median. So a jump that stays for the last third of the steps accumulates, a shorter
    one is a spike, in the last step too. Errors that only fall are a spike in the first steps, or stable.

    Args:
        errors: one a step, not negative.
        negligible: errors below count as this one, so that growth out of rounding noise is no growth.
        spike, growth, rising: the thresholds.

    Raises:
        ValueError: fewer than three steps, or an error that is negative or not finite.
    """
    if len(errors) < FEWEST_STEPS:
        raise ValueError(f"a trend needs at least {FEWEST_STEPS} steps; {len(errors)} are given")
    for step, error in enumerate(errors):
        if not math.isfinite(error) or error < 0:
            raise ValueError(f"the error of step {step} is {error}; it must be finite and not negative")
    values = [max(float(error), negligible) for error in errors]
    worst = max(range(len(values)), key=values.__getitem__)
    times, share = _growth(values), _rising(values)
    label = TrendLabel.STABLE
    if share >= rising and min(times, _growth(values[:worst] + values[worst + 1 :])) >= growth:
        label = TrendLabel.ACCUMULATING
    elif values[worst] > spike * median(values):
        label = TrendLabel.SPIKE
    return Trend(label, times, share, worst)


def _growth(values: Sequence[float]) -> float:
    third = max(1, len(values) // 3)
    early, late = median(values[:third]), median(values[-third:])
    if early == 0:
        return math.inf if late else 1.0
    return late / early


def _rising(values: Sequence[float]) -> float:
    pairs = [(values[i], values[j]) for j in range(len(values)) for i in range(j)]
    return sum(0.5 if max(a, b) <= _TIE * min(a, b) else float(b > a) for a, b in pairs) / len(pairs)
