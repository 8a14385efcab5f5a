# SPDX-License-Identifier: Apache-2.0
"""One model under test: its checkpoint, its reference, and every run of it, made when a test first asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from omni_neuron_testkit.pass_rule import Comparison, compare_three_way

from . import ranks
from .case import KitRequest, Layout, ReferenceRun
from .pool import run_in_world
from .ranks import RankRuns, Target, load

ONE = Layout()


@dataclass
class Kit:
    """What the tests of one class share.

    Attributes:
        suite: the test class.
        folder: of this class, empty at first.
        figures: what the running test measured.
    """

    suite: Any
    folder: Path
    figures: dict[str, Any] = field(default_factory=dict)
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def spec(self) -> Any:
        """The model's `ModelSpec`."""
        return load(self.suite.spec)

    @property
    def request(self) -> KitRequest:
        """The suite's own."""
        return self.suite.request

    @property
    def allowance(self) -> float:
        """Relative L2 error that float32 may have."""
        return float(self.suite.allowance)

    def examines(self, feature: str) -> bool:
        """Whether the spec has the feature, and the suite does not declare that the kit cannot test it."""
        return self.spec.supports(feature) and feature not in self.suite.not_supported

    def checkpoint(self) -> Path:
        """The tiny checkpoint, written once."""
        return self.once("checkpoint", lambda: Path(self.suite.checkpoint(self.folder / "checkpoint")))

    def target(self, layout: Layout = ONE, dtype: str = "float32", **engine: Any) -> Target:
        """What ranks make the pipeline of."""
        settings, architecture = {**self.suite.engine, **engine}, self.spec.architecture
        return Target(self.pipeline_path, architecture, str(self.checkpoint()), dtype, settings, layout)

    @property
    def pipeline_path(self) -> str:
        """The pipeline as "module:Class"."""
        pipeline = self.suite.pipeline
        return pipeline if isinstance(pipeline, str) else f"{pipeline.__module__}:{pipeline.__qualname__}"

    def reference(self, dtype: str) -> ReferenceRun:
        """The reference's run of the suite's request."""

        def make() -> ReferenceRun:
            torch.manual_seed(0)
            made = self.suite.reference(self.checkpoint(), self.request, getattr(torch, dtype))
            return made if isinstance(made, ReferenceRun) else ReferenceRun(made.float())

        return self.once(("reference", dtype), make)

    def denoised(self, layout: Layout = ONE, dtype: str = "float32") -> list[RankRuns]:
        """The suite's request on every rank of a layout; on one rank in float32 decoded, too."""
        decoded = layout == ONE and dtype == "float32"
        request = self.request.changed(output_type="pt") if decoded else self.request
        return self.once(
            ("denoised", layout, dtype),
            lambda: self.on_ranks(layout, ranks.run_requests, self.target(layout, dtype), [request]),
        )

    def on_ranks(self, layout: Layout, function: Callable[..., Any], *arguments: Any, paper: bool = False) -> list[Any]:
        """`run_in_world` on a layout."""
        pipeline = self.pipeline_path.partition(":")[0]
        return run_in_world(layout.topology, function, *arguments, paper=paper, preload=[pipeline])

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returns, or the error it raised, the same for every test that asks."""
        if key not in self._made:
            try:
                self._made[key] = make()
            except Exception as error:
                self._made[key] = error
        made = self._made[key]
        if isinstance(made, Exception):
            raise made
        return made

    def measure(self, name: str, comparison: Comparison) -> None:
        """Keep a comparison's figures for the report, and fail where it fails."""
        if comparison.errors is not None:
            self.figures[name] = comparison.errors.l2
        assert comparison.passed, "; ".join(comparison.problems)

    def measure_steps(
        self, name: str, expected: Sequence[torch.Tensor], actual: Sequence[torch.Tensor], allowance: float
    ) -> None:
        """Compare the latents after every step; the first one that is wrong says where it began."""
        assert len(actual) == len(expected), f"{len(actual)} steps were taken, the reference took {len(expected)}"
        worst = 0.0
        for step, (theirs, ours) in enumerate(zip(expected, actual, strict=True), start=1):
            comparison = compare_three_way(
                theirs, None, ours, f"latents after step {step} of {len(expected)}", allowance=allowance
            )
            assert comparison.passed, "; ".join(comparison.problems)
            assert comparison.errors is not None
            worst = max(worst, comparison.errors.l2)
        self.figures[name] = worst


def first_run(results: list[RankRuns]) -> ranks.Run:
    """Rank 0's run of the first request."""
    return results[0].runs[0]
