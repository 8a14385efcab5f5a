# SPDX-License-Identifier: Apache-2.0
"""Whether what an engine captured of a request is complete: every step, rank and branch of guidance."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from omni_neuron_testkit.captures import read_run

from .case import Layout


def check(folder: Path, plan: Sequence[tuple[str, int]], layout: Layout) -> dict[str, Any]:
    """Look at the captured tensors of one request.

    Args:
        folder: of the run, with a folder a step.
        plan: of each step the component that takes it and the number of its branches.
        layout: of the ranks.

    Returns:
        Figures for the report.

    Raises:
        AssertionError: a step, a rank's part or a branch is missing or too many, a tensor is of another component, not
            finite or in one step of another shape than in others.
        CaptureError: the folder is no captured run.
    """
    run = read_run(folder)
    assert len(run.steps) == len(plan), (
        f"{len(run.steps)} steps were captured of {len(plan)}; capture tells them apart by the keyword `timestep` that "
        "`model_inputs` hands on"
    )
    ranks = set(itertools.product(range(layout.tp), range(layout.cp)))
    shapes: dict[tuple[Any, ...], tuple[int, ...]] = {}
    tensors = 0
    for step, (component, branches) in zip(run.steps, plan, strict=True):
        where = f"step {step.step + 1} of {len(plan)}"
        for name, parts in step.load().items():
            assert name.partition(".")[0] == component, f"{where}, which {component} takes, has {name}"
            # Where branches are computed: all of them hold other values, or `load` would count them as one.
            assert set(parts) == set(range(branches)), (
                f"{where}, {name}: captured are the branches {sorted(parts)} of {branches} (those that hold the same "
                "bits in every tensor count as one)"
            )
            for branch, by_rank in parts.items():
                assert set(by_rank) == ranks, (
                    f"{where}, {name}, branch {branch}: captured on the ranks (tp, cp) {sorted(by_rank)}; there are "
                    f"{sorted(ranks)}"
                )
                for rank, tensor in by_rank.items():
                    assert np.isfinite(tensor).all(), f"{where}, {name}, branch {branch}: not finite on rank {rank}"
                    first = shapes.setdefault((name, branch, rank), tensor.shape)
                    assert tensor.shape == first, (
                        f"{where}, {name}: {list(tensor.shape)}, in a step before {list(first)}"
                    )
                    tensors += 1
    return {"steps": len(plan), "tensors": tensors, "modules": len({name for name, _, _ in shapes})}
