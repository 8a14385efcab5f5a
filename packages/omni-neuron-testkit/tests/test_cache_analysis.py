# SPDX-License-Identifier: Apache-2.0
"""Cached against uncached runs."""

from __future__ import annotations

import json

import numpy as np

from omni_neuron_testkit import compare_cached

RANDOM = np.random.default_rng(0)
LATENTS = RANDOM.normal(size=(16, 3, 8, 8))
PREDICTIONS = [RANDOM.normal(size=(16, 3, 8, 8)) for _ in range(5)]


def off(tensor, size):
    return tensor + size * RANDOM.normal(size=tensor.shape)


def report(latents=LATENTS, cached=None, *, skipped=(2, 4), predictions=None, **options):
    cached = off(LATENTS, 0.03) if cached is None else cached
    predictions = [PREDICTIONS[0], *(off(p, 0.1) for p in PREDICTIONS[1:])] if predictions is None else predictions
    return compare_cached(
        latents,
        cached,
        skipped_steps=skipped,
        uncached_predictions=PREDICTIONS,
        cached_predictions=predictions,
        **options,
    )


def test_within_the_allowance():
    found = report()
    assert found.passed and found.skipped_steps == (2, 4)
    assert found.predictions[0].l2 == 0.0 and 0.09 < found.predictions[2].l2 < 0.11
    assert json.loads(json.dumps(found.as_json(), allow_nan=False))["skipped_steps"] == [2, 4]


def test_beyond_the_allowance():
    cached = off(LATENTS, 0.06)
    assert "final latents: l2 error 0.06" in report(cached=cached).problems[0].replace("0.0602", "0.06")
    assert report(cached=cached, allowance=0.08).passed


def test_nothing_passes_vacuously():
    assert "no step was skipped" in report(skipped=()).problems[0]
    assert "final latents of the uncached run are missing" in report(latents=None).problems[0]
    assert "no element" in report(np.empty(0), np.empty(0)).problems[0]
    assert "5 predictions of the uncached run, 0 of the cached one" in report(predictions=[]).problems[0]
    assert "skipped step 5 is outside of the 5 steps" in report(skipped=(2, 5)).problems[0]
    assert "step 0 is said to be skipped, but its prediction is bit for bit" in report(skipped=(0, 2)).problems[0]
    empty = compare_cached(LATENTS, LATENTS, skipped_steps=(), uncached_predictions=(), cached_predictions=())
    assert "no prediction is given" in empty.problems[0]
