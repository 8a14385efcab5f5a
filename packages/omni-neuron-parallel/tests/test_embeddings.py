# SPDX-License-Identifier: Apache-2.0
"""Rotary tables and sinusoids against their formulas in float64, and the norm of one head."""

from __future__ import annotations

import pytest
import torch
from parallel_ranks import random

from omni_neuron_kernels import rotate_pairs
from omni_neuron_parallel import RMSNorm, RotaryTables, sinusoidal_embedding

CHANNELS, LENGTHS, THETA = (4, 6, 2), (5, 7, 3), 256.0


def angles(position: tuple[int, ...]) -> list[float]:
    """Of one token, pair by pair."""
    return [
        place * THETA ** -(2 * pair / count)
        for place, count in zip(position, CHANNELS, strict=True)
        for pair in range(count // 2)
    ]


def test_every_token_of_a_grid_turns_by_its_place() -> None:
    tables = RotaryTables(CHANNELS, LENGTHS, theta=THETA)
    assert not tables.state_dict()
    cos, sin = tables(2, 7, 3)
    expected = torch.tensor(
        [angles((a, b, c)) for a in range(2) for b in range(7) for c in range(3)], dtype=torch.float64
    )
    assert cos.dtype == sin.dtype == torch.float32
    assert (cos - expected.cos()).abs().max() < 1e-7 and (sin - expected.sin()).abs().max() < 1e-7
    # Places that are data, also in a compiled graph, where others make no new one.
    graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        return graph.forward

    compiled = torch.compile(tables, fullgraph=True, dynamic=False, backend=backend)
    for places in ([3, 1], [0, 4]):
        chosen = compiled(torch.tensor(places), 1, torch.tensor([2]))
        expected = torch.tensor([angles((a, 0, 2)) for a in places], dtype=torch.float64)
        assert (chosen[0] - expected.cos()).abs().max() < 1e-7 and (chosen[1] - expected.sin()).abs().max() < 1e-7
    assert graphs == 1
    # Relative positions are what a score sees.
    heads = random(1, 1, 1, 12, seed=1).expand(1, 4, 1, 12)
    turned = rotate_pairs(heads, *tables(4, 1, 1)).flatten(2)[0]
    scores = turned @ turned.mT
    for offset in range(4):
        assert torch.allclose(scores.diagonal(offset), scores[0, offset], atol=1e-5)


def test_angles_in_float32_are_those_of_references_that_round_them() -> None:
    rounded, exact = (
        RotaryTables((4,), (2000,), angle_dtype=dtype)(2000)[0] for dtype in (torch.float32, torch.float64)
    )
    places = torch.outer(torch.arange(2000.0, dtype=torch.float64), torch.tensor([1.0, 0.01], dtype=torch.float64))
    assert torch.equal(rounded, places.float().cos()) and torch.equal(exact, places.cos().float())
    assert not torch.equal(rounded, exact)


def test_sizes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"channels \[3\] and lengths \[4\]: valid is an even number an axis"):
        RotaryTables((3,), (4,))
    tables = RotaryTables(CHANNELS, LENGTHS)
    with pytest.raises(ValueError, match="8 positions on axis 1; the tables have 7"):
        tables(1, 8, 1)
    with pytest.raises(ValueError, match="positions for 2 axes; the tables have 3"):
        tables(1, 1)


def test_sinusoids_of_a_timestep() -> None:
    times = torch.tensor([0.0, 3.5, 999.0], dtype=torch.float64)
    waves = times[:, None] * 10000 ** -(torch.arange(4, dtype=torch.float64) / 4)
    expected = torch.cat([waves.cos(), waves.sin()], dim=-1)
    made = sinusoidal_embedding(times, 8)
    assert made.dtype == torch.float32
    assert (made - expected).abs().max() < 1e-4  # angles up to 999 in float32


def test_rms_norm_of_each_head_by_itself() -> None:
    norm, heads = RMSNorm(8, 1e-6), random(2, 3, 4, 8, seed=2)
    norm.weight.data.copy_(random(8, seed=3))
    expected = heads.double() / (heads.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    assert (norm(heads) - expected).abs().max() < 1e-5
    assert norm(heads.bfloat16()).dtype == torch.bfloat16
