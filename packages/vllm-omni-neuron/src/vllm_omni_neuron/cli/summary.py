# SPDX-License-Identifier: Apache-2.0
"""What a generation did, in one mapping: read from the request's output, shown as a table or as JSON.

A pipeline reports through two channels that vLLM-Omni carries to the caller:

- `stage_durations` of its DiffusionOutput: seconds under `text`, `denoise`, `vae` and the like;
- the group `generation` of the metadata beside its payload, with the keys of `REPORTED`.

A pipeline may leave out any of it; what is missing is None here and shown as "–".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rich.table import Table

from .console import plain_table

REPORTED = (
    "num_inference_steps",
    "num_outputs_per_prompt",
    "steps_per_expert",
    "guidance_per_expert",
    "sample_solver",
    "flow_shift",
    "boundary_ratio",
    "dtype",
    "layout",
    "tp_sequence_parallel",
    "vae_patch",
    "vae_tiling",
    "image",
    "lora",
    "quantization",
    "cache",
)
SECONDS = ("text", "denoise", "vae")
MISSING = "–"
_SOURCES = {
    "request": "request",
    "configuration": "configuration file",
    "engine": "engine",
    "checkpoint": "checkpoint",
    "default": "default",
    "image": "the image",
}


def generation_report(output: Any) -> Mapping[str, Any]:
    """What the pipeline says of the generation in `output` (vLLM-Omni's OmniRequestOutput)."""
    metadata = _mapping(_mapping(output.multimodal_output).get("metadata"))
    return _mapping(metadata.get("generation"))


def stage_seconds(output: Any) -> dict[str, float]:
    """Seconds of each stage that the pipeline reports, without what vLLM-Omni adds (`queue_wait_ms` and others)."""
    durations = _mapping(output.stage_durations)
    return {name: float(seconds) for name, seconds in durations.items() if not name.endswith("_ms")}


def summary_from_output(output: Any) -> dict[str, Any]:
    """What `output` says of its generation, None for what it does not say."""
    generation = generation_report(output)
    return {
        **{name: generation.get(name) for name in REPORTED},
        "seconds": {**dict.fromkeys(SECONDS), **stage_seconds(output)},
    }


def effective_sources(reported: Any, asked: Collection[str], configured: Collection[str]) -> dict[str, str] | None:
    """Where each setting came from.

    The pipeline cannot tell what the user asked for from what the configuration file's sampling parameters filled in:
    both reach it as the request's.

    Args:
        reported: The pipeline's own sources by setting, if it has any.
        asked: Settings that the user gave.
        configured: Settings that the configuration file's sampling parameters hold.
    """
    if not isinstance(reported, Mapping):
        return None
    return {
        name: "configuration" if source == "request" and name not in asked and name in configured else source
        for name, source in reported.items()
    }


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The summary for people."""
    table = plain_table("", "")
    frames, fps = summary["num_frames"], summary["fps"]
    outputs = summary["outputs"]
    kind = "image file" if fps is None else "video"
    rows = {
        (kind if len(outputs) == 1 else f"{kind}s"): ", ".join(outputs),
        "model": summary["model"],
        "size": f"{summary['width']}×{summary['height']}",
        **({} if fps is None else {"frames": f"{frames} at {fps:g} fps ({frames / fps:.2f} s)"}),
        "steps": _per_expert(summary["steps_per_expert"], join=" + "),
        "guidance": _per_expert(summary["guidance_per_expert"]),
        "schedule": _schedule(summary),
        "seed" if len(outputs) == 1 else "seeds": ", ".join(str(seed) for seed in summary["seeds"]),
        "layout": _layout(summary),
        "dtype": summary["dtype"] or MISSING,
        **_image(summary["image"]),
        **_lora(summary["lora"]),
        **_quantization(summary["quantization"]),
        **_cache(summary["cache"]),
        **_sources(summary["sources"]),
        "seconds": _seconds(summary["seconds"]),
    }
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/bold]", value)
    return table


def notes(summary: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """One line for each size that the pipeline changed: what was asked for and what came out."""
    return [
        f"{name.replace('_', ' ')}: asked for {asked[name]}, got {summary[name]}"
        for name in ("width", "height", "num_frames")
        if asked[name] is not None and asked[name] != summary[name]
    ]


def _sources(sources: Mapping[str, str] | None) -> dict[str, str]:
    """A row for each source: the settings that came from it."""
    found: dict[str, str] = {}
    for source, label in _SOURCES.items():
        names = [name for name, where in (sources or {}).items() if where == source]
        if names:
            found[f"from {label}"] = ", ".join(names)
    return found


def _image(report: Any) -> dict[str, str]:
    """Of `{"size": [width, height], "policy", "aspect_error"}`."""
    if not isinstance(report, Mapping):
        return {}
    width, height = report["size"]
    done = "cut off" if report["policy"] == "crop" else "stretched"
    change = f", {report['aspect_error']:.1%} {done}" if report["aspect_error"] else ""
    return {"image": f"{width}×{height}, policy {report['policy']}{change}"}


def _lora(report: Any) -> dict[str, str]:
    """Of `{"name", "scale"}`."""
    return {"lora": f"{report['name']}, scale {report['scale']:g}"} if isinstance(report, Mapping) else {}


def _quantization(report: Any) -> dict[str, str]:
    """Of `{"method", "computed_by", "experts": {name: {"linears", "row_mx_linears"}}}`."""
    if not isinstance(report, Mapping):
        return {}
    experts = [
        f"{name} {layers['row_mx_linears']} of {layers['linears']} linear layers"
        for name, layers in report["experts"].items()
    ]
    return {"quantized": f"{report['method']}: {', '.join(experts)}; {report['computed_by']}"}


def _cache(report: Any) -> dict[str, str]:
    """Of `{"backend", "experts": {name: {branch: {"steps", "cached_steps"}}}}`: forwards that reused an earlier one."""
    if not isinstance(report, Mapping):
        return {}
    experts = []
    for name, branches in report["experts"].items():
        reused = sum(len(branch["cached_steps"]) for branch in branches.values())
        experts.append(f"{name} {reused} of {sum(branch['steps'] for branch in branches.values())} forwards reused")
    return {"cache": f"{report['backend']}: {', '.join(experts) or MISSING}"}


def _schedule(summary: Mapping[str, Any]) -> str:
    shift, boundary = summary["flow_shift"], summary["boundary_ratio"]
    parts = [
        summary["sample_solver"],
        None if shift is None else f"shift {shift:g}",
        None if boundary is None else f"boundary {boundary:g}",
    ]
    return ", ".join(part for part in parts if part) or MISSING


def _per_expert(values: Any, join: str = ", ") -> str:
    if not isinstance(values, Mapping):
        return MISSING if values is None else str(values)
    return join.join(f"{value:g} {name}" for name, value in values.items()) or MISSING


def _layout(summary: Mapping[str, Any]) -> str:
    layout = summary["layout"]
    if not isinstance(layout, Mapping):
        return MISSING if layout is None else str(layout)
    parts = [" × ".join(f"{name.upper()} {size}" for name, size in layout.items())]
    if summary["tp_sequence_parallel"]:
        parts.append("sequence parallel")
    if summary["vae_tiling"]:
        parts.append(f"VAE tiles on {summary['vae_patch']} rank{'s' if summary['vae_patch'] != 1 else ''}")
    return ", ".join(parts)


def _seconds(seconds: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {MISSING if value is None else f'{value:.1f}'}" for name, value in seconds.items())


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
