# SPDX-License-Identifier: Apache-2.0
"""Denoising runs compared step by step: a float32 reference, the same in low precision, and ours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .captures import CapturedRun, CapturedStep, Parts, read_run
from .error_trend import FEWEST_STEPS, Trend, classify_trend
from .pass_rule import FLOAT32_ALLOWANCE, LIMITS, Comparison, Step, compare_three_way, problems_of
from .rank_agreement import Array, assemble, disagreeing

_NEGLIGIBLE_RATIO = 0.5  # in trends: of an error that is half of what low precision costs


@dataclass(frozen=True)
class RunReport:
    """A run, compared with its reference.

    Attributes:
        steps: the comparisons, in the order of the steps.
        trend: of the worst ratio of each step; None for fewer than three steps, or where a step has no figures.
        problems: why the run fails, for people; empty where it passes.
    """

    steps: tuple[Step, ...]
    trend: Trend | None
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether something was compared, all of it, and the pass rule holds everywhere."""
        return not self.problems

    def ratios(self) -> list[float | None]:
        """The worst ratio of each step: our l2 error over the low-precision reference's; None without figures."""
        return [_worst_ratio(step.comparisons) for step in self.steps]

    def heat_map(self) -> tuple[list[str], list[list[float | None]]]:
        """Ratios by tensor and step: the names, and one row a name with one value a step, None where it has none.

        Tensors of blocks of the several experts share a row, since a step has one expert.
        """
        rows: dict[str, list[float | None]] = {}
        for column, step in enumerate(self.steps):
            for comparison in step.comparisons:
                row = rows.setdefault(_without_component(comparison.name), [None] * len(self.steps))
                row[column] = max((r for r in (row[column], comparison.ratio) if r is not None), default=None)
        return list(rows), list(rows.values())

    def as_json(self) -> dict[str, Any]:
        """JSON-ready data; infinite growth is None."""
        trend = None if self.trend is None else asdict(self.trend)
        if trend is not None and not math.isfinite(trend["growth"]):
            trend["growth"] = None
        steps = [
            {"step": step.step, "timestep": step.timestep, "tensors": [c.as_json() for c in step.comparisons]}
            for step in self.steps
        ]
        return {
            "passed": self.passed,
            "problems": list(self.problems),
            "trend": trend,
            "ratios": self.ratios(),
            "limits": LIMITS,
            "steps": steps,
        }


def compare_steps(
    reference: Sequence[Any],
    low_precision: Sequence[Any] | None,
    actual: Sequence[Any],
    timesteps: Sequence[float],
    *,
    name: str = "prediction",
    allowance: float = FLOAT32_ALLOWANCE,
) -> RunReport:
    """Compare one tensor a step, such as the noise prediction or the latents.

    Args:
        reference: in float32, one a step.
        low_precision: the reference in low precision; None where ours is in float32 as well.
        actual: ours.
        timesteps: of the scheduler, one a step.
        name: for messages.
        allowance: see `compare_three_way`.

    Returns:
        The report. No steps, or not as many of each, fail it.
    """
    counts = {"reference": len(reference), "actual": len(actual), "timesteps": len(timesteps)}
    if low_precision is not None:
        counts["low_precision"] = len(low_precision)
    if len(set(counts.values())) > 1:
        listing = ", ".join(f"{count} of {what}" for what, count in counts.items())
        return RunReport((), None, (f"not as many steps of each: {listing}",))
    steps = []
    for number, timestep in enumerate(timesteps):
        low = None if low_precision is None else low_precision[number]
        comparison = compare_three_way(reference[number], low, actual[number], name, allowance=allowance)
        steps.append(Step(number, float(timestep), (comparison,)))
    return _report(steps, [])


def compare_runs(
    reference: CapturedRun | Path | str,
    low_precision: CapturedRun | Path | str | None,
    actual: CapturedRun | Path | str,
) -> RunReport:
    """Compare everything that was captured in two or three runs, of any layouts.

    Tensors are put together from the ranks' parts first (see `assemble`), for which one of the runs must hold them
    whole: one process, or tensor parallelism without sequence parallelism.

    Args:
        reference: in float32; a run, or its folder.
        low_precision: the reference in low precision; None where ours is in float32 as well.
        actual: ours.

    Returns:
        The report. It fails where a run lacks a step or a tensor of another, where schedules differ, and where ranks
        disagree.

    Raises:
        CaptureError: a folder holds no complete run.
    """
    runs = {"the reference": _run(reference), "ours": _run(actual)}
    if low_precision is not None:
        runs["the low-precision reference"] = _run(low_precision)
    counts = {what: len(run.steps) for what, run in runs.items()}
    problems = []
    if len(set(counts.values())) > 1:
        problems.append("not as many steps: " + ", ".join(f"{what} has {count}" for what, count in counts.items()))
    steps = []
    for captured in zip(*(run.steps for run in runs.values()), strict=False):
        found = dict(zip(runs, captured, strict=True))
        comparisons, step_problems = _compare_step(found)
        problems += [f"step {captured[0].step}: {problem}" for problem in step_problems]
        steps.append(Step(captured[0].step, captured[0].timestep, tuple(comparisons)))
    if low_precision is None and any(step.problems for s in steps for step in s.comparisons):
        dtype = runs["ours"].steps[0].low_precision_dtype()
        if dtype:
            problems.append(f"ours is {dtype}, and without a low-precision reference it is held to float32")
    return _report(steps, problems)


def _run(run: CapturedRun | Path | str) -> CapturedRun:
    return run if isinstance(run, CapturedRun) else read_run(run)


def _compare_step(steps: dict[str, CapturedStep]) -> tuple[list[Comparison], list[str]]:
    """The comparisons of one step's tensors by whose they are, and what could not be compared."""
    problems = []
    timesteps = {what: step.timestep for what, step in steps.items()}
    if len(set(timesteps.values())) > 1:
        problems.append("other timesteps: " + ", ".join(f"{what} has {value}" for what, value in timesteps.items()))
    loaded = {what: _by_name(step.load()) for what, step in steps.items()}
    names = list(dict.fromkeys(name for tensors in loaded.values() for name in tensors))
    comparisons = []
    for name in names:
        lacking = [what for what, tensors in loaded.items() if name not in tensors]
        if lacking:
            problems.append(f"{name}: not captured by {' and '.join(lacking)}")
            continue
        whole: dict[str, Array] = {}
        shape = _whole_shape(tensors[name] for tensors in loaded.values())
        if shape is None:
            problems.append(f"{name}: split over ranks in every run; capture one of them in one process")
            continue
        for what, tensors in loaded.items():
            try:
                whole[what], disagreement = assemble(tensors[name], shape)
            except ValueError as error:
                problems.append(f"{name}: {what}: {error}")
                break
            if disagreement:
                problems.append(f"{name}: {what}: ranks disagree: {disagreement}")
        else:
            low = whole.get("the low-precision reference")
            comparisons.append(compare_three_way(whole["the reference"], low, whole["ours"], name))
    return comparisons, problems


def _by_name(modules: dict[str, dict[int, Parts]]) -> dict[str, Parts]:
    """Names such as `transformer.blocks.0` and, for other branches than the positive one, `… (branch 1)`."""
    return {
        name if branch == 0 else f"{name} (branch {branch})": parts
        for name, branches in modules.items()
        for branch, parts in branches.items()
    }


def _whole_shape(runs: Iterable[Parts]) -> tuple[int, ...] | None:
    """The shape in the first run that holds the tensor whole: in one process, or equal on all ranks."""
    return next((next(iter(parts.values())).shape for parts in runs if not disagreeing(parts)), None)


def _report(steps: list[Step], problems: list[str]) -> RunReport:
    ratios = [_worst_ratio(step.comparisons) for step in steps]
    known = [ratio for ratio in ratios if ratio is not None]
    complete = len(known) == len(ratios) >= FEWEST_STEPS
    trend = classify_trend(known, negligible=_NEGLIGIBLE_RATIO) if complete else None
    return RunReport(tuple(steps), trend, tuple(problems + problems_of(steps)))


def _worst_ratio(comparisons: Sequence[Comparison]) -> float | None:
    ratios = [comparison.ratio for comparison in comparisons]
    known = [ratio for ratio in ratios if ratio is not None]
    return max(known) if known and len(known) == len(ratios) else None


def _without_component(name: str) -> str:
    head, _, rest = name.partition(".")
    return rest if rest and head.startswith("transformer") else name
