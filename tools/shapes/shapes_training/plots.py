# SPDX-License-Identifier: Apache-2.0
"""Loss curves as SVG, without a plotting library."""

from __future__ import annotations

import csv
import math
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 720, 240, 48
SMOOTH = 0.97


def plot_losses(work: Path) -> None:
    """Write `losses.svg` into the work folder: one panel a stage, smoothed loss over steps, logarithmic."""
    panels = []
    for log in sorted((work / "logs").glob("*.csv")):
        with log.open(newline="") as file:
            losses = [float(row["loss"]) for row in csv.DictReader(file)]
        panels.append(_panel(log.stem, losses, top=len(panels) * HEIGHT))
    height = len(panels) * HEIGHT
    drawing = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{height}" fill="white"/>{"".join(panels)}</svg>\n'
    )
    (work / "losses.svg").write_text(drawing)


def _panel(title: str, losses: list[float], top: int) -> str:
    smooth, value = [], losses[0]
    for loss in losses:
        value = SMOOTH * value + (1 - SMOOTH) * loss
        smooth.append(math.log10(max(value, 1e-8)))
    low, high = min(smooth), max(max(smooth), min(smooth) + 1e-3)
    points = " ".join(
        f"{MARGIN + (WIDTH - 2 * MARGIN) * i / max(1, len(smooth) - 1):.1f},"
        f"{top + MARGIN + (HEIGHT - 2 * MARGIN) * (high - y) / (high - low):.1f}"
        for i, y in enumerate(smooth)
    )
    bottom = top + HEIGHT - MARGIN
    return (
        f'<text x="{MARGIN}" y="{top + 28}">{title}: loss {10 ** smooth[-1]:.4f} after {len(losses)} steps</text>'
        f'<path d="M{MARGIN} {top + MARGIN} V{bottom} H{WIDTH - MARGIN}" fill="none" stroke="black"/>'
        f'<text x="4" y="{top + MARGIN}">{10**high:.3g}</text><text x="4" y="{bottom}">{10**low:.3g}</text>'
        f'<polyline points="{points}" fill="none" stroke="#1f77b4"/>'
    )
