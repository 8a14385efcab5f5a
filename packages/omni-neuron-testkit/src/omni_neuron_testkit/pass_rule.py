# SPDX-License-Identifier: Apache-2.0
"""How wrong a tensor may be: error measures, and the one pass rule of all accuracy tools.

The rule compares three values of one tensor: a float32 reference, the reference computed in low precision, and ours.
Low precision has a cost that nobody can avoid, and the reference's own low-precision run says how large it is for this
tensor and these inputs; ours may cost a little more, because it adds in another order and rounds at other places, but
not much more. So each measure of our error must be at most

    max(LIMITS × the low-precision reference's error, allowance × SHAPE)

The second term is for where no low-precision reference exists or where it equals the reference (ours is float32 too, or
the tensor is exact in both): then ours may differ by the order of float32 sums. With it nothing is divided by zero.

Why three measures: `l2` is the error's energy, which decides what a video looks like. A few tokens that are entirely
wrong (rows of attention that underflow in late steps) hardly change it, but are the whole of `q999` and `linf`. The
limits widen from `l2` to `linf` because a maximum is a noisier statistic: of two honest low-precision runs either may
have the larger one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

MEASURES = ("l2", "q999", "linf")
"""The measures that are held to the rule."""

LIMITS: dict[str, float] = {"l2": 1.5, "q999": 2.0, "linf": 3.0}
"""How many times the low-precision reference's error ours may be, by measure."""

SHAPE: dict[str, float] = {"l2": 1.0, "q999": 5.0, "linf": 20.0}
"""What an allowance for `l2` means for the others.

Gaussian errors have 3.3 and, over 10⁹ elements, 6; real tails are heavier.
"""

FLOAT32_ALLOWANCE = 1e-4
"""Relative L2 error that float32 arithmetic in another order may have."""

QUANTILES = {"q50": 0.5, "q90": 0.9, "q99": 0.99, "q999": 0.999}


@dataclass(frozen=True)
class Errors:
    """The differences of a tensor from its reference, all divided by the reference's root mean square.

    Attributes:
        l2: root mean square of the differences, which is ‖actual − reference‖₂ / ‖reference‖₂.
        q50, q90, q99, q999: quantiles of their absolute values.
        linf: the largest absolute value.
    """

    l2: float
    q50: float
    q90: float
    q99: float
    q999: float
    linf: float


def measure_errors(actual: Any, reference: Any) -> Errors:
    """The errors of `actual`.

    Args:
        actual, reference: of equal shape; arrays, or tensors of any floating-point dtype on any device.

    Raises:
        ValueError: the shapes differ, there is no element, a value is not finite, or the reference is all zero.
    """
    ours, theirs = as_array(actual), as_array(reference)
    if ours.shape != theirs.shape:
        raise ValueError(f"shape {list(ours.shape)} differs from the reference's {list(theirs.shape)}")
    if theirs.size == 0:
        raise ValueError(f"shape {list(theirs.shape)} has no element, so there is nothing to compare")
    for name, values in (("the reference", theirs), ("the tensor", ours)):
        wrong = int(values.size - np.count_nonzero(np.isfinite(values)))
        if wrong:
            raise ValueError(f"{wrong} of {values.size} values of {name} are not finite")
    scale = float(np.sqrt(np.mean(np.square(theirs, dtype=np.float64))))
    if scale == 0.0:
        raise ValueError("the reference is all zero, so no error can be relative to it")
    differences = np.abs(np.subtract(ours, theirs, dtype=np.float64))
    l2 = float(np.sqrt(np.mean(np.square(differences))))
    quantiles = np.quantile(differences, list(QUANTILES.values()))
    relative = {name: float(value) / scale for name, value in zip(QUANTILES, quantiles, strict=True)}
    return Errors(l2=l2 / scale, linf=float(differences.max()) / scale, **relative)


def as_array(value: Any) -> npt.NDArray[Any]:
    """An array or a tensor as a NumPy array; what NumPy has no dtype for, such as bfloat16, as float32."""
    if not hasattr(value, "detach"):
        return np.asarray(value)
    tensor = value.detach().cpu()
    return np.asarray(tensor.numpy() if str(tensor.dtype) == "torch.float64" else tensor.float().numpy())


@dataclass(frozen=True)
class Comparison:
    """One tensor, compared.

    Attributes:
        name: what it is.
        errors: of ours against the reference; None where they cannot be computed.
        low_precision: of the low-precision reference; None where there is none.
        allowed: what the rule allows, by measure.
        problems: why it fails, for people; empty where it passes.
    """

    name: str
    errors: Errors | None
    low_precision: Errors | None
    allowed: dict[str, float]
    problems: tuple[str, ...] = field(default=())

    @property
    def passed(self) -> bool:
        """Whether the rule holds."""
        return not self.problems

    @property
    def ratio(self) -> float | None:
        """Our `l2` error over the low-precision reference's, at most `LIMITS["l2"]` where the rule holds.

        Where there is none, or it has less error than the allowance stands for, over the allowance / `LIMITS["l2"]`.
        """
        return None if self.errors is None else LIMITS["l2"] * self.errors.l2 / self.allowed["l2"]

    @property
    def used(self) -> float | None:
        """The largest share of what is allowed, over the measures; above 1 the rule fails."""
        if self.errors is None:
            return None
        return max(getattr(self.errors, name) / self.allowed[name] for name in MEASURES)

    def as_json(self) -> dict[str, Any]:
        """JSON-ready data."""
        return {**asdict(self), "passed": self.passed, "ratio": self.ratio, "used": self.used}


def compare_three_way(
    reference: Any,
    low_precision: Any | None,
    actual: Any,
    name: str = "tensor",
    *,
    allowance: float = FLOAT32_ALLOWANCE,
) -> Comparison:
    """Hold one tensor to the pass rule of this module.

    Args:
        reference: computed in float32.
        low_precision: the reference's own computation in low precision; None where ours is in float32 as well.
        actual: ours.
        name: for messages.
        allowance: relative L2 error that is allowed whatever the low-precision reference's is; more than float32's
            order of sums only for what is an approximation by choice.

    Returns:
        The comparison; tensors that cannot be compared (shapes, NaN, no element) fail it, and it says why.

    Raises:
        ValueError: `allowance` is not positive.
    """
    if not allowance > 0:
        raise ValueError(f"allowance is {allowance}; it must be positive")
    allowed = {measure: allowance * SHAPE[measure] for measure in MEASURES}
    theirs: Errors | None = None
    if low_precision is not None:
        try:
            theirs = measure_errors(low_precision, reference)
        except ValueError as error:
            return Comparison(name, None, None, allowed, (f"{name}: low-precision reference: {error}",))
        if theirs.l2 >= 1.0:
            problem = (
                f"{name}: the low-precision reference is off by {theirs.l2:.3g} of the reference's norm, as much as "
                "zeros would be; any tensor would pass beside it"
            )
            return Comparison(name, None, theirs, allowed, (problem,))
        allowed = {m: max(allowed[m], LIMITS[m] * getattr(theirs, m)) for m in MEASURES}
    try:
        ours = measure_errors(actual, reference)
    except ValueError as error:
        return Comparison(name, None, theirs, allowed, (f"{name}: {error}",))
    problems = tuple(
        f"{name}: {m} error {getattr(ours, m):.3g} is above the allowed {allowed[m]:.3g}"
        + (
            f" ({getattr(ours, m) / getattr(theirs, m):.3g} × the low-precision reference's)"
            if _positive(theirs, m)
            else ""
        )
        for m in MEASURES
        if getattr(ours, m) > allowed[m]
    )
    return Comparison(name, ours, theirs, allowed, problems)


def _positive(errors: Errors | None, measure: str) -> bool:
    return errors is not None and getattr(errors, measure) > 0


@dataclass(frozen=True)
class Step:
    """One denoising step's comparisons."""

    step: int
    timestep: float | None
    comparisons: tuple[Comparison, ...]

    @property
    def worst(self) -> Comparison | None:
        """The comparison that uses most of what it is allowed; one without figures goes first."""
        unmeasured = [comparison for comparison in self.comparisons if comparison.used is None]
        return (
            unmeasured[0]
            if unmeasured
            else max(self.comparisons, key=lambda comparison: comparison.used or 0, default=None)
        )


def problems_of(steps: Sequence[Step]) -> list[str]:
    """Why the steps fail: their comparisons' problems, and steps that compare nothing."""
    found = [] if steps else ["no step was compared"]
    for step in steps:
        found += [f"step {step.step}: {problem}" for c in step.comparisons for problem in c.problems]
        found += [] if step.comparisons else [f"step {step.step}: no tensor was compared"]
    return found
