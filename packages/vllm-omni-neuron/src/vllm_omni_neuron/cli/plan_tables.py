# SPDX-License-Identifier: Apache-2.0
"""A plan for people, from the same data that `plan --json` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from .console import out, plain_table

GIB = 2**30
GB = 1e9
_ESTIMATE = (
    "An estimate from published figures, never checked on a device; docs/planning.md has each formula and source."
)
_HEADROOM = (
    "The DMA spill of graphs that do not gather K and V is not published and not counted: what is left must hold it."
)


def print_plan(data: Mapping[str, Any]) -> None:
    """Every section of the plan on stdout."""
    console = out()
    sections = {
        "layout": _layout(data),
        "memory of the fullest core": _memory(data["memory"]),
        "traffic of a core in a step": _traffic(data["traffic"]),
        "work in a step": _work(data["flops"]),
        "time of a step, at least": _seconds(data["seconds"]),
    }
    if "suggestions" in data:
        sections["layouts by step time"] = _suggestions(data["suggestions"])
    console.print(_ESTIMATE, markup=False)
    for title, table in sections.items():
        console.print()
        console.print(Text(title, style="bold"))
        console.print(table)
        if table is sections["memory of the fullest core"]:
            _print_verdict(data)


def _print_verdict(data: Mapping[str, Any]) -> None:
    memory, console = data["memory"], out()
    console.print(Text(memory["verdict"], style="bold green" if memory["fits"] else "bold red"))
    if memory["fits"] and not any("DMA spill" in item["name"] for item in memory["items"]):
        console.print(f"{_gib(memory['capacity_bytes'] - memory['peak_bytes'])} are left. {_HEADROOM}", markup=False)
    if memory["measured"] is not None:
        measured = memory["measured"]
        console.print(
            f"A fork measured this layout: {_gib(measured['total'])}, of it weights {_gib(measured['weights'])} (its "
            "text encoder is split over all ranks, ours over TP).",
            markup=False,
        )
    other = data["other_method"]
    if other is not None:
        step = f"a step of {_ms(other['seconds']['step'])} ms"
        console.print(f"With --method {other['layout']['method']}: {other['verdict']}; {step}", markup=False)


def _layout(data: Mapping[str, Any]) -> Table:
    layout, tokens, devices, video = data["layout"], data["tokens"], data["devices"], data["video"]
    latent = "×".join(map(str, tokens["latent"]))
    rows = {
        "model": f"{data['model']['name']}, {data['model']['experts']} experts of "
        f"{data['model']['parameters']['dit'] / 1e9:.2f} B parameters",
        "video": f"{video['height']}×{video['width']}, {video['frames']} frames: latent {latent}",
        "layout": f"{_name(layout)}{', SP' if layout['sequence_parallel'] else ''}, K and V by {layout['method']}, "
        f"{layout['vae_patch']} {'rank decodes' if layout['vae_patch'] == 1 else 'ranks decode'}",
        "cores": f"{devices['used']} of {devices['available']} of {data['target']['name']}, "
        f"{devices['replicas']} such engine{'s' if devices['replicas'] != 1 else ''} at a time",
        "tokens": f"{tokens['total']}, {tokens['per_rank']} a CP rank ({tokens['padded'] - tokens['total']} pads, "
        f"{tokens['waste']:.2%}), {tokens['between_layers']} a rank between layers",
        "valid sizes": f"TP {_listed(data['valid']['tp'])}; CFG {_listed(data['valid']['cfg'])}; VAE patch "
        f"{_listed(data['valid']['vae_patch'])} in this world; CP any, shards are padded",
    }
    if data["vae"]["tiles"]:
        rows["tiles"] = f"{data['vae']['tiles']}, at most {data['vae']['most_tiles_per_rank']} a rank"
    table = plain_table("", "")
    for name, value in rows.items():
        table.add_row(f"  {name}", value)
    return table


def _memory(memory: Mapping[str, Any]) -> Table:
    table = plain_table("", "GiB", "when", "basis", "how")
    for item in memory["items"]:
        size = f"{item['bytes'] / GIB:.2f}" if item["counted"] else f"({item['bytes'] / GIB:.2f})"
        table.add_row(f"  {item['name']}", size, item["stage"], item["basis"], item["formula"])
    for stage in ("denoising", "decoding"):
        alone = f"{memory[f'formula_{stage}_bytes'] / GIB:.2f} by formulas alone"
        table.add_row(f"  sum while {stage}", f"{memory[f'{stage}_bytes'] / GIB:.2f}", "", "", alone)
    return table


def _traffic(traffic: Mapping[str, Any]) -> Table:
    table = plain_table("axis", "what", "collective", "calls", "GB received", "ms", "hidden", "exposed")
    for item in traffic["items"]:
        table.add_row(
            f"  {item['axis']}",
            item["name"],
            item["collective"].replace("_", "-"),
            str(item["calls"]),
            f"{item['bytes'] / GB:.4f}",
            *(_ms(item[name]) for name in ("seconds", "hidden_seconds", "exposed_seconds")),
        )
    table.add_row("  all", "", "", str(traffic["collectives"]), f"{traffic['bytes'] / GB:.4f}")
    return table


def _work(flops: Mapping[str, Any]) -> Table:
    table = plain_table("", "TFLOP", "a core", "ms a core")
    for item in flops["items"]:
        table.add_row(
            f"  {item['name']}", f"{item['step'] / 1e12:.2f}", f"{item['per_core'] / 1e12:.3f}", _ms(item["seconds"])
        )
    table.add_row("  all", f"{flops['step'] / 1e12:.2f}", f"{flops['per_core'] / 1e12:.3f}")
    return table


def _seconds(seconds: Mapping[str, float]) -> Table:
    table = plain_table("", "ms", "")
    rows = {
        "compute": "",
        "hbm": f"{seconds['hbm_bytes'] / GB:.1f} GB, at the same time as compute",
        "exposed": "collectives that the step waits for",
        "hidden": "collectives behind compute",
        "step": "the larger of compute and hbm, and what is exposed",
    }
    for name, meaning in rows.items():
        table.add_row(f"  {name}", _ms(seconds[name]), meaning)
    return table


def _suggestions(suggestions: list[Mapping[str, Any]]) -> Table:
    table = plain_table("", "layout", "cores", "K and V", "SP", "ms", "peak", "memory")
    for place, choice in enumerate(suggestions, start=1):
        layout = choice["layout"]
        table.add_row(
            f"  {place}",
            _name(layout),
            str(layout["world_size"]),
            layout["method"] if layout["cp"] > 1 else "–",
            "yes" if layout["sequence_parallel"] else "no",
            _ms(choice["seconds"]["step"]),
            _gib(choice["peak_bytes"]),
            Text("fits", style="green") if choice["fits"] else Text(choice["verdict"], style="red"),
        )
    return table


def _name(layout: Mapping[str, Any]) -> str:
    return f"TP{layout['tp']}×CP{layout['cp']}×CFG{layout['cfg']}"


def _listed(values: list[int]) -> str:
    return ", ".join(map(str, values))


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"
