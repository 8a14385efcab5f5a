# SPDX-License-Identifier: Apache-2.0
"""The plugin of pytest: the fixture `judge_video`, and the report of the conformance kit, loaded if that is used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from typing import Any

import pytest

from .judge import Verdict, judge
from .shapes import Subject, subject_of


@pytest.fixture
def judge_video() -> Callable[..., Verdict]:
    """A function that judges frames and fails the test, saying what was seen, where they do not show the prompt.

    `judge_video(frames, "a red circle moving right", strict=False)` returns the verdict.
    """

    def check(frames: Any, prompt: str | Subject, *, strict: bool = False) -> Verdict:
        subject = subject_of(prompt) if isinstance(prompt, str) else prompt
        if subject is None:
            raise ValueError(f"{prompt!r} does not name one colour, one shape and one direction")
        verdict = judge(frames)
        if not verdict.matches(subject, strict=strict):
            pytest.fail(f"asked for {subject.caption()!r}{' (strict)' if strict else ''}, seen: {verdict}; {verdict!r}")
        return verdict

    return check


RECORD = "conformance"  # the property of pytest's reports in which processes of xdist send theirs


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--conformance-report FOLDER`."""
    parser.getgroup("conformance", "the conformance kit of omni-neuron-testkit").addoption(
        "--conformance-report",
        metavar="FOLDER",
        help="write report.json, report.txt and badges.md of the models that the conformance kit tests into FOLDER",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Collect in this session."""
    config.pluginmanager.register(_ConformanceReport(config), "omni_neuron_conformance_report")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add what a test of the kit found to pytest's report of it."""
    report = yield
    if (suite := _suite_of(item)) is not None:
        from .conformance.collect import record_of

        kit = getattr(item, "funcargs", {}).get("kit")
        record = record_of(suite, report, {} if kit is None else dict(kit.figures))
        if record is not None:
            report.user_properties.append((RECORD, record))
    return report


class _ConformanceReport:
    """Of one session, in the process that writes its summary."""

    def __init__(self, config: pytest.Config) -> None:
        self.folder: str | None = config.getoption("--conformance-report")
        self.is_worker = hasattr(config, "workerinput")
        self.records: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the records, of this process or of one of xdist's."""
        properties: list[tuple[str, Any]] = list(report.user_properties)
        self.records += [value for name, value in properties if name == RECORD]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Every model with its tests, their figures and what is not supported; the files, where they are asked for."""
        if not self.records or self.is_worker:
            return
        from .conformance.collect import model_reports
        from .conformance.report import as_text, write_report

        models = model_reports(self.records)
        terminalreporter.section("conformance")
        for model in models:
            terminalreporter.write_line(as_text(model))
            terminalreporter.write_line("")
        if self.folder:
            write_report(self.folder, models)
            terminalreporter.write_line(f"report.json, report.txt and badges.md are in {self.folder}")


def _suite_of(item: pytest.Item) -> Any:
    """The class of a test of the kit; None for any other test."""
    module = sys.modules.get(f"{__package__}.conformance.suite")
    suite = getattr(item, "cls", None)
    return suite if module is not None and suite is not None and issubclass(suite, module.ModelConformance) else None
