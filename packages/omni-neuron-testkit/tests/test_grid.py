# SPDX-License-Identifier: Apache-2.0
"""Counts and intervals over a grid of prompts."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from omni_neuron_testkit import CAPTIONS, Accuracy, GridPrompt, Subject, judge, prompt_grid, render, wilson_interval


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    # Newcombe 1998, table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_interval(successes, trials, low, high):
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=2e-4)


@pytest.mark.parametrize(("successes", "trials"), [(1, 0), (3, 2), (-1, 2)])
def test_wilson_interval_refuses_what_is_no_share(successes, trials):
    with pytest.raises(ValueError, match="no share"):
        wilson_interval(successes, trials)


def test_grid_has_every_subject_and_template_and_unique_seeds():
    prompts = list(prompt_grid(seeds=2, first_seed=5000))
    assert len(prompts) == 144
    assert set(Counter(prompt.subject for prompt in prompts).values()) == {2}
    assert sorted(prompt.seed for prompt in prompts) == list(range(5000, 5144))
    assert prompts == list(prompt_grid(seeds=2, first_seed=5000))
    for name in ("colour", "shape", "direction"):
        met = {
            (getattr(prompt.subject, name), template)
            for prompt in prompts
            for template in range(len(CAPTIONS))
            if prompt.subject.caption(template) == prompt.caption
        }
        assert len(met) == len(CAPTIONS) * len({getattr(prompt.subject, name) for prompt in prompts})


def test_misses_are_counted_by_measure():
    asked, shown = Subject("red", "circle", "up"), Subject("red", "square", "up")
    accuracy = Accuracy()
    for seed, subject in enumerate((asked, shown)):
        accuracy.add(GridPrompt(asked, asked.caption(), seed), judge(render(subject)))
    assert {m: accuracy.successes(m) for m in ("colour", "shape", "direction", "all")} == {
        "colour": 2,
        "shape": 1,
        "direction": 2,
        "all": 1,
    }
    [(prompt, verdict)] = accuracy.misses()
    assert prompt.seed == 1 and verdict.shape == "square"
    report = json.loads(json.dumps(accuracy.as_json()))
    assert report["measures"]["shape"]["share"] == 0.5
    assert "| shape | 1/2 | 50.0% |" in accuracy.table()
    with pytest.raises(ValueError, match="measure is 'size'"):
        accuracy.successes("size")
