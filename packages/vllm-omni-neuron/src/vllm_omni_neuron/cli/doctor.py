# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-neuron doctor`: what is installed, what is found, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from .checks import Report, run_checks
from .console import EXIT_FAILED, STATUS_STYLE, err, out, plain_table, plugin_logs_off, print_json
from .models import models_table


def doctor(
    json_: Annotated[bool, typer.Option("--json", help="The report as JSON on stdout.")] = False,
) -> None:
    """Say what is installed, which devices and plugins are found, and what is wrong.

    Exit codes: 0 nothing is wrong, 1 problems.
    """
    with plugin_logs_off(), err().status("looking around") as status:
        report = run_checks(lambda name: status.update(f"checking {name.replace('_', ' ')}"))
    if json_:
        print_json(report.as_json())
    else:
        _print(out(), report)
    if report.problems:
        raise typer.Exit(EXIT_FAILED)


def _print(console: Console, report: Report) -> None:
    for title, renderer in _RENDERERS.items():
        section = report.sections[title]
        console.print(Text(title.replace("_", " "), style="bold"))
        if section is None:
            console.print("  could not be checked, see below", style="red")
        else:
            console.print(Group(*renderer(section)))
        console.print()
    for note in report.notes:
        console.print(Text.assemble(("note ", "yellow"), note))
    for problem in report.problems:
        console.print(Text.assemble(("problem ", "bold red"), problem))
    if report.problems:
        count = "1 problem" if len(report.problems) == 1 else f"{len(report.problems)} problems"
        console.print(Text(f"{count} found", style="bold red"))
    else:
        console.print(Text("no problems found", style="bold green"))


def _pairs(section: dict[str, Any]) -> Iterator[RenderableType]:
    table = plain_table("", "")
    for name, value in section.items():
        table.add_row(f"  {name}", _value(value))
    yield table


def _packages(rows: list[dict[str, Any]]) -> Iterator[RenderableType]:
    table = plain_table("", "", "")
    for row in rows:
        table.add_row(f"  {row['name']}", row["version"] or "not installed", row["required"])
    yield table


def _neuron_packages(section: dict[str, str | None]) -> Iterator[RenderableType]:
    yield from _pairs({name: version or "not installed" for name, version in section.items()})


def _environment(rows: list[dict[str, Any]]) -> Iterator[RenderableType]:
    if not rows:
        yield "  no variable of ours is set"
        return
    yield from _pairs({row["name"]: f"{row['value']}{' (not valid)' if row['error'] else ''}" for row in rows})


def _shared_memory(section: dict[str, Any]) -> Iterator[RenderableType]:
    free, needed = section["free_bytes"], section["needed_free_bytes"]
    if free is None:
        yield f"  {section['path']} is missing"
        return
    verdict = "enough" if free >= needed else "too small"
    sizes = f"{section['total_bytes'] / 2**20:.0f} MiB, {free / 2**20:.0f} MiB free"
    yield f"  {section['path']} {sizes}: {verdict} (advised: {needed >> 20} MiB free)"


def _entry_points(rows: list[dict[str, Any]]) -> Iterator[RenderableType]:
    group = None
    for row in rows:
        if row["group"] != group:
            group = row["group"]
            yield f"  {group}"
        status = Text(row["status"], style=STATUS_STYLE.get(row["status"], ""))
        reason = f": {row['reason']}" if row["reason"] else ""
        yield Text.assemble(
            f"    {row['name']} = {row['value']} ({row['distribution']} {row['version']}) ", status, reason
        )


def _models(rows: list[dict[str, Any]]) -> Iterator[RenderableType]:
    yield Padding(models_table(rows), (0, 0, 0, 2)) if rows else "  none installed"


def _plugin_filter(section: dict[str, Any]) -> Iterator[RenderableType]:
    if section["value"] is None:
        yield "  VLLM_PLUGINS is not set: every entry point may load"
    else:
        yield f"  VLLM_PLUGINS={section['value']!r}: only entry points of these names may load"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "–" if value is None else str(value)


_RENDERERS: dict[str, Callable[[Any], Iterator[RenderableType]]] = {
    "system": _pairs,
    "packages": _packages,
    "neuron_packages": _neuron_packages,
    "environment": _environment,
    "devices": _pairs,
    "shared_memory": _shared_memory,
    "entry_points": _entry_points,
    "models": _models,
    "plugin_filter": _plugin_filter,
    "platform": _pairs,
}
