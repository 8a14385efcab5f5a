# SPDX-License-Identifier: Apache-2.0
"""Every layout of TP, SP, CP and CFG over up to eight ranks gives the latents of one process. Pads hold NaN."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import layout_ranks
import pytest
import torch

from omni_neuron_parallel import ContextMethod, RankPool, Topology
from omni_neuron_wan22 import TinyWan, make_tiny_checkpoint

WORLD = 8
# 3 latent frames of 3×5 tokens: 45, which CP 2, 4, 6, 7 and 8 do not divide, nor TP the shards of most.
LATENT_SHAPE = (1, 16, 3, 6, 10)
# Heads that TP 1, 2, 3, 4, 6 and 8 divide, and heads for TP 5 and 7.
HEADS = {tp: 35 if tp in (5, 7) else 24 for tp in range(1, WORLD + 1)}
FEW_HEADS = 4


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    cp: int = 1
    cfg: int = 1
    sequence_parallel: bool = False
    method: ContextMethod = "auto"

    @property
    def topology(self) -> Topology:
        return Topology(tp=self.tp, cp=self.cp, cfg=self.cfg)

    @property
    def guidance_scale(self) -> float:
        """No guidance where CFG 2 has no room: half of the work of the largest worlds, which take longest."""
        return 4.0 if 2 * self.tp * self.cp <= WORLD else 1.0

    def __str__(self) -> str:
        parts = [f"tp{self.tp}", "sp" * self.sequence_parallel, f"cp{self.cp}", f"cfg{self.cfg}"]
        return "-".join([part for part in parts if part] + ([self.method] if self.method != "auto" else []))


SIZES = range(1, WORLD + 1)
LAYOUTS = [
    Layout(tp, cp, cfg, sequence_parallel)
    for cfg in (1, 2)
    for tp in SIZES
    for cp in SIZES
    for sequence_parallel in (False, True)
    if 1 < tp * cp * cfg <= WORLD and (tp > 1 or not sequence_parallel)
]
RINGS = [Layout(1, cp, 1, False, "ring") for cp in (2, 3)] + [Layout(2, 3, 1, True, "ring")]


def relative_l2(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture(scope="module")
def eight_ranks(preload: tuple[str, ...]) -> Iterator[RankPool]:
    with RankPool(WORLD, timeout=300, preload=preload) as pool:
        yield pool


@pytest.fixture(scope="module", autouse=True)
def _threads_of_a_rank(eight_ranks: RankPool) -> Iterator[None]:
    """One thread here as on every rank: a matrix product's bits depend on how it is split among threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Narrow checkpoints by their number of heads."""
    folder = tmp_path_factory.mktemp("layouts")
    sizes = TinyWan(attention_head_dim=6, ffn_dim=50, text_dim=16, text_layers=1, vae_base_dim=8)
    return {
        # One block an expert where many layouts run: time goes by the number of collectives.
        heads: str(
            make_tiny_checkpoint(
                folder / str(heads),
                replace(sizes, num_attention_heads=heads, num_layers=2 if heads == FEW_HEADS else 1),
            )
        )
        for heads in sorted({FEW_HEADS, *HEADS.values()})
    }


Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def run(eight_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`function(*arguments)` on the ranks of a topology: the results of all of them."""
    folder = tmp_path_factory.mktemp("stores")
    runs = iter(range(1_000))

    def on_ranks(topology: Topology, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        if topology.world_size == 1:
            with torch.no_grad():
                return [function(*arguments)]
        store = str(folder / str(next(runs)))
        results = eight_ranks.run(layout_ranks.in_world, topology, store, function, arguments)
        return results[: topology.world_size]

    return on_ranks


Latents = Callable[[Layout, int, float], torch.Tensor]


@pytest.fixture(scope="module")
def latents(run: Run, checkpoints: dict[int, str]) -> Latents:
    """Final latents by layout, heads and guidance scale, checked to be those of all ranks; each is run once."""

    @functools.cache
    def of(layout: Layout, heads: int, guidance_scale: float) -> torch.Tensor:
        options = (guidance_scale, layout.sequence_parallel, layout.method)
        results = run(layout.topology, layout_ranks.denoise, checkpoints[heads], LATENT_SHAPE, *options)
        assert all(torch.equal(result, results[0]) for result in results)
        return results[0]

    return of


@pytest.mark.parametrize("layout", [*LAYOUTS, *RINGS], ids=str)
def test_latents_after_20_steps(layout: Layout, latents: Latents) -> None:
    of = HEADS[layout.tp], layout.guidance_scale
    actual, expected = latents(layout, *of), latents(Layout(), *of)
    assert relative_l2(actual, expected) <= 1e-4
    if layout.cfg > 1:
        # The same sums in the same order: only who computes a branch differs.
        assert torch.equal(actual, latents(replace(layout, cfg=1), *of))


@pytest.mark.parametrize("layout", [Layout(2, 2, 2, sequence_parallel=True), Layout(1, 2, 1)], ids=str)
def test_cached_steps(layout: Layout, run: Run, checkpoints: dict[int, str]) -> None:
    """Ranks decide alike, a branch as in a process of its own, and pads (NaN) have no say."""
    arguments = (checkpoints[FEW_HEADS], LATENT_SHAPE, 4.0)
    [(expected, alone, report)] = run(Topology(), layout_ranks.denoise_cached, *arguments, False)
    results = run(layout.topology, layout_ranks.denoise_cached, *arguments, layout.sequence_parallel)
    assert all(torch.equal(latents, results[0][0]) for latents, _, _ in results)
    assert relative_l2(results[0][0], expected) <= 1e-4
    recorded: dict[tuple[str, str], list[Any]] = {}
    for _, records, _ in results:
        assert len(records) == 4 // layout.cfg
        for key, steps in records.items():
            # The changes too, to the last bit: a rank that measured for itself would have its own.
            assert str(recorded.setdefault(key, steps)) == str(steps)
    assert {key: [step.cached for step in steps] for key, steps in recorded.items()} == {
        key: [step.cached for step in steps] for key, steps in alone.items()
    }
    assert all({step.cached for step in steps} == {True, False} for steps in alone.values())
    reported = results[0][2]
    for name, branches in report.items():
        for branch, of in branches.items():
            assert reported[name][branch]["cached_steps"] == of["cached_steps"]


@pytest.mark.parametrize(("cp", "method"), [(2, "gather"), (4, "gather"), (8, "gather"), (8, "ring")])
def test_a_token_count_that_cp_does_not_divide(
    run: Run, checkpoints: dict[int, str], cp: int, method: ContextMethod
) -> None:
    """240×432×33: 9·15·27 = 3645 tokens, an odd number."""
    arguments = (checkpoints[FEW_HEADS], (1, 16, 9, 30, 54), method)
    [expected] = run(Topology(), layout_ranks.forward_once, *arguments)
    for actual in run(Topology(cp=cp), layout_ranks.forward_once, *arguments):
        assert actual.shape == expected.shape
        assert relative_l2(actual, expected) <= 1e-4


def test_cross_attention_does_not_communicate_over_cp(run: Run, checkpoints: dict[int, str]) -> None:
    for asked in run(Topology(cp=2), layout_ranks.collectives_by_module, checkpoints[FEW_HEADS], "cp"):
        assert asked == ["blocks.0.attn1: all_gather", "blocks.1.attn1: all_gather", "model: all_gather"]


@pytest.mark.parametrize("topology", [Topology(tp=2), Topology(cp=2)], ids=str)
def test_a_forward_traces_into_one_graph(run: Run, checkpoints: dict[int, str], topology: Topology) -> None:
    results = run(topology, layout_ranks.traced_forward, checkpoints[FEW_HEADS], topology.tp > 1)
    assert results == [(True, 1)] * 2
