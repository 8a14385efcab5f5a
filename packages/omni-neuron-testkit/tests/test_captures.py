# SPDX-License-Identifier: Apache-2.0
"""Captured runs: read, and compared step by step over layouts."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from omni_neuron_testkit import CaptureError, compare_runs, read_run, write_step

TIMESTEPS = (990.0, 800.0, 500.0, 150.0)
NAMES = ("transformer.blocks.0", "transformer.blocks.1")


def value(step, index, branch):
    generator = torch.Generator().manual_seed(100 * step + 10 * index + branch)
    return torch.randn(1, 5, 32, generator=generator)


def write_run(folder, *, cp=1, cfg=1, noise=0.0, dtype=torch.float32, change=None, timesteps=TIMESTEPS):
    """A guided run, of which the last step has no guidance; `change(step, branch, tensor)` breaks it."""
    for step, timestep in enumerate(timesteps):
        guided = step < len(timesteps) - 1
        for branch in range(2):
            expert = "transformer" if timestep > 600 else "transformer_2"
            tensors = {}
            for index, name in enumerate(NAMES):
                tensor = value(step, index, branch if guided else 0)
                generator = torch.Generator().manual_seed(step + int(1e6 * noise))
                tensor = tensor + noise * torch.randn(tensor.shape, generator=generator)
                tensors[name.replace("transformer", expert, 1)] = change(step, branch, tensor) if change else tensor
            for rank in range(cp):
                rows = -(-5 // cp)
                padded = {n: torch.nn.functional.pad(t, (0, 0, 0, rows * cp - 5)) for n, t in tensors.items()}
                parts = {n: t[:, rank * rows : (rank + 1) * rows].clone().to(dtype) for n, t in padded.items()}
                if cfg == 2:
                    write_step(folder, step, timestep, parts, ranks=(0, rank, branch))
                elif guided or branch == 0:
                    write_step(folder, step, timestep, parts, ranks=(0, rank, 0), call=branch)
    return folder


@pytest.fixture
def reference(tmp_path):
    return write_run(tmp_path / "reference" / "fox")


def test_layouts_compare_tensor_by_tensor(reference, tmp_path):
    actual = write_run(tmp_path / "ours", cp=2, cfg=2)
    report = compare_runs(reference.parent, None, actual)
    assert report.passed and report.problems == ()
    assert [step.timestep for step in report.steps] == list(TIMESTEPS)
    assert [c.name for c in report.steps[0].comparisons] == [
        "transformer.blocks.0",
        "transformer.blocks.0 (branch 1)",
        "transformer.blocks.1",
        "transformer.blocks.1 (branch 1)",
    ]
    assert len(report.steps[-1].comparisons) == 2  # the CFG ranks repeat each other without guidance
    assert report.ratios() == [0, 0, 0, 0] and report.trend.label == "stable"
    names, values = report.heat_map()
    assert names[:2] == ["blocks.0", "blocks.0 (branch 1)"]
    assert values[:2] == [[0, 0, 0, 0], [0, 0, 0, None]]


def test_three_way_over_steps(reference, tmp_path):
    low = write_run(tmp_path / "low", noise=0.01)
    ours = write_run(tmp_path / "ours", cp=2, noise=0.011)
    assert compare_runs(reference, low, ours).passed
    late = write_run(
        tmp_path / "late",
        noise=0.011,
        change=lambda step, branch, tensor: tensor.index_fill(1, torch.tensor([3]), 0.0) if step == 3 else tensor,
    )
    report = compare_runs(reference, low, late)
    assert not report.passed and all(problem.startswith("step 3: ") for problem in report.problems)
    assert report.trend.label == "spike" and report.trend.worst_step == 3
    assert json.loads(json.dumps(report.as_json(), allow_nan=False))["passed"] is False


def test_low_precision_without_its_reference_is_said(reference, tmp_path):
    report = compare_runs(reference, None, write_run(tmp_path / "ours", dtype=torch.bfloat16))
    assert report.problems[0] == "ours is bfloat16, and without a low-precision reference it is held to float32"


def test_disagreeing_ranks_fail(reference, tmp_path):
    ours = write_run(tmp_path / "ours")
    for step in range(4):
        for path in list((ours / f"step_{step:03d}").glob("*.pt")):
            shutil.copy(path, path.with_name(path.name.replace("_tp0", "_tp1")))
    assert compare_runs(reference, None, ours).passed
    path = ours / "step_002" / "transformer_2.blocks.1_tp1_cp0_cfg0.pt"
    torch.save(torch.load(path) * (1 + 1e-6), path)
    [problem] = compare_runs(reference, None, ours).problems
    assert problem == "step 2: transformer_2.blocks.1: ours: ranks disagree: tp1 cp0 holds other bits than tp0 cp0"


def test_missing_data_fails(reference, tmp_path):
    short = write_run(tmp_path / "short", timesteps=TIMESTEPS[:3])
    report = compare_runs(reference, None, short)
    assert not report.passed and report.problems[0] == "not as many steps: the reference has 4, ours has 3"
    other = write_run(tmp_path / "other", timesteps=(990.0, 800.0, 499.0, 150.0))
    assert (
        "step 2: other timesteps: the reference has 500.0, ours has 499.0"
        in compare_runs(reference, None, other).problems
    )
    for path in (other / "step_001").glob("transformer.blocks.1_*"):
        path.unlink()
    assert "step 1: transformer.blocks.1: not captured by ours" in compare_runs(reference, None, other).problems


def test_runs_that_cannot_be_read(reference, tmp_path):
    with pytest.raises(CaptureError, match="is no folder"):
        read_run(tmp_path / "nothing")
    with pytest.raises(CaptureError, match="holds no captured step"):
        read_run(tmp_path)
    write_run(reference.parent / "cat")
    with pytest.raises(CaptureError, match=r"several runs \(cat, fox\)"):
        read_run(reference.parent)
    (reference / "step_003" / "meta.json").unlink()
    with pytest.raises(CaptureError, match=r"step_003/meta\.json"):
        read_run(reference)
    for path in (reference / "step_002").glob("*.pt"):
        path.unlink()
    with pytest.raises(CaptureError, match="step_002 holds no captured tensor"):
        read_run(reference)
    shutil.rmtree(reference / "step_002")
    with pytest.raises(CaptureError, match="lacks step_002, but has step_003"):
        read_run(reference)
