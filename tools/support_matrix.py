# SPDX-License-Identifier: Apache-2.0
"""Writes docs/support-matrix.md: what the specs of this repository's models say, and what the conformance kit found.

    python tools/support_matrix.py docs/support-matrix.md                     # from the specs and the kept results
    python tools/support_matrix.py docs/support-matrix.md --report DIR [DIR]  # take over the kit's results first
    python tools/support_matrix.py docs/support-matrix.md --check

What the page needs of the kit's reports is kept beside it, in support-matrix.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from omni_neuron_testkit.conformance import ModelReport, read_report
from vllm_omni_neuron import RegisteredModel, discover_models
from vllm_omni_neuron.sdk import FEATURES, SPEC_AXES, ModelSpec

ROOT = Path(__file__).parents[1]
AXES = {
    "tp": "tensor parallelism",
    "sp": "sequence parallelism within TP",
    "cp": "context parallelism",
    "cfg": "guidance parallelism",
    "vae_patch": "VAE patch parallelism",
}
DTYPES = ("bfloat16", "float32")
# Of several suites of one architecture: the first of these that one of them has.
WORST_FIRST = ("failed", "passed", "untested", "not_supported")
HEAD = """\
<!-- Generated from the models' specs and the conformance kit's reports by `./dev docs`. Do not edit this page. -->
# Support matrix

What each model's spec (`ModelSpec`) says, and what the conformance kit found of it on a CPU: with a tiny checkpoint,
against the model's reference. Nothing here was run on a Trainium.

- **✓** the spec says so, and the kit's tests of it passed
- **✗** the spec says so, and a test of it failed
- **not tested** the spec says so, and no test of the kit has looked at it (a package's own tests may have: see
  [status](status.md)); a number refers to the kit's reason
- **–** not supported; the number refers to the reason that the spec gives

"""


def page(models: list[tuple[RegisteredModel, ModelSpec]], results: dict[str, Any]) -> str:
    """The whole page, as Markdown.

    Args:
        models: with their specs.
        results: of the kit, by architecture, as `condense` makes them.
    """
    notes: dict[str, int] = {}

    def note(text: str) -> str:
        return f"[{notes.setdefault(text, len(notes) + 1)}](#notes)"

    specs = [spec for _, spec in models]
    lines = [HEAD.rstrip(), "", "## Models", ""]
    lines += ["| architecture | model | makes | distribution | names for `plan` | for `lower` | tests of the kit |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for model, spec in models:
        found = results.get(spec.architecture)
        cells = [
            f"`{spec.architecture}`",
            spec.title,
            spec.output,
            model.distribution,
            *(", ".join(f"`{name}`" for name in names if name) or "–" for names in (spec.plans, spec.lowers)),
            "not tested" if found is None else _counts(found["tests"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")

    header = ["| | " + " | ".join(f"`{spec.architecture}`" for spec in specs) + " |", "|---|" + "---|" * len(specs)]

    def rows(kind: str, names: Iterable[tuple[str, str]], declared: Any) -> Iterator[str]:
        for name, label in names:
            cells = []
            for spec in specs:
                supported, detail, reason = declared(spec, name)
                found = results.get(spec.architecture, {}).get(kind, {}).get(name, {})
                cells.append(_cell(supported, detail, reason, found, note))
            yield f"| {label} | " + " | ".join(cells) + " |"

    def axis(spec: ModelSpec, name: Any) -> tuple[bool, str, str]:
        largest = spec.axes.get(name)
        return name in spec.axes, f" ≤ {largest}" if largest is not None else "", ""

    def dtype(spec: ModelSpec, name: Any) -> tuple[bool, str, str]:
        return name in spec.dtypes, "", ""

    def feature(spec: ModelSpec, name: Any) -> tuple[bool, str, str]:
        return spec.supports(name), "", spec.why_not(name)

    lines += ["", "## Parallel axes", "", *header, *rows("axes", ((name, AXES[name]) for name in SPEC_AXES), axis)]
    lines += ["", "## Dtypes", "", *header, *rows("dtypes", ((name, name) for name in DTYPES), dtype)]
    lines += ["", "## Features", "", *header, *rows("features", ((name, f"`{name}`") for name in FEATURES), feature)]

    lines += ["", "## Components", "", "| architecture | component | kind | shared over | |", "|---|---|---|---|---|"]
    for spec in specs:
        for component in spec.components:
            remarks = [
                "optional" if component.optional else "",
                "stays on the host, not compiled" if component.host else "",
                component.reason,
            ]
            shared = ", ".join(component.axes) or "nothing: runs whole"
            lines.append(
                f"| `{spec.architecture}` | `{component.name}` | {component.kind} | {shared} | "
                f"{'; '.join(filter(None, remarks))} |"
            )
    lines += ["", "## Notes", "", *(f"{number}. {text}" for text, number in notes.items())]
    return "\n".join(lines) + "\n"


def _cell(supported: bool, detail: str, reason: str, found: dict[str, str], note: Any) -> str:
    if not supported:
        return f"– {note(reason)}" if reason else "–"
    outcome = found.get("outcome", "untested")
    if outcome in ("passed", "failed"):
        return f"{'✓' if outcome == 'passed' else '✗'}{detail}"
    return f"not tested{detail}" + (f" {note(found['reason'])}" if found.get("reason") else "")


def _counts(tests: dict[str, int]) -> str:
    return ", ".join(f"{count} {outcome.replace('_', ' ')}" for outcome, count in sorted(tests.items()) if count)


def condense(reports: Iterable[ModelReport]) -> dict[str, Any]:
    """What the page needs of the kit's reports, by architecture; several suites of one architecture are one."""
    found: dict[str, Any] = {}
    for report in reports:
        one = found.setdefault(report.architecture, {"tests": {}, "axes": {}, "dtypes": {}, "features": {}})
        for test in report.tests:
            one["tests"][test.outcome] = one["tests"].get(test.outcome, 0) + 1
        for kind, values in (
            ("axes", report.axes),
            ("features", report.features),
            ("dtypes", {name: {"outcome": outcome, "reason": ""} for name, outcome in report.dtypes.items()}),
        ):
            for name, value in values.items():
                new = {"outcome": value["outcome"], "reason": value["reason"]}
                one[kind][name] = min(one[kind].get(name, new), new, key=lambda it: WORST_FIRST.index(it["outcome"]))
    return found


def repository_models() -> list[tuple[RegisteredModel, ModelSpec]]:
    """The models of the packages under packages/, with their specs, by architecture."""
    ours = {folder.parent.name for folder in ROOT.glob("packages/*/pyproject.toml")}
    models = [model for model in discover_models() if model.distribution in ours and model.status == "registered"]
    found = [(model, model.load_spec()) for model in models]
    return [(model, spec) for model, spec in found if spec is not None]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="the page to write")
    parser.add_argument("--report", type=Path, nargs="+", default=[], help="folders of --conformance-report")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page is not current")
    arguments = parser.parse_args()
    kept = arguments.path.with_suffix(".json")
    results = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    new = condense(report for folder in arguments.report for report in read_report(folder / "report.json"))
    results = dict(sorted({**results, **new}.items()))
    text = page(repository_models(), results)
    if not arguments.check:
        if new:
            kept.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        arguments.path.write_text(text, encoding="utf-8")
    elif not arguments.path.exists() or arguments.path.read_text(encoding="utf-8") != text:
        sys.exit(f"{arguments.path} is not current: run `python tools/support_matrix.py {arguments.path}`")


if __name__ == "__main__":
    main()
