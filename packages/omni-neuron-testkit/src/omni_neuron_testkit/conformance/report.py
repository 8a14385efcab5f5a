# SPDX-License-Identifier: Apache-2.0
"""What the kit found of each model: as JSON, as text, and as a Markdown table of badges. Needs the standard library."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

# Of one test. "not_supported": declared so, with a reason. "untested": nothing of the kit ran for it.
Outcome = Literal["passed", "failed", "not_supported", "untested"]
OUTCOMES: tuple[Outcome, ...] = ("failed", "untested", "not_supported", "passed")  # the first one decides for several
SYMBOLS: dict[Outcome, str] = {"passed": "✓", "failed": "✗", "not_supported": "–", "untested": "?"}
REPORT_VERSION = 1


@dataclass(frozen=True)
class TestResult:
    """One test of one model.

    Attributes:
        name: of the test without `test_`, such as "layout".
        case: of several, which: such as "tp2"; else "".
        outcome: see `Outcome`.
        reason: why it is not supported, or the first line of the failure.
        seconds: that it took, what it made for later tests included.
        figures: what it measured, by name.
    """

    name: str
    case: str
    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)

    __test__ = False  # not a test class, whatever pytest thinks of its name

    @property
    def title(self) -> str:
        """`layout[tp2]`."""
        return f"{self.name}[{self.case}]" if self.case else self.name


@dataclass(frozen=True)
class ModelReport:
    """What the kit found of one model.

    Attributes:
        architecture, title: of the spec.
        distribution, version: that registers the architecture; "" where none does.
        suite: the name of the test class.
        axes: of the spec, with what the kit found: {"tp": {"limit": None, "outcome": "passed", "reason": ""}};
            axes that the spec lacks too.
        features: of the spec likewise: {"compile": {"supported": True, "outcome": "passed", "reason": ""}}.
        dtypes: of the spec, by outcome.
        tests: every test of the kit, whether it ran or not.
    """

    architecture: str
    title: str
    distribution: str
    version: str
    suite: str
    axes: Mapping[str, Mapping[str, Any]]
    features: Mapping[str, Mapping[str, Any]]
    dtypes: Mapping[str, Outcome]
    tests: tuple[TestResult, ...]

    @property
    def passed(self) -> bool:
        """Whether no test failed and all have run or are declared."""
        return all(test.outcome in ("passed", "not_supported") for test in self.tests)

    def count(self, outcome: Outcome) -> int:
        """Tests with this outcome."""
        return sum(test.outcome == outcome for test in self.tests)


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """Of several tests of one thing: failed before untested before not supported before passed."""
    found = set(outcomes)
    return next((outcome for outcome in OUTCOMES if outcome in found), "untested")


def read_report(path: str | Path) -> list[ModelReport]:
    """The models of a report.json.

    Raises:
        ValueError: it is of another version of the format.
    """
    data = json.loads(Path(path).read_text(encoding="utf-8"))
    if data.get("version") != REPORT_VERSION:
        raise ValueError(f"{path} has version {data.get('version')!r} of the format; this one reads {REPORT_VERSION}")
    return [
        ModelReport(**{**model, "tests": tuple(TestResult(**test) for test in model["tests"])})
        for model in data["models"]
    ]


def write_report(folder: str | Path, models: Sequence[ModelReport]) -> None:
    """Write report.json, report.txt and badges.md into `folder`, which is made if missing."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    data = {"version": REPORT_VERSION, "models": [asdict(model) for model in models]}
    (path / "report.json").write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (path / "report.txt").write_text("\n\n".join(as_text(model) for model in models) + "\n", encoding="utf-8")
    (path / "badges.md").write_text(as_badges(models) + "\n", encoding="utf-8")


def as_text(model: ModelReport) -> str:
    """The tests of one model, one a line, with figures and reasons."""
    who = f" ({model.distribution} {model.version})" if model.distribution else ""
    lines = [f"{model.title}: {model.architecture}{who}", ""]
    for test in model.tests:
        figures = ", ".join(f"{name} {_shown(value)}" for name, value in test.figures.items())
        lines.append(
            f"  {SYMBOLS[test.outcome]} {test.title:<26} {test.outcome.replace('_', ' '):<14}"
            f"{test.seconds:6.1f} s  {test.reason or figures}".rstrip()
        )
    lines.append("")
    for kind, values in (("axes", model.axes), ("features", model.features)):
        for name, value in values.items():
            shown = str(value["outcome"]).replace("_", " ")
            lines.append(f"  {kind}: {name:<20} {shown:<14} {value['reason']}".rstrip())
    counts = ", ".join(
        f"{model.count(outcome)} {outcome.replace('_', ' ')}" for outcome in reversed(OUTCOMES) if model.count(outcome)
    )
    return "\n".join([*lines, "", f"  {counts}"])


def as_badges(models: Sequence[ModelReport]) -> str:
    """A Markdown table with a row a test and a column a model; reasons below it."""
    titles = list(dict.fromkeys(test.title for model in models for test in model.tests))
    lines = [
        "| test | " + " | ".join(model.title for model in models) + " |",
        "|---|" + "---|" * len(models),
    ]
    notes: list[str] = []
    for title in titles:
        cells = []
        for model in models:
            test = next((test for test in model.tests if test.title == title), None)
            cell = SYMBOLS["untested" if test is None else test.outcome]
            if test is not None and test.outcome == "not_supported":
                notes.append(f"{model.title}, `{title}`: {test.reason}")
                cell += f" [{len(notes)}]"
            cells.append(cell)
        lines.append(f"| `{title}` | " + " | ".join(cells) + " |")
    legend = ", ".join(f"{symbol} {outcome.replace('_', ' ')}" for outcome, symbol in SYMBOLS.items())
    numbered = [f"{number}. {note}" for number, note in enumerate(notes, start=1)]
    return "\n".join([*lines, "", f"{legend}.", *(["", *numbered] if numbered else [])])


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
