# SPDX-License-Identifier: Apache-2.0
"""The model card of a trained shapes checkpoint, from the work folder and the reports of evaluate.py and
evaluate_engine.py: nothing by hand.

    python tools/shapes/card.py WORK FOLDER result.json [broken.json …] [engine.json …]

FOLDER holds the checkpoint; `README.md` is written into it.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

from omni_neuron_testkit import (
    CAPTIONS,
    COLOURS,
    DIRECTIONS,
    MEASURES,
    SHAPES,
    STRICT_OVERLAP,
    STRICT_STRAIGHTNESS,
    subject_of,
)
from shapes_training.budget import BOUNDARY_RATIO, FLOW_SHIFT
from shapes_training.stages import IMAGE_TO_VIDEO, TEXT_TO_VIDEO


def main() -> None:
    """Parse and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("reports", type=Path, nargs="+", help="JSON of evaluate.py and evaluate_engine.py")
    arguments = parser.parse_args()
    reports = [json.loads(path.read_text()) for path in arguments.reports]
    (arguments.folder / "README.md").write_text(model_card(arguments.work, arguments.folder, reports))


def model_card(work: Path, folder: Path, reports: list[dict[str, Any]]) -> str:
    """The card's Markdown.

    Args:
        work: the work folder: budget and logs.
        folder: the checkpoint.
        reports: of evaluate.py, of which those without a fault give outlines and misses, and of evaluate_engine.py.
    """
    engines = [report for report in reports if "engine" in report]
    reports = [report for report in reports if "engine" not in report]
    budget = json.loads((work / "budget.json").read_text())
    size = sum(path.stat().st_size for path in folder.rglob("*.safetensors")) / 1e6
    sound = [report for report in reports if report["settings"]["broken"] == "None"]
    pipeline = json.loads((folder / "model_index.json").read_text())["_class_name"]
    from_image = pipeline == "WanImageToVideoPipeline"
    lines = [
        "---",
        "license: apache-2.0",
        "library_name: diffusers",
        f"pipeline_tag: {'image' if from_image else 'text'}-to-video",
        "---",
        "",
        "# Shapes: a tiny Wan2.2 that does what the prompt says" + (", from an image" if from_image else ""),
        "",
        f"One solid shape ({', '.join(SHAPES)}) of one colour ({', '.join(COLOURS)}) moves {', '.join(DIRECTIONS)} on "
        f"a dark ground. Trained from scratch on CPU cores by `tools/shapes/train.py`, {size:.1f} MB of bfloat16. It "
        "is a test object: it knows nothing else, and it has nothing of Wan2.2 but the layout.",
        "",
        f"- {budget['frames']} frames of {budget['width']}×{budget['height']} pixels, the only size it was trained on",
        f"- two experts of {budget['layers']} layers, {budget['heads']} heads of {budget['head_dim']}; boundary "
        f"{BOUNDARY_RATIO}, flow shift {FLOW_SHIFT:g}; each trained only on its own side of the boundary",
        f"- captions: {'; '.join(f'“{caption}”' for caption in CAPTIONS)}, also as sentences; negative prompt empty",
        f"- seen in training: every one of the 72 subjects, {budget['copies']} clips each. The figures say how well a "
        "prompt is followed, not how it generalises to unseen combinations",
        "",
        "## Figures",
        "",
        f"diffusers' `{pipeline}` in float32 from the weights of this folder; captions of every template; seeds not "
        f"used while tuning; {'a drawn first frame for each video; ' if from_image else ''}judged by "
        "omni-neuron-testkit. *strict*: all three and a clean outline (overlap > 0.8), a straight path, "
        "the shape in every frame. Intervals: Wilson, 95 %.",
        "",
        *_figures(reports),
        "",
        *_outlines(sound),
        "",
        "Misses of the sound runs:",
        "",
        *_misses(sound),
        "",
        *(_engines(engines) if engines else ()),
        "## Training",
        "",
        "| stage | steps | seconds of steps | last loss (mean of 50) |",
        "|---|---|---|---|",
        *_training(work, from_image),
        "",
        "Seconds are wall-clock time of one thread, two stages at a time on two cores that did other work meanwhile; "
        "they bound the cost from above.",
    ]
    return "\n".join(lines) + "\n"


def _figures(reports: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"| run | videos | {' | '.join(MEASURES)} | s a video |",
        f"|---|---|{'---|' * len(MEASURES)}---|",
    ]
    for report in reports:
        settings = report["settings"]
        fault = "" if settings["broken"] == "None" else f", **broken: {settings['broken']}**"
        cells = [_cell(report["measures"][measure], report["videos"]) for measure in MEASURES]
        lines.append(
            f"| {settings['steps']} steps, guidance {settings['guidance']}, seeds from {settings['first_seed']}{fault} "
            f"| {report['videos']} | {' | '.join(cells)} | {report['seconds_a_video']} |"
        )
    return lines


def _cell(measure: dict[str, Any], videos: int) -> str:
    low, high = measure["interval_95"]
    return f"{measure['right']}/{videos} = {measure['share']:.1%} ({low:.1%} to {high:.1%})"


def _outlines(reports: list[dict[str, Any]]) -> list[str]:
    """Where the strict gate is lost: each of its parts alone, by shape."""
    verdicts = [result["verdict"] for report in reports for result in report["results"]]
    lines = [
        "Parts of the strict gate, sound runs together:",
        "",
        "| shape | videos | overlap > 0.8 | straight path | mean overlap |",
        "|---|---|---|---|---|",
    ]
    for name, group in (
        *((shape, [verdict for verdict in verdicts if verdict["shape"] == shape]) for shape in SHAPES),
        ("all", verdicts),
    ):
        clean = sum(verdict["overlap"] > STRICT_OVERLAP for verdict in group)
        straight = sum(verdict["direction_confidence"] > STRICT_STRAIGHTNESS for verdict in group)
        mean = sum(verdict["overlap"] for verdict in group) / max(1, len(group))
        lines.append(f"| {name} | {len(group)} | {clean} | {straight} | {mean:.2f} |")
    return lines


def _misses(reports: list[dict[str, Any]]) -> list[str]:
    lines = []
    for result in (result for report in reports for result in report["results"]):
        asked, verdict = subject_of(result["prompt"]), result["verdict"]
        if any(verdict[name] != getattr(asked, name) for name in ("colour", "shape", "direction")):
            overlap = f"overlap {verdict['overlap']:.2f}"
            lines.append(f"- seed {result['seed']}: “{result['prompt']}” → {result['seen']} ({overlap})")
    return lines or ["- none"]


def _engines(reports: list[dict[str, Any]]) -> list[str]:
    """The grid through vLLM-Omni, layout by layout."""
    lines = [
        "## Through the engine",
        "",
        "The same grid through vLLM-Omni with omni-neuron-wan22 in CPU mode, float32 unless it says otherwise; "
        "*distance*: relative L2 distance to diffusers with the engine's timesteps, mean (largest) over the videos.",
        "",
        "| settings | videos | all | strict | distance of latents | of frames |",
        "|---|---|---|---|---|---|",
    ]
    for report in reports:
        settings = ", ".join(f"{name} {value}" for name, value in report["engine"].items()) or "one process"
        seeds = f"seeds from {report['first_seed']}" + (f", every {report['every']}th" if report["every"] > 1 else "")
        cells = [_cell(report["measures"][measure], report["videos"]) for measure in ("all", "strict")]
        distances = [
            f"{report['distance'][name]['mean']:.1e} ({report['distance'][name]['largest']:.1e})"
            for name in ("latents", "frames")
        ]
        lines.append(f"| {settings} | {report['videos']} ({seeds}) | {' | '.join([*cells, *distances])} |")
    return [*lines, ""]


def _training(work: Path, from_image: bool) -> list[str]:
    lines = []
    stages = (*TEXT_TO_VIDEO, *(IMAGE_TO_VIDEO if from_image else ()))
    for log in sorted(path for path in (work / "logs").glob("*.csv") if path.stem in stages):
        with log.open(newline="") as file:
            rows = list(csv.DictReader(file))
        losses = [float(row["loss"]) for row in rows[-50:]]
        seconds = sum(float(row["seconds"]) for row in rows)
        lines.append(f"| {log.stem} | {len(rows)} | {seconds:.0f} | {sum(losses) / len(losses):.4f} |")
    return lines


if __name__ == "__main__":
    main()
