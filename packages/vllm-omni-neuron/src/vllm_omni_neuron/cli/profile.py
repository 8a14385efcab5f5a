# SPDX-License-Identifier: Apache-2.0
"""Where the time of a generation goes: medians over timed generations, as a table and as a JSON file.

The pipeline measures its stages and, where `extra_args["profile"]` asks for it, every denoising step, with the device
waited for; see `stage_durations` and the key `step_seconds` of its report. `other` is what remains of the wall clock
around the request: checks, queues, transport between processes, the form of the output.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from .console import plain_table
from .engine import GenerationResult, Run
from .summary import generation_report, stage_seconds

# Of a run: what the settings were, for whoever reads the file alone.
_SETTINGS = (
    "model",
    "width",
    "height",
    "num_frames",
    "num_outputs_per_prompt",
    "num_inference_steps",
    "steps_per_expert",
    "guidance_per_expert",
    "sample_solver",
    "flow_shift",
    "boundary_ratio",
    "seed",
    "dtype",
    "layout",
    "tp_sequence_parallel",
    "vae_patch",
    "vae_tiling",
)


def profile_of(result: GenerationResult, summary: Mapping[str, Any]) -> dict[str, Any]:
    """What timed generations say, JSON-ready: settings, each run, and the medians."""
    runs = [_run(run) for run in result.runs]
    stages = {name: None for run in runs for name in run["stages"]}  # in order, without repetition
    return {
        "settings": {name: summary[name] for name in _SETTINGS if summary.get(name) is not None},
        "start_seconds": round(result.start_seconds, 4),
        "warm_up_seconds": None if result.warm_up is None else round(result.warm_up.seconds, 4),
        "median": {
            "total": _median([run["total"] for run in runs]),
            "stages": {name: _median([run["stages"].get(name, 0.0) for run in runs]) for name in stages},
            "step_seconds": _steps([run["step_seconds"] for run in runs]),
        },
        "runs": runs,
    }


def _run(run: Run) -> dict[str, Any]:
    stages = stage_seconds(run.output)
    stages["other"] = max(0.0, run.seconds - sum(stages.values()))
    steps = generation_report(run.output).get("step_seconds") or {}
    return {
        "total": round(run.seconds, 4),
        "stages": {name: round(seconds, 4) for name, seconds in stages.items()},
        "step_seconds": {expert: list(seconds) for expert, seconds in steps.items()},
    }


def _steps(runs: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, dict[str, float]]:
    """Of each expert: steps in a generation, and median, least and most seconds of a step."""
    experts = {expert: None for run in runs for expert in run}
    found = {}
    for expert in experts:
        every = [seconds for run in runs for seconds in run.get(expert, ())]
        found[expert] = {
            "steps": len(every) / len(runs),
            "median": _median(every),
            "least": min(every),
            "most": max(every),
        }
    return found


def _median(values: Sequence[float]) -> float:
    return round(median(values), 4)


def profile_path(output: Path) -> Path:
    """The JSON file beside the video `output`."""
    return output.with_suffix(".profile.json")


def write_profile(profile: Mapping[str, Any], path: Path) -> None:
    """Write `profile` as JSON."""
    path.write_text(json.dumps(profile, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def profile_table(profile: Mapping[str, Any]) -> Table:
    """The medians for people, with the least and the most of all runs."""
    table = plain_table("stage", "median s", "share", "least s", "most s")
    middle, runs = profile["median"], profile["runs"]
    for name, seconds in middle["stages"].items():
        every = [run["stages"].get(name, 0.0) for run in runs]
        table.add_row(name, *_cells(seconds, middle["total"], every))
        if name == "denoise":
            for expert, steps in middle["step_seconds"].items():
                label = f"  {expert}: each of {steps['steps']:g} steps"
                table.add_row(label, f"{steps['median']:.3f}", "", f"{steps['least']:.3f}", f"{steps['most']:.3f}")
    table.add_row("total", *_cells(middle["total"], middle["total"], [run["total"] for run in runs]))
    return table


def _cells(seconds: float, total: float, every: Sequence[float]) -> list[str]:
    share = f"{seconds / total:.1%}" if total else ""
    return [f"{seconds:.3f}", share, f"{min(every):.3f}", f"{max(every):.3f}"]
