# SPDX-License-Identifier: Apache-2.0
"""Guidance over CFG ranks against the same on one: the same bits, one gather, the model's own combination."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import cfg_ranks
import parallel_ranks
import pytest
import torch

from omni_neuron_parallel import (
    AxisGroup,
    RankPool,
    Topology,
    check_cfg_parallel_size,
    gather_branches,
    warn_of_idle_cfg_ranks,
)

GATHER = ["all_gather"]


@pytest.fixture(autouse=True)
def _threads_of_a_rank(two_ranks: RankPool) -> Iterator[None]:
    """As many threads as each rank has: a matrix product's bits depend on how it is split among threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(two_ranks.run(torch.get_num_threads)[0])
    yield
    torch.set_num_threads(before)


def on(pool: RankPool, function: Any, *arguments: Any, cfg: int | None = None) -> list[Any]:
    size = cfg or pool.world_size
    topology = Topology(cp=pool.world_size // size, cfg=size)
    return pool.run(parallel_ranks.with_topology, topology, function, *arguments)


def assert_same_bits(results: list[Any], expected: tuple[torch.Tensor, ...]) -> None:
    for prediction, *_ in results:
        assert len(prediction) == len(expected)
        for part, reference in zip(prediction, expected, strict=True):
            assert part.dtype == reference.dtype
            assert torch.equal(part, reference)


@pytest.mark.parametrize("outputs", [1, 3], ids=["one-output", "three-shapes-and-dtypes"])
def test_positive_on_rank_0_negative_on_rank_1(two_ranks: RankPool, outputs: int) -> None:
    expected, calls, _, _ = cfg_ranks.guided("plain", outputs, {})
    results = on(two_ranks, cfg_ranks.guided, "plain", outputs, {})
    assert_same_bits(results, expected)
    assert calls == [1, 2]
    assert [(calls, deferred, names) for _, calls, deferred, names in results] == [
        ([1], False, GATHER),
        ([2], False, GATHER),
    ]


@pytest.mark.parametrize("kwargs", [None, {"factor": 0.5}], ids=["without-kwargs", "with-kwargs"])
def test_the_models_own_combination_is_called(two_ranks: RankPool, kwargs: dict[str, Any] | None) -> None:
    options = {"kwargs": kwargs}
    results = on(two_ranks, cfg_ranks.guided, "own", 2, options)
    assert_same_bits(results, cfg_ranks.guided("own", 2, options)[0])
    positive = cfg_ranks.Pipeline(2).predict_noise(1)[1]
    assert torch.equal(results[1][0][1], positive)  # the audio, which only rank 0 computed
    plain = cfg_ranks.guided("plain", 2, {})[0]
    assert torch.equal(results[0][0][0], plain[0]) == (kwargs is None)


@pytest.mark.parametrize("branches", [2, 3, 4])
@pytest.mark.parametrize("outputs", [1, 2])
def test_branches_go_round(two_ranks: RankPool, branches: int, outputs: int) -> None:
    results = on(two_ranks, cfg_ranks.guided_by_branches, branches, outputs, {})
    assert_same_bits(results, cfg_ranks.guided_by_branches(branches, outputs, {})[0])
    for rank, (_, calls, deferred, names) in enumerate(results):
        assert calls == list(range(rank, branches, 2))
        assert not deferred
        assert names == GATHER


def test_as_many_ranks_as_branches(four_ranks: RankPool) -> None:
    results = on(four_ranks, cfg_ranks.guided_by_branches, 4, 1, {})
    assert_same_bits(results, cfg_ranks.guided_by_branches(4, 1, {})[0])
    assert [calls for _, calls, _, _ in results] == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    "options",
    [
        {"do_true_cfg": False},
        {"do_true_cfg": False, "negative_kwargs": None},
        {"cfg_normalize": True},
        {"output_slice": 2},
    ],
    ids=["no-guidance", "no-negative", "cfg_normalize", "output_slice"],
)
def test_deferred_cases_give_the_same_and_do_not_communicate(two_ranks: RankPool, options: dict[str, Any]) -> None:
    expected, calls, _, _ = cfg_ranks.guided("plain", 1, options)
    results = on(two_ranks, cfg_ranks.guided, "plain", 1, options)
    assert_same_bits(results, expected)
    for _, of_rank, deferred, names in results:
        assert (of_rank, deferred, names) == (calls, True, [])


@pytest.mark.parametrize("options", [{"do_true_cfg": False}, {"cfg_normalize": True}])
def test_deferred_cases_of_many_branches(two_ranks: RankPool, options: dict[str, Any]) -> None:
    results = on(two_ranks, cfg_ranks.guided_by_branches, 3, 1, options)
    assert_same_bits(results, cfg_ranks.guided_by_branches(3, 1, options)[0])
    assert all(deferred and not names for _, _, deferred, names in results)


def test_a_group_of_one_defers(two_ranks: RankPool) -> None:
    results = on(two_ranks, cfg_ranks.guided, "plain", 1, {}, cfg=1)
    assert all((calls, deferred, names) == ([1, 2], True, []) for _, calls, deferred, names in results)


def test_more_ranks_than_branches(two_ranks: RankPool, four_ranks: RankPool) -> None:
    """An error on every rank, before any computes."""
    for message in on(four_ranks, cfg_ranks.refused, "two"):
        assert message == ("cfg_parallel_size = 4: guidance has 2 branches, one a rank at most; valid sizes are 1, 2")
    for message in on(four_ranks, cfg_ranks.refused, "many"):
        assert "cfg_parallel_size = 4: guidance has 3 branches" in message
    for message in on(two_ranks, cfg_ranks.refused, "no negative"):
        assert message == "do_true_cfg is set, but negative_kwargs is None"
    with pytest.raises(ValueError, match="cfg_parallel_size = 0"):
        check_cfg_parallel_size(0, 2)


def test_gather_and_combine_is_one_graph(two_ranks: RankPool) -> None:
    assert on(two_ranks, cfg_ranks.traced, 2) == [(True, 1)] * 2


def test_branches_are_in_round_robin_order_in_a_group_of_one() -> None:
    branches = [(torch.tensor([1.0]), torch.tensor([[2.0]])), (torch.tensor([3.0]), torch.tensor([[4.0]]))]
    assert gather_branches(branches, AxisGroup("cfg")) == branches


@pytest.mark.parametrize(("size", "idle"), [(2, "half of the cores"), (3, "2 in 3 of the cores")])
def test_idle_ranks_are_reported_once(caplog: pytest.LogCaptureFixture, size: int, idle: str) -> None:
    warn_of_idle_cfg_ranks.cache_clear()
    with caplog.at_level(logging.WARNING):
        warn_of_idle_cfg_ranks(size)
        warn_of_idle_cfg_ranks(size)
    [record] = caplog.records
    assert f"cfg_parallel_size = {size}" in record.message
    assert idle in record.message
    assert "cfg_parallel_size to 1" in record.message


def test_only_steps_without_guidance_report_idle_ranks(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Without(AxisGroup):
        def __post_init__(self) -> None:
            pass

    warn_of_idle_cfg_ranks.cache_clear()
    arguments = (1.0, {"seed": 1}, {"seed": 2})
    for rank, do_true_cfg, warnings in ((0, True, 0), (1, False, 0), (0, False, 1)):
        group = Without("cfg", (0, 1), rank)
        monkeypatch.setattr("omni_neuron_parallel.cfg.get_group", lambda axis, group=group: group)
        cfg_ranks.Pipeline().predict_noise_maybe_with_cfg(do_true_cfg, *arguments, cfg_normalize=True)
        assert len(caplog.records) == warnings
