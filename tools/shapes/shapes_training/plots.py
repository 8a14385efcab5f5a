# SPDX-License-Identifier: Apache-2.0
"""Loss curves as SVG."""

from __future__ import annotations

import csv
from pathlib import Path

from omni_neuron_testkit import Panel, plot_lines

SMOOTH = 0.97
_LEAST = 1e-8  # a logarithmic axis has no zero


def plot_losses(work: Path) -> None:
    """Write `losses.svg` into the work folder: one panel a stage, smoothed loss over steps, logarithmic."""
    panels = []
    for log in sorted((work / "logs").glob("*.csv")):
        with log.open(newline="") as file:
            smooth = _smoothed([float(row["loss"]) for row in csv.DictReader(file)])
        title = f"{log.stem}: loss {smooth[-1]:.4f} after {len(smooth)} steps"
        panels.append(Panel(title, {"": smooth}, x_label="step", y_label="loss", log=True))
    (work / "losses.svg").write_text(plot_lines(panels))


def _smoothed(losses: list[float]) -> list[float]:
    smooth, value = [], losses[0]
    for loss in losses:
        value = SMOOTH * value + (1 - SMOOTH) * loss
        smooth.append(max(value, _LEAST))
    return smooth
