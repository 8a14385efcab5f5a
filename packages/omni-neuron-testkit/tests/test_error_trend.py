# SPDX-License-Identifier: Apache-2.0
"""Trends of errors over the steps."""

from __future__ import annotations

import math

import pytest

from omni_neuron_testkit import classify_trend


@pytest.mark.parametrize(
    ("errors", "label"),
    [
        ([1.0, 1.1, 0.9, 1.0, 1.05, 0.95], "stable"),
        ([1, 1.2, 1.5, 2, 2.6, 3.3], "accumulating"),
        ([1, 2, 4, 8, 16, 32], "accumulating"),  # steep
        ([0.0, 0.1, 0.3, 1.0, 3.0, 9.0], "accumulating"),  # the first is zero
        ([1, 1, 1, 1, 10, 10.5], "accumulating"),  # a jump that stays for the last third
        ([1, 1, 1, 1, 1, 1, 1, 1, 10, 10.5], "spike"),  # a shorter one
        ([1, 1.01, 1.02, 10], "spike"),
        ([1, 2, 4], "accumulating"),
        ([1, 1, 1, 9, 1, 1], "spike"),
        ([1, 1, 1, 1, 1, 10], "spike"),  # in the last, least noisy step alone
        ([0.0, 0, 0, 0, 0, 5], "spike"),
        ([3, 2.5, 2, 1.5, 1.2, 1], "stable"),
        ([0.0] * 4, "stable"),
        ([0.0, 1, 1, 1, 1, 1], "stable"),
        ([2.0] * 3, "stable"),
    ],
)
def test_labels(errors, label):
    assert classify_trend(errors).label == label


def test_what_is_negligible_does_not_grow():
    errors = [0.001, 0.01, 0.05, 0.2, 0.4]
    assert classify_trend(errors).label == "accumulating"
    assert classify_trend(errors, negligible=0.5).label == "stable"


def test_figures():
    trend = classify_trend([0.0, 1.0, 4.0])
    assert (trend.growth, trend.rising, trend.worst_step) == (math.inf, 1.0, 2)


@pytest.mark.parametrize(
    ("errors", "message"),
    [([1.0, 2.0], "at least 3 steps; 2"), ([1, math.nan, 1], "step 1 is nan"), ([1, 1, -1], "step 2 is -1")],
)
def test_no_trend(errors, message):
    with pytest.raises(ValueError, match=message):
        classify_trend(errors)
