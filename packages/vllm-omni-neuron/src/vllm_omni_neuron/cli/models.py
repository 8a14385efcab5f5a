# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-neuron models`: the architectures that installed model packages offer."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from .console import EXIT_FAILED, STATUS_STYLE, out, plain_table, plugin_logs_off, print_json


def models(
    json_: Annotated[bool, typer.Option("--json", help="The list as JSON on stdout.")] = False,
) -> None:
    """List the model architectures that installed packages offer.

    Exit codes: 0 all can be used or are left out on purpose, 1 a model package is broken.
    """
    from vllm_omni_neuron.registry import discover_models

    with plugin_logs_off():
        found = [describe(model) for model in discover_models()]
    if json_:
        print_json(found)
    elif not found:
        out().print("no model package is installed; pip install omni-neuron-wan22 brings Wan2.2", markup=False)
    else:
        out().print(models_table(found))
    if any(model["status"] == "failed" for model in found):
        raise typer.Exit(EXIT_FAILED)


def describe(model: Any) -> dict[str, Any]:
    """A `RegisteredModel` as JSON-ready data."""
    data = dataclasses.asdict(model)
    data["hooks"] = dict(data["hooks"])
    return {name: value if value != "" else None for name, value in data.items()}


def models_table(rows: list[dict[str, Any]]) -> Table:
    """The list for people."""
    table = plain_table("architecture", "class", "distribution", "status")
    for row in rows:
        status = Text(row["status"], style=STATUS_STYLE.get(row["status"], ""))
        if row["reason"]:
            status.append(f": {row['reason']}", style="default")
        class_name = f"{row['module']}.{row['class_name']}" if row["class_name"] else "–"
        table.add_row(row["architecture"] or "–", class_name, f"{row['distribution']} {row['version']}", status)
    return table
