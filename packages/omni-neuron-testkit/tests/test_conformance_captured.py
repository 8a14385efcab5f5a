# SPDX-License-Identifier: Apache-2.0
"""What the kit says of captured tensors that are not all there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from omni_neuron_testkit import CaptureError, write_step
from omni_neuron_testkit.conformance import Layout
from omni_neuron_testkit.conformance.captured import check

# Two experts; the last step has no guidance.
PLAN = [("first", 2), ("first", 2), ("second", 1)]
Place = tuple[int, int, int]  # step, tp rank, branch
BROKEN: Place = (1, 1, 0)
WHOLE = {"first.blocks.0": torch.zeros(1, 3)}


def capture(
    folder: Path, layout: Layout, *, without: Place | None = None, broken: dict[str, torch.Tensor] = WHOLE
) -> Path:
    """Write what the plan needs but for one place, and at another one what is broken."""
    for step, (component, branches) in enumerate(PLAN):
        for tp in range(layout.tp):
            for branch in range(max(branches, layout.cfg)):
                value = torch.full((1, 3), float(min(branch, branches - 1)))
                tensors = broken if (step, tp, branch) == BROKEN else {f"{component}.blocks.0": value}
                if (step, tp, branch) != without:
                    ranks = (tp, 0, branch % layout.cfg)
                    write_step(folder, step, 900.0 - step, tensors, ranks=ranks, call=branch // layout.cfg)
    return folder


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, cfg=2)], ids=str)
def test_all_of_it(tmp_path: Path, layout: Layout) -> None:
    assert check(capture(tmp_path, layout), PLAN, layout) == {"steps": 3, "tensors": 10, "modules": 2}


def test_what_is_missing_or_wrong(tmp_path: Path) -> None:
    layout = Layout(tp=2)

    def refused(message: str, folder: Path) -> None:
        with pytest.raises(AssertionError, match=re.escape(message)):
            check(folder, PLAN, layout)

    one_branch = "step 1 of 3, first.blocks.0, branch 1: captured on the ranks (tp, cp) [(0, 0)]; there are"
    refused(one_branch, capture(tmp_path / "rank", layout, without=(0, 1, 1)))
    broken = {
        "first.blocks.0, branch 0: not finite on rank (1, 0)": {"first.blocks.0": torch.full((1, 3), torch.inf)},
        "first.blocks.0: [1, 4], in a step before [1, 3]": {"first.blocks.0": torch.zeros(1, 4)},
    }
    for number, (message, tensors) in enumerate(broken.items()):
        refused(message, capture(tmp_path / str(number), layout, broken=tensors))
    with pytest.raises(AssertionError, match=r"step 3 of 3, which first takes, has second\.blocks\.0"):
        check(capture(tmp_path / "expert", layout), [*PLAN[:2], ("first", 1)], layout)
    alike = tmp_path / "alike"
    for step, (component, branches) in enumerate(PLAN):
        for tp in range(2):
            for call in range(branches):
                tensors = {f"{component}.blocks.0": torch.ones(2)}
                write_step(alike, step, None, tensors, ranks=(tp, 0, 0), call=call)
    refused("step 1 of 3, first.blocks.0: captured are the branches [0] of 2", alike)
    with pytest.raises(AssertionError, match="3 steps were captured of 2; capture tells them apart by the keyword"):
        check(alike, PLAN[:2], layout)
    with pytest.raises(CaptureError, match="holds no captured step"):
        (tmp_path / "nothing").mkdir()
        check(tmp_path / "nothing", PLAN, layout)
