# SPDX-License-Identifier: Apache-2.0
"""What caching over denoising steps (Cache-DiT and its like) costs: a cached run against the uncached one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .pass_rule import Comparison, Errors, compare_three_way, measure_errors
from .rank_agreement import disagreeing

CACHE_ALLOWANCE = 0.045
"""Relative L2 error of the final latents that caching may cause unless told otherwise: a cosine of 0.999.

For vectors of equal length, error e and cosine c, e² = 2 (1 − c).
"""


@dataclass(frozen=True)
class CacheReport:
    """A cached run, compared with the uncached one.

    Attributes:
        final_latents: the comparison that decides.
        skipped_steps: the steps whose prediction came from the cache.
        predictions: errors of each step's prediction; None where it cannot be compared. Both runs go their own ways
            after the first skipped step, so the errors of later steps include the latents' drift.
        problems: why the report fails, for people; empty where it passes.
    """

    final_latents: Comparison
    skipped_steps: tuple[int, ...]
    predictions: tuple[Errors | None, ...]
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether steps were skipped, everything was compared and the final latents are within the allowance."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """JSON-ready data."""
        return {
            "passed": self.passed,
            "problems": list(self.problems),
            "skipped_steps": list(self.skipped_steps),
            "steps": len(self.predictions),
            "final_latents": self.final_latents.as_json(),
            "predictions": [None if errors is None else asdict(errors) for errors in self.predictions],
        }


def compare_cached(
    uncached_latents: Any,
    cached_latents: Any,
    *,
    skipped_steps: Sequence[int],
    uncached_predictions: Sequence[Any],
    cached_predictions: Sequence[Any],
    allowance: float = CACHE_ALLOWANCE,
) -> CacheReport:
    """Compare a cached run with the uncached one: same prompt, seed, layout and precision.

    Args:
        uncached_latents, cached_latents: what the last step left.
        skipped_steps: the steps that the cache says it skipped, from 0.
        uncached_predictions, cached_predictions: the noise predictions, one a step.
        allowance: relative L2 error that the final latents may have; the pass rule is that of `compare_three_way`.

    Returns:
        The report. Missing latents, no prediction, no skipped step, or a skipped step whose prediction has the very
        bits of the uncached run's fail it: there would be nothing that it says about caching.
    """
    problems: list[str] = []
    if uncached_latents is None or cached_latents is None:
        which = "uncached" if uncached_latents is None else "cached"
        final = Comparison("final latents", None, None, {}, (f"final latents of the {which} run are missing",))
    else:
        final = compare_three_way(uncached_latents, None, cached_latents, "final latents", allowance=allowance)
    problems += final.problems
    steps = len(uncached_predictions)
    if steps == 0:
        problems.append("no prediction is given")
    if len(cached_predictions) != steps:
        problems.append(f"{steps} predictions of the uncached run, {len(cached_predictions)} of the cached one")
    skipped = tuple(sorted(set(skipped_steps)))
    if not skipped:
        problems.append("no step was skipped: the cache did nothing, so nothing is said about it")
    outside = [step for step in skipped if not 0 <= step < steps]
    if outside:
        problems.append(f"skipped step {outside[0]} is outside of the {steps} steps")
    errors: list[Errors | None] = []
    for step, (reference, actual) in enumerate(zip(uncached_predictions, cached_predictions, strict=False)):
        try:
            errors.append(measure_errors(actual, reference))
        except ValueError as error:
            errors.append(None)
            problems.append(f"prediction of step {step}: {error}")
        if step in skipped and not disagreeing({0: reference, 1: actual}):
            problems.append(f"step {step} is said to be skipped, but its prediction is bit for bit the uncached one")
    return CacheReport(final, skipped, tuple(errors), tuple(problems))
