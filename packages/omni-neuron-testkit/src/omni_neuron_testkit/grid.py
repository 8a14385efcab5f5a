# SPDX-License-Identifier: Apache-2.0
"""Accuracy of a model over the grid of all subjects, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .judge import Verdict, judge
from .shapes import CAPTIONS, Subject, all_subjects

Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""

MEASURES = ("colour", "shape", "direction", "all", "strict")
"""What is counted: each property, all three, and all three with the strict gate."""


def wilson_interval(successes: int, trials: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson's score interval of a share (Wilson 1927), which stays within [0, 1] and holds for few trials.

    Raises:
        ValueError: no trials, or more successes than trials.
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"{successes} of {trials} is no share")
    share, spread = successes / trials, z * z / trials
    centre = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / trials + spread / (4 * trials)) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(frozen=True)
class GridPrompt:
    """One cell of the grid."""

    subject: Subject
    caption: str
    seed: int


def prompt_grid(*, seeds: int = 2, first_seed: int = 1000) -> Iterator[GridPrompt]:
    """Every subject `seeds` times, by all caption templates in turn; the same grid on every call.

    Args:
        seeds: videos of each subject.
        first_seed: each video has a seed of its own, counted from here.
    """
    for number, subject in enumerate(all_subjects()):
        for repeat in range(seeds):
            index = number * seeds + repeat
            # Shifted by repeat and by row, so that no property always meets the same templates.
            template = (number + number // 4 + repeat * 3) % len(CAPTIONS)
            yield GridPrompt(subject, subject.caption(template), first_seed + index)


@dataclass
class Accuracy:
    """What was asked for and what was seen."""

    results: list[tuple[GridPrompt, Verdict]] = field(default_factory=list)

    def add(self, prompt: GridPrompt, verdict: Verdict) -> None:
        """Count one video."""
        self.results.append((prompt, verdict))

    def successes(self, measure: str) -> int:
        """How many videos are right by one of `MEASURES`."""
        if measure not in MEASURES:
            raise ValueError(f"measure is {measure!r}; valid are {', '.join(MEASURES)}")
        return sum(_right(prompt.subject, verdict, measure) for prompt, verdict in self.results)

    def share(self, measure: str) -> float:
        """Share of the videos that are right by one of `MEASURES`."""
        return self.successes(measure) / len(self.results)

    def misses(self, measure: str = "all") -> list[tuple[GridPrompt, Verdict]]:
        """The videos that are wrong by one of `MEASURES`."""
        return [result for result in self.results if not _right(result[0].subject, result[1], measure)]

    def as_json(self) -> dict[str, Any]:
        """Counts, shares and intervals of each measure, then every video."""
        return {
            "videos": len(self.results),
            "measures": {measure: self._measure_as_json(measure) for measure in MEASURES},
            "results": [
                {"prompt": prompt.caption, "seed": prompt.seed, "seen": str(verdict), "verdict": verdict.as_json()}
                for prompt, verdict in self.results
            ],
        }

    def _measure_as_json(self, measure: str) -> dict[str, Any]:
        right = self.successes(measure)
        low, high = wilson_interval(right, len(self.results))
        return {"right": right, "share": round(self.share(measure), 4), "interval_95": [round(low, 4), round(high, 4)]}

    def table(self) -> str:
        """A Markdown table: each measure's count, share and 95 % interval."""
        lines = ["| measure | right | share | 95 % interval |", "|---|---|---|---|"]
        total = len(self.results)
        for measure in MEASURES:
            right = self.successes(measure)
            low, high = wilson_interval(right, total)
            lines.append(f"| {measure} | {right}/{total} | {right / total:.1%} | {low:.1%} to {high:.1%} |")
        return "\n".join(lines)


def measure_accuracy(generate: Callable[[str, int], Any], prompts: Iterable[GridPrompt]) -> Accuracy:
    """Judge what `generate(caption, seed)` makes (frames, see `judge`) of each prompt."""
    accuracy = Accuracy()
    for prompt in prompts:
        accuracy.add(prompt, judge(generate(prompt.caption, prompt.seed)))
    return accuracy


def _right(subject: Subject, verdict: Verdict, measure: str) -> bool:
    if measure in ("all", "strict"):
        return verdict.matches(subject, strict=measure == "strict")
    return bool(getattr(verdict, measure) == getattr(subject, measure))
