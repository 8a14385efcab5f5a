# SPDX-License-Identifier: Apache-2.0
"""The measures of errors and the one pass rule."""

from __future__ import annotations

import re

import numpy as np
import pytest

from omni_neuron_testkit import FLOAT32_ALLOWANCE, LIMITS, compare_steps, compare_three_way, measure_errors

REFERENCE = np.random.default_rng(0).normal(size=(1, 400, 64)).astype(np.float32)


def with_errors(seed: int, size: float) -> np.ndarray:
    """The reference with Gaussian errors of a relative l2 `size`."""
    errors = np.random.default_rng(seed).normal(size=REFERENCE.shape)
    return REFERENCE + (size * errors).astype(np.float32)


LOW = with_errors(1, 0.01)


def test_measures_are_relative_to_the_root_mean_square():
    actual = np.full((10, 100), 2.0)
    actual[0, 0] = 3.0
    errors = measure_errors(actual, np.full((10, 100), 2.0))
    assert errors.linf == 0.5
    assert errors.l2 == pytest.approx(0.5 / np.sqrt(1000))
    assert errors.q50 == errors.q99 == 0.0 and 0.0 < errors.q999 < 0.5
    gaussian = measure_errors(LOW, REFERENCE)
    assert gaussian.l2 == pytest.approx(0.01, rel=0.02) and gaussian.q999 == pytest.approx(0.0329, rel=0.05)


def test_as_good_as_the_low_precision_reference_passes():
    comparison = compare_three_way(REFERENCE, LOW, with_errors(2, 0.011))
    assert comparison.passed
    assert comparison.ratio == pytest.approx(1.1, rel=0.02) and comparison.used < 1


def test_more_error_than_allowed_says_which_measure():
    comparison = compare_three_way(REFERENCE, LOW, with_errors(2, 0.016), "blocks.3")
    assert not comparison.passed and comparison.used > 1
    pattern = r"blocks\.3: l2 error 0\.01[56]\d* is above the allowed 0\.0149 \(1\.\d+ × the low-precision .*"
    assert re.fullmatch(pattern, comparison.problems[0]), comparison.problems[0]
    assert comparison.ratio > LIMITS["l2"]


def test_few_wrong_tokens_fail_though_l2_does_not_see_them():
    actual = with_errors(2, 0.01)
    actual[0, 7] = 0.9 * actual[0, 7]  # one row of 400, shrunk by a tenth
    comparison = compare_three_way(REFERENCE, LOW, actual)
    assert comparison.errors.l2 < LIMITS["l2"] * comparison.low_precision.l2
    assert {problem.split()[1] for problem in comparison.problems} == {"q999", "linf"}


@pytest.mark.parametrize("low", [REFERENCE, None], ids=["low precision equals the reference", "none"])
def test_without_low_precision_error_float32_is_the_measure(low):
    assert compare_three_way(REFERENCE, low, REFERENCE).passed
    within = compare_three_way(REFERENCE, low, with_errors(2, 0.9 * FLOAT32_ALLOWANCE))
    assert within.passed and within.used == pytest.approx(0.9, rel=0.02)
    assert not compare_three_way(REFERENCE, low, with_errors(2, 1.1 * FLOAT32_ALLOWANCE)).passed


NAN = REFERENCE.copy()
NAN[0, 0, 0] = np.nan


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((REFERENCE, LOW, REFERENCE[:, 1:]), r"shape \[1, 399, 64\] differs from the reference's \[1, 400, 64\]"),
        ((REFERENCE, LOW, NAN), "1 of 25600 values of the tensor are not finite"),
        ((NAN, None, REFERENCE), "of the reference are not finite"),
        ((REFERENCE[:, :0], None, REFERENCE[:, :0]), "no element"),
        ((np.zeros(3), None, np.zeros(3)), "all zero"),
        ((REFERENCE, NAN, REFERENCE), "low-precision reference: 1 of 25600"),
        ((REFERENCE, np.zeros_like(REFERENCE), REFERENCE), "any tensor would pass beside it"),
    ],
)
def test_what_cannot_be_compared_fails(arguments, message):
    comparison = compare_three_way(*arguments)
    assert not comparison.passed
    with pytest.raises(AssertionError, match=message):
        assert not comparison.problems, comparison.problems[0]


def test_steps():
    low, ours = [LOW] * 3, [with_errors(2, 0.01), with_errors(3, 0.02), with_errors(4, 0.01)]
    report = compare_steps([REFERENCE] * 3, low, ours, [900.0, 500.0, 100.0])
    assert not report.passed and report.problems[0].startswith("step 1: prediction: l2 error 0.02")
    assert [step.timestep for step in report.steps] == [900.0, 500.0, 100.0]
    assert report.ratios() == pytest.approx([1, 2, 1], rel=0.03) and report.trend.label == "stable"
    assert compare_steps([REFERENCE], None, [REFERENCE], [1.0]).passed


def test_no_steps_and_missing_steps_fail():
    assert compare_steps([], None, [], []).problems == ("no step was compared",)
    report = compare_steps([REFERENCE] * 2, [LOW], [LOW] * 2, [2.0, 1.0])
    assert not report.passed and "1 of low_precision" in report.problems[0]
