# SPDX-License-Identifier: Apache-2.0
"""The proof that softmax may go without a shift: tight inputs at its edge, and what it refuses."""

from __future__ import annotations

import math

import parallel_ranks
import pytest
import torch

from omni_neuron_parallel import bounded_softmax_is_safe
from omni_neuron_parallel.softmax_bound import head_abs_max, head_norm_max

TINY = 2.0**-126


def safe(bound: float, num_keys: int = 1000, v_abs_max: float = 1.0) -> bool:
    one = torch.ones(1)
    return bool(bounded_softmax_is_safe(one * bound, one, 1.0, num_keys, one * v_abs_max))


def largest_safe_bound(num_keys: int, v_abs_max: float) -> float:
    bounds = torch.arange(10000) / 100
    ones = torch.ones_like(bounds)
    return float(bounds[bounded_softmax_is_safe(bounds, ones, 1.0, num_keys, ones * v_abs_max)].max())


@pytest.mark.parametrize("num_keys", [1, 1000, 75600])
@pytest.mark.parametrize("v_abs_max", [1e-20, 1e-3, 1.0, 1e3, 1e20])
@pytest.mark.parametrize("sign", [1, -1])
def test_exact_at_the_edge(num_keys: int, v_abs_max: float, sign: int) -> None:
    """Every score at the bound: the largest and the smallest sums there can be, subnormal numbers flushed."""
    score = sign * largest_safe_bound(num_keys, v_abs_max)
    weights = torch.full((num_keys,), score).exp()
    value = parallel_ranks.random(num_keys, seed=1).clamp(-1, 1) * v_abs_max
    products = weights * value
    products[products.abs() < TINY] = 0
    denominator = weights.sum()
    assert weights.min() >= TINY
    assert denominator.isfinite()
    assert abs(products.double().sum() / denominator.double() - value.double().mean()) < 1e-6 * v_abs_max


def test_mixed_scores_at_the_edge() -> None:
    bound = largest_safe_bound(4096, 4.0)
    scores = (parallel_ranks.random(64, 4096, seed=2) * 40).clamp(-bound, bound)
    value = parallel_ranks.random(4096, 16, seed=3).clamp(-4, 4)
    unshifted = scores.exp() @ value / scores.exp().sum(-1, keepdim=True)
    exact = scores.double().softmax(-1) @ value.double()
    assert (unshifted - exact).norm() < 1e-6 * exact.norm()


def test_the_range_is_twice_that_of_subtracting_the_bound() -> None:
    bound = largest_safe_bound(75600, 5.0)
    assert 69 < bound < 70.1
    # exp(-2b) is zero in float32 where the worst row needs it: the shift c = b would have lost that row.
    assert torch.tensor(-2 * bound).exp() == 0


def test_beyond_the_edge() -> None:
    assert not safe(71)
    assert not safe(69, v_abs_max=1e-3), "small values would be flushed to zero with their weights"
    assert safe(69, v_abs_max=1e3)
    assert not safe(69, num_keys=1 << 20, v_abs_max=1e10), "the sum of weighted values would overflow"
    assert not safe(1, v_abs_max=0.0) and not safe(1, v_abs_max=math.nan) and not safe(1, v_abs_max=math.inf)
    assert not safe(math.nan) and not safe(math.inf)


def test_each_head_is_judged_alone() -> None:
    norms = torch.tensor([1.0, 8.0, 9.0])
    ones = torch.ones(3)
    assert bounded_softmax_is_safe(norms, norms, -1.0, 10, ones).tolist() == [True, True, False]
    assert bounded_softmax_is_safe(norms, norms, 0.5, 10, ones).tolist() == [True, True, True]


def test_norms() -> None:
    tensor = parallel_ranks.random(2, 5, 3, 4, seed=1)
    expected = torch.stack([tensor[:, :, head].norm(dim=-1).max() for head in range(3)])
    torch.testing.assert_close(head_norm_max(tensor), expected)
    assert torch.equal(head_abs_max(tensor), torch.stack([tensor[:, :, head].abs().max() for head in range(3)]))
    assert head_norm_max(tensor[:, :0]).tolist() == head_abs_max(tensor[:, :0]).tolist() == [0, 0, 0]
    # Squares of these vanish in float32, their norms do not.
    assert (head_norm_max(torch.full((1, 1, 1, 64), 2.0**-80)) >= 8 * 2.0**-80).all()
