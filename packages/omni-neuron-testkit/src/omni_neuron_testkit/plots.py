# SPDX-License-Identifier: Apache-2.0
"""Plots as SVG text, by matplotlib; equal data give equal text."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANEL = (9.0, 2.6)  # inches: width and height
_RC = {"svg.fonttype": "none", "svg.hashsalt": "omni-neuron-testkit", "font.size": 9}


@dataclass(frozen=True)
class Panel:
    """One pair of axes with lines.

    Attributes:
        title: above it.
        lines: the values by label; None and infinite values are gaps. An empty label is in no legend.
        x: the positions; 0, 1, … where it is None.
        x_label, y_label: of the axes.
        log: whether y is logarithmic.
        limit: a height to mark.
    """

    title: str
    lines: Mapping[str, Sequence[float | None]]
    x: Sequence[float] | None = None
    x_label: str = ""
    y_label: str = ""
    log: bool = False
    limit: float | None = None


def plot_lines(panels: Sequence[Panel]) -> str:
    """SVG of the panels, one below the other.

    Raises:
        ValueError: there is no panel.
        ModuleNotFoundError: matplotlib is not installed (`omni-neuron-testkit[accuracy]`).
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    if not panels:
        raise ValueError("there is nothing to plot")
    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=(_PANEL[0], _PANEL[1] * len(panels)), layout="constrained")
        all_axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for axes, panel in zip(all_axes, panels, strict=True):
            for label, values in panel.lines.items():
                x = range(len(values)) if panel.x is None else panel.x
                y = [math.nan if value is None or math.isinf(value) else value for value in values]
                axes.plot(x, y, label=label or None, marker="." if len(y) <= 100 else None, linewidth=1.2)
            if panel.limit is not None:
                axes.axhline(panel.limit, color="tab:red", linestyle="--", linewidth=1, label="limit")
            if panel.log:
                axes.set_yscale("log")
            axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
            axes.grid(alpha=0.3)
            if panel.x is None:
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            if len([label for label in panel.lines if label]) or panel.limit is not None:
                axes.legend()
        return _svg(figure)


def plot_heat_map(
    values: Sequence[Sequence[float | None]], rows: Sequence[str], *, title: str, x_label: str, colour_label: str
) -> str:
    """SVG of a table of values, one row a name; None is white.

    Raises:
        ValueError: there is no value.
        ModuleNotFoundError: matplotlib is not installed (`omni-neuron-testkit[accuracy]`).
    """
    import matplotlib
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    table = np.array([[math.nan if value is None else value for value in row] for row in values], dtype=float)
    if table.size == 0 or np.isnan(table).all():
        raise ValueError("there is nothing to plot")
    with matplotlib.rc_context(_RC):
        figure = Figure(figsize=(_PANEL[0], max(_PANEL[1], 0.8 + 0.2 * len(rows))), layout="constrained")
        axes = figure.subplots()
        picture = axes.imshow(table, aspect="auto", cmap="viridis", vmin=0.0, interpolation="nearest")
        axes.set_yticks(range(len(rows)), rows)
        axes.set(title=title, xlabel=x_label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.colorbar(picture, ax=axes, label=colour_label)
        return _svg(figure)


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
