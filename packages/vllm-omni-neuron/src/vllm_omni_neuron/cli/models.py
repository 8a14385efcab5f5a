# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-neuron models`: the architectures that installed model packages offer, and what they say of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from .console import EXIT_FAILED, STATUS_STYLE, out, plain_table, plugin_logs_off, print_json

if TYPE_CHECKING:
    from vllm_omni_neuron.registry import RegisteredModel
    from vllm_omni_neuron.sdk import ModelSpec

_AXES = {"tp": "TP", "sp": "SP", "cp": "CP", "cfg": "CFG", "vae_patch": "VAE patch"}


def models(
    json_: Annotated[bool, typer.Option("--json", help="The list as JSON on stdout.")] = False,
) -> None:
    """List the model architectures that installed packages offer, and what each supports.

    Exit codes: 0 all can be used or are left out on purpose, 1 a model package is broken.
    """
    from vllm_omni_neuron.registry import discover_models

    with plugin_logs_off():
        found = [describe(model) for model in discover_models()]
    if json_:
        print_json(found)
    elif not found:
        out().print("no model package is installed; uv pip install omni-neuron-wan22 brings Wan2.2", markup=False)
    else:
        _print(found)
    if any(model["status"] == "failed" or model["problems"] for model in found):
        raise typer.Exit(EXIT_FAILED)


def describe(model: RegisteredModel) -> dict[str, Any]:
    """A `RegisteredModel`, its spec and its environment as JSON-ready data; what is wrong is in `problems`."""
    from vllm_omni_neuron.environment import model_profile, resolve
    from vllm_omni_neuron.sdk import ProfileError, SpecError

    problems = list(model.problems)
    data: dict[str, Any] = {name: value if value != "" else None for name, value in dataclasses.asdict(model).items()}
    data |= {"hooks": dict(model.hooks), "spec": None, "environment": [], "problems": problems}
    if model.status != "registered":
        return data
    try:
        spec = model.load_spec()
        data["spec"] = None if spec is None else spec_as_json(spec)
        profile = model_profile(model)
        data["environment"] = [dataclasses.asdict(variable) for variable in resolve(profile)]
    except (SpecError, ProfileError) as error:
        problems.append(str(error))
    return data


def spec_as_json(spec: ModelSpec) -> dict[str, Any]:
    """A spec as JSON-ready data; of `plans` and `lowers` the names, and whether a checkpoint folder is taken."""
    return {
        "title": spec.title,
        "output": spec.output,
        "components": [dataclasses.asdict(component) for component in spec.components],
        "axes": dict(spec.axes),
        "branches": spec.branches,
        "dtypes": list(spec.dtypes),
        "features": dict(spec.features),
        "plans": {"names": [name for name in spec.plans if name], "checkpoints": "" in spec.plans},
        "lowers": {"names": [name for name in spec.lowers if name], "checkpoints": "" in spec.lowers},
        "environment": dict(spec.environment),
    }


def models_table(rows: list[dict[str, Any]]) -> Table:
    """The list for people."""
    table = plain_table("architecture", "model", "output", "axes", "dtypes", "pipeline", "distribution", "status")
    for row in rows:
        spec = row["spec"] or {"title": None, "output": row["final_output_type"], "axes": None, "dtypes": ()}
        status = Text(row["status"], style=STATUS_STYLE.get(row["status"], ""))
        for reason in filter(None, (row["reason"], *row["problems"])):
            status.append(f": {reason}", style="default")
        table.add_row(
            row["architecture"] or "–",
            spec["title"] or "–",
            spec["output"] or "–",
            "–" if spec["axes"] is None else axes_text(spec["axes"]),
            ", ".join(spec["dtypes"]) or "–",
            f"{row['module']}.{row['class_name']}" if row["class_name"] else "–",
            f"{row['distribution']} {row['version']}",
            status,
        )
    return table


def axes_text(axes: dict[str, int | None]) -> str:
    """Such as "TP, CP, CFG ≤ 2"; sizes without a limit of their own are limited by the model's shapes."""
    return ", ".join(_AXES[axis] if largest is None else f"{_AXES[axis]} ≤ {largest}" for axis, largest in axes.items())


def features_table(rows: list[dict[str, Any]]) -> Table:
    """A row for each feature, a column for each architecture whose spec is known."""
    table = plain_table("feature", *(row["architecture"] for row in rows))
    for feature in rows[0]["spec"]["features"]:
        supports = [row["spec"]["features"][feature] is True for row in rows]
        table.add_row(feature, *(Text("yes", "green") if has else Text("no", "yellow") for has in supports))
    return table


def _reasons(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        for feature, support in row["spec"]["features"].items():
            if support is not True:
                yield f"{row['architecture']}, {feature}: {support}"
        for component in row["spec"]["components"]:
            if component["reason"]:
                yield f"{row['architecture']}, {component['name']} is not split: {component['reason']}"


def _names(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        for command in ("plan", "lower"):
            known = row["spec"][f"{command}s"]
            names = [*known["names"], *(["a checkpoint folder"] if known["checkpoints"] else [])]
            if names:
                yield f"{row['architecture']}, {command}: {', '.join(names)}"


def _environment(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        for variable in row["environment"]:
            replaced = f" in place of {variable['replaced']}" if variable["replaced"] is not None else ""
            yield f"{row['architecture']}: {variable['name']}={variable['value']} ({variable['source']}){replaced}"


def _print(rows: list[dict[str, Any]]) -> None:
    console = out()
    console.print(models_table(rows))
    known = [row for row in rows if row["spec"] is not None]
    if known:
        console.print()
        console.print(features_table(known))
    for title, lines in (
        ("what is not supported, and why", _reasons(known)),
        ("what plan and lower know by name", _names(known)),
        ("environment", _environment(rows)),
    ):
        listed = list(lines)
        if listed:
            console.print()
            console.print(Text(title, style="bold"))
            for line in listed:
                console.print(Text(f"  {line}"))
