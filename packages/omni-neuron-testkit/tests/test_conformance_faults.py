# SPDX-License-Identifier: Apache-2.0
"""Ten planted faults: on each the kit fails with the test whose business it is, and passes what is not touched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import conformance_faults as faults
import pytest
import torch
from conformance_toy_reference import ToySuite

from omni_neuron_testkit.conformance import Layout, ModelConformance
from omni_neuron_testkit.conformance.engine import EngineRun
from omni_neuron_testkit.conformance.kit import Kit
from omni_neuron_testkit.conformance.ranks import RankRuns, Run

TP2, CP2, BOTH = Layout(tp=2), Layout(cp=2), Layout(tp=2, cp=2)
Check = tuple[str, tuple[Any, ...]]


def layout(one: Layout) -> Check:
    return "test_layout", (one,)


# Fault, the test that must fail, part of its message, a test that must pass all the same.
FAULTS: list[tuple[str, type[ModelConformance], Check, str, Check | None]] = [
    ("missing all-reduce", faults.suite_of(faults.MissingAllReduce), layout(TP2), "after step 1 ", layout(CP2)),
    ("bias on each rank", faults.suite_of(faults.BiasOnEachRank), layout(TP2), "after step 1 ", layout(CP2)),
    ("mask ignored", faults.suite_of(faults.MaskIgnored), ("test_parity_float32", ()), "after step 1 ", layout(TP2)),
    ("wrong rope slice", faults.suite_of(faults.WrongRope), layout(CP2), "after step 1 ", ("test_parity_float32", ())),
    (
        "replicated key twice",
        faults.suite_of(faults.CountedTwice),
        layout(CP2),
        "after step 1 ",
        ("test_parity_float32", ()),
    ),
    (
        "seed per rank",
        faults.suite_of(faults.SeedPerRank),
        ("test_seeds", ()),
        "noise of rank 1",
        ("test_parity_float32", ()),
    ),
    ("unmapped weight", faults.UnmappedWeight, ("test_loader_coverage", ()), "blocks.1.down.bias", None),
    ("graph break", faults.suite_of(faults.GraphBreak), ("test_graphs", ()), "item", layout(TP2)),
    (
        "half the world",
        faults.suite_of(faults.HalfTheWorld),
        ("test_replica_groups", ()),
        r"does not cover the world of 4",
        layout(BOTH),
    ),
    (
        "uncaught size",
        faults.suite_of(faults.UncaughtSize),
        ("test_sizes", ()),
        "let through and fails",
        ("test_parity_float32", ()),
    ),
]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    return Kit(ToySuite, tmp_path_factory.mktemp("healthy"))


@pytest.fixture
def kit_of(healthy: Kit, tmp_path: Path) -> Callable[[Any], Kit]:
    """A kit for a faulty toy with the healthy one's checkpoint and reference, which the faults do not concern."""

    def make(suite: Any) -> Kit:
        kit = Kit(suite, tmp_path)
        kit.once("checkpoint", healthy.checkpoint)
        kit.once(("reference", "float32"), lambda: healthy.reference("float32"))
        return kit

    return make


@pytest.mark.parametrize(
    ("suite", "failing", "message", "passing"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS]
)
def test_planted_fault(
    kit_of: Callable[[Any], Kit], suite: Any, failing: Check, message: str, passing: Check | None
) -> None:
    kit = kit_of(suite)
    if passing is not None:
        getattr(suite(), passing[0])(kit, *passing[1])
    with pytest.raises(AssertionError, match=message):
        getattr(suite(), failing[0])(kit, *failing[1])


def test_what_is_neither_run_nor_declared_fails(kit_of: Callable[[Any], Kit]) -> None:
    class Undeclared(ToySuite):
        not_supported: ClassVar[dict[str, str]] = {}

    suite = Undeclared()
    kit = kit_of(Undeclared)
    with pytest.raises(AssertionError, match="say why in not_supported\\['sp'\\]"):
        suite.test_layout(kit, Layout(tp=2, sequence_parallel=True))
    with pytest.raises(AssertionError, match="not_supported\\['memory_plan'\\]"):
        suite.test_memory_plan(kit)


def test_what_a_feature_does_to_the_engine_is_that_features_failure(kit_of: Callable[[Any], Kit]) -> None:
    suite, latents = ToySuite(), torch.ones(4)
    before: dict[str, Any] = {"status": "registered", "broken_status": "failed", "latents": latents}
    before["broken_reason"] = "the conformance kit broke this package on purpose"
    runs = {
        "asleep the ranks freed": EngineRun(**before, freed=[0], latents_after_sleep=latents, output_is_back=True),
        "other latents after sleep": EngineRun(**before, freed=[8], latents_after_sleep=latents + 1),
        "another output after sleep": EngineRun(**before, freed=[8], latents_after_sleep=latents),
        "RuntimeError: no room": EngineRun(**before, errors={"sleep": "RuntimeError: no room"}),
    }
    for message, run in runs.items():
        kit = kit_of(ToySuite)
        kit.once("engine", lambda run=run: run)
        suite.test_isolation(kit)
        with pytest.raises(AssertionError, match=message):
            suite.test_sleep(kit)


def test_a_warm_up_that_misses_a_graph_fails(kit_of: Callable[[Any], Kit]) -> None:
    kit = kit_of(ToySuite)
    kit.once("compiled", lambda: [RankRuns([Run(graphs=1)], {}, set(), [], warm_up_graphs=2)])
    with pytest.raises(
        AssertionError, match=r"after the warm-up of \['48x80'\] a request of that size compiled 1 graphs"
    ):
        ToySuite().test_warmup_shapes(kit)


def test_an_axis_of_the_spec_must_be_seen(kit_of: Callable[[Any], Kit]) -> None:
    class OneAxis(ToySuite):
        layouts = (TP2,)

    with pytest.raises(AssertionError, match="axes cp, cfg, which no layout"):
        OneAxis().test_spec(kit_of(OneAxis))


def test_a_test_of_the_kit_cannot_be_taken_away(kit_of: Callable[[Any], Kit]) -> None:
    class Replaced(ToySuite):
        test_seeds = None

    with pytest.raises(AssertionError, match="test_seeds is replaced"):
        Replaced().test_spec(kit_of(Replaced))


def test_what_needs_ranks_and_has_none_is_shown_as_such(kit_of: Callable[[Any], Kit]) -> None:
    class OneRank(ToySuite):
        not_supported: ClassVar[dict[str, str]] = {**ToySuite.not_supported, "layout": "the toy is small"}

    for test in (OneRank().test_rank_agreement, OneRank().test_replica_groups):
        with pytest.raises(pytest.skip.Exception, match="not supported: no layout of several ranks is"):
            test(kit_of(OneRank))
