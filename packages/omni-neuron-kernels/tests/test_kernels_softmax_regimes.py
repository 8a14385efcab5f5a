# SPDX-License-Identifier: Apache-2.0
"""The proofs that keep softmax inside float32: adversarial inputs at their edges, and what they refuse."""

import math

import attention_cases as cases
import pytest
import torch

from omni_neuron_kernels import bounded_softmax_is_safe, head_abs_max, head_norm_max, key_statistics, softmax_regimes
from omni_neuron_kernels.softmax_regimes import joined_statistics, unpacked_statistics

TINY = 2.0**-126
# Their rows lie too far apart for one shift, or what it gains is less than a step of the test.
NARROW = ("all keys equal, queries on both sides", "one key below all", "one key")
ROWS, KEYS = 560, 120  # one full tile of queries and a part of one


def safe(bound, num_keys=1000, v_abs_max=1.0):
    one = torch.ones(1)
    return bool(bounded_softmax_is_safe(one * bound, one, 1.0, num_keys, one * v_abs_max))


def largest_safe_bound(num_keys, v_abs_max):
    bounds = torch.arange(10000) / 100
    ones = torch.ones_like(bounds)
    return float(bounds[bounded_softmax_is_safe(bounds, ones, 1.0, num_keys, ones * v_abs_max)].max())


@pytest.mark.parametrize("num_keys", [1, 1000, 75600])
@pytest.mark.parametrize("v_abs_max", [1e-20, 1e-3, 1.0, 1e3, 1e20])
@pytest.mark.parametrize("sign", [1, -1])
def test_exact_at_the_edge(num_keys, v_abs_max, sign):
    """Every score at the bound: the largest and the smallest sums there can be, subnormal numbers flushed."""
    score = sign * largest_safe_bound(num_keys, v_abs_max)
    weights = torch.full((num_keys,), score).exp()
    value = cases.random(num_keys, seed=1).clamp(-1, 1) * v_abs_max
    products = weights * value
    products[products.abs() < TINY] = 0
    denominator = weights.sum()
    assert weights.min() >= TINY
    assert denominator.isfinite()
    assert abs(products.double().sum() / denominator.double() - value.double().mean()) < 1e-6 * v_abs_max


def test_mixed_scores_at_the_edge():
    bound = largest_safe_bound(4096, 4.0)
    scores = (cases.random(64, 4096, seed=2) * 40).clamp(-bound, bound)
    value = cases.random(4096, 16, seed=3).clamp(-4, 4)
    unshifted = scores.exp() @ value / scores.exp().sum(-1, keepdim=True)
    exact = scores.double().softmax(-1) @ value.double()
    assert (unshifted - exact).norm() < 1e-6 * exact.norm()


def test_the_range_is_twice_that_of_subtracting_the_bound():
    bound = largest_safe_bound(75600, 5.0)
    assert 69 < bound < 70.1
    # exp(-2b) is zero in float32 where the worst row needs it: the shift c = b would have lost that row.
    assert torch.tensor(-2 * bound).exp() == 0


def test_beyond_the_edge():
    assert not safe(71)
    assert not safe(69, v_abs_max=1e-3), "small values would be flushed to zero with their weights"
    assert safe(69, v_abs_max=1e3)
    assert not safe(69, num_keys=1 << 20, v_abs_max=1e10), "the sum of weighted values would overflow"
    assert not safe(1, v_abs_max=0.0) and not safe(1, v_abs_max=math.nan) and not safe(1, v_abs_max=math.inf)
    assert not safe(math.nan) and not safe(math.inf)


def test_each_head_is_judged_alone():
    norms = torch.tensor([1.0, 8.0, 9.0])
    ones = torch.ones(3)
    assert bounded_softmax_is_safe(norms, norms, -1.0, 10, ones).tolist() == [True, True, False]
    assert bounded_softmax_is_safe(norms, norms, 0.5, 10, ones).tolist() == [True, True, True]


def test_norms():
    tensor = cases.random(2, 5, 3, 4, seed=1)
    expected = torch.stack([tensor[:, :, head].norm(dim=-1).max() for head in range(3)])
    torch.testing.assert_close(head_norm_max(tensor), expected)
    assert torch.equal(head_abs_max(tensor), torch.stack([tensor[:, :, head].abs().max() for head in range(3)]))
    assert head_norm_max(tensor[:, :0]).tolist() == head_abs_max(tensor[:, :0]).tolist() == [0, 0, 0]
    # Squares of these vanish in float32, their norms do not.
    assert (head_norm_max(torch.full((1, 1, 1, 64), 2.0**-80)) >= 8 * 2.0**-80).all()


def plan(q, k, v):
    """Regime and shifts of the one head of q, k and v `[S, D]`."""
    q, k, v = (tensor[None, :, None] for tensor in (q, k, v))
    regimes, shifts = softmax_regimes(q, key_statistics(k, v), scale=1.0)
    return regimes[0][0], shifts[0, 0]


def shifted_softmax(q, k, v, shifts):
    """As the kernels compute it, in float32 with subnormal numbers flushed at every step but the sums'."""
    weights = (q @ k.mT - shifts.repeat_interleave(512)[: len(q), None]).exp()
    weights[weights < TINY] = 0
    products = weights[:, :, None] * v
    products[products.abs() < TINY] = 0
    return products.sum(1) / weights.sum(-1, keepdim=True)


def adversaries():
    """Queries and keys `[S, 8]` that make some bound tight; their scores are scaled to the edge by the test."""
    direction = torch.zeros(8)
    direction[0] = 1.0
    q, k = cases.random(ROWS, 8, seed=1), cases.random(KEYS, 8, seed=2)
    along = q.clone()
    along[:, 0] = along[:, 0].abs() + 1
    one_high = torch.cat([direction[None], -direction.expand(KEYS - 1, 8) / (KEYS - 1)])
    halves = torch.cat([direction.expand(KEYS // 2, 8), -direction.expand(KEYS // 2, 8)])
    orthogonal = k.clone()
    orthogonal[:, 0], orthogonal[7] = 0, 20 * direction
    flat = q.clone()
    flat[:, 0] = 0
    return {
        "gaussian": (q, k),
        "all keys equal": (along, direction.expand(KEYS, 8)),
        "all keys equal, queries on both sides": (q, direction.expand(KEYS, 8)),
        "keys far from zero": (along, k + 30 * direction),
        "one key above all": (direction.expand(ROWS, 8), one_high),
        "one key below all": (-direction.expand(ROWS, 8), one_high),
        "keys on both sides": (q, halves),
        "a long key that no query sees": (flat, orthogonal),
        "one long query": (torch.cat([50 * q[:1], q[1:]]), k),
        "one key": (q, k[:1]),
    }


@pytest.mark.parametrize("v_abs_max", [1e-3, 1e6])
@pytest.mark.parametrize("name", adversaries())
def test_whatever_is_let_through_is_exact(name, v_abs_max):
    """Scores are scaled up until the proof ends; at every scale on the way the result holds, just below the end too."""
    q, k = adversaries()[name]
    v = cases.random(len(k), 2, seed=3).clamp(-1, 1) * v_abs_max
    seen = []
    for step in range(32):
        factor = 0.02 * 1.35**step
        regime, shifts = plan(q * factor, k, v)
        seen.append(regime)
        if regime == "running_maximum":
            continue
        result = shifted_softmax(q * factor, k, v, shifts)
        exact = (factor * (q.double() @ k.double().mT)).softmax(-1) @ v.double()
        # The rounding of scores is in every softmax of float32.
        rounding = 1e-6 + 2.0**-22 * float((q * factor).norm(dim=-1).max() * k.norm(dim=-1).max())
        assert float((result - exact).abs().max()) <= rounding * v_abs_max
    assert seen == sorted(seen, key=("unshifted", "tile_shift", "running_maximum").index)
    assert seen[0] == "unshifted" and seen[-1] == "running_maximum"
    assert "tile_shift" in seen or name in NARROW


def test_where_the_three_regimes_meet():
    """Centred keys: 156.8 − ln n with a shift, 87.7 − ln n without, and the mean is what it takes."""
    direction = torch.ones(1, 8) / 8**0.5
    k, v = torch.cat([direction, -direction]).repeat(500, 1), torch.ones(1000, 4)
    for bound, regime in ((80, "unshifted"), (82, "tile_shift"), (149, "tile_shift"), (151, "running_maximum")):
        assert plan(bound * direction, k, v)[0] == regime
    # ln 1000 = 6.9. With the keys on one side only, nothing below −70 can be unshifted, but a shift brings it back.
    assert plan(-80 * direction, direction.repeat(1000, 1), v)[0] == "tile_shift"
    assert not safe(80)


def test_a_shift_lies_inside_its_proof():
    direction = torch.ones(1, 8) / 8**0.5
    q = torch.cat([100 * direction.repeat(512, 1), 30 * direction.repeat(88, 1)])
    regime, shifts = plan(q, direction.repeat(1000, 1), torch.ones(1000, 4))
    assert regime == "tile_shift" and shifts.shape == (2,)
    # Every score of the first tile is 100, of the second 30.
    assert abs(float(shifts[0]) - 100) < 70 and abs(float(shifts[1]) - 30) < 70


def test_what_is_not_finite_takes_the_maximum():
    q, k, v = cases.random(10, 8), cases.random(10, 8, seed=1), cases.random(10, 4, seed=2)
    for tensors in ((q * torch.inf, k, v), (q, k * torch.nan, v), (q, k * torch.inf, v), (q, k, v * torch.inf)):
        assert plan(*tensors)[0] == "running_maximum"
    assert plan(q, k, v * 0)[0] == "running_maximum", "nothing is known of the size of a result"
    assert plan(q, k, v)[0] == "unshifted"


def test_statistics_of_parts_bound_those_of_the_whole():
    k, v = cases.random(2, 30, 3, 8, seed=1) + 2, cases.random(2, 30, 3, 8, seed=2)
    mask = torch.rand(2, 30, generator=torch.Generator().manual_seed(3)) < 0.5
    mask[0, :10] = False
    k, v = torch.where(mask[..., None, None], k, torch.nan), torch.where(mask[..., None, None], v, torch.nan)
    whole = key_statistics(k, v, mask)
    parts = [key_statistics(*(t[:, first : first + 10] for t in (k, v, mask))) for first in (0, 10, 20)]
    joined = joined_statistics([unpacked_statistics(part.packed()) for part in parts])
    for name in ("number", "norm", "value", "example", "mean"):
        torch.testing.assert_close(getattr(joined, name), getattr(whole, name))
    assert (joined.radius >= whole.radius).all() and (joined.radius < 1.5 * whole.radius).all()
    for batch in range(2):
        rows = k[batch][mask[batch]]
        torch.testing.assert_close(whole.mean[batch], rows.mean(0))
        torch.testing.assert_close(whole.radius[batch], (rows - rows.mean(0)).norm(dim=-1).amax(0))
        assert torch.equal(whole.example[batch], rows[0])
