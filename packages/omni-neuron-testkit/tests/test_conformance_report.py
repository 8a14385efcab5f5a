# SPDX-License-Identifier: Apache-2.0
"""The kit's report: what ran, what failed, what is declared as not supported, and what nobody ran."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_neuron_testkit.conformance import ModelReport, TestResult, as_badges, as_text, read_report, write_report

pytest_plugins = "pytester"

SUITES = """
from conformance_faults import UnmappedWeight
from conformance_toy_reference import ToySuite

class TestToy(ToySuite):
    pass

class TestUnmapped(UnmappedWeight):
    pass
"""


def test_a_session_writes_its_report(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_models=SUITES)
    arguments = [
        "-k",
        "loader_coverage or memory_plan or sp",
        "--conformance-report",
        "report",
        "-p",
        "no:cacheprovider",
    ]
    result = pytester.runpytest_inprocess(*arguments)
    result.stdout.fnmatch_lines(
        ["*conformance*", "*✗ loader_coverage*", "*report.json, report.txt and badges.md are in*"]
    )
    toy, unmapped = read_report(pytester.path / "report" / "report.json")
    assert (toy.architecture, toy.suite, unmapped.suite) == ("ConformanceToyPipeline", "TestToy", "TestUnmapped")
    found = {test.title: test for test in toy.tests}
    assert found["loader_coverage"].outcome == "passed"
    assert found["loader_coverage"].figures["parameters"] > 10**9
    assert (found["memory_plan"].outcome, found["memory_plan"].reason) == ("not_supported", "there is no published toy")
    assert found["layout[tp2-sp]"].reason == "the toy's tokens are not split over TP"
    assert found["seeds"].outcome == found["layout[tp2]"].outcome == "untested"
    assert not toy.passed
    failed = next(test for test in unmapped.tests if test.name == "loader_coverage")
    assert failed.outcome == "failed"
    assert "blocks.1.down.bias" in failed.reason
    assert toy.axes["sp"] == {
        "limit": 1,
        "outcome": "not_supported",
        "reason": "the toy's tokens are not split over TP",
    }
    assert toy.axes["cp"]["outcome"] == "untested"
    assert toy.features["lora"] == {"supported": False, "outcome": "not_supported", "reason": "the toy has none"}
    assert toy.features["sleep"] == {"supported": True, "outcome": "untested", "reason": ""}
    badges = (pytester.path / "report" / "badges.md").read_text()
    assert "| `loader_coverage` | ✓ | ✗ |" in badges


def model(title: str, *tests: TestResult) -> ModelReport:
    return ModelReport(f"{title}Pipeline", title, "acme", "1.0", f"Test{title}", {}, {}, {"float32": "passed"}, tests)


def test_report_of_several_models(tmp_path: Path) -> None:
    first = model(
        "One", TestResult("seeds", "", "passed", "", 1.25, {"error": 1.5e-7}), TestResult("layout", "cp2", "passed")
    )
    second = model("Two", TestResult("seeds", "", "not_supported", "it has no noise"))
    assert first.passed
    assert second.passed
    write_report(tmp_path / "report", [first, second])
    assert read_report(tmp_path / "report" / "report.json") == [first, second]
    assert "✓ seeds                      passed           1.2 s  error 1.5e-07" in as_text(first)
    badges = as_badges([first, second]).splitlines()
    assert badges[2:4] == ["| `seeds` | ✓ | – [1] |", "| `layout[cp2]` | ✓ | ? |"]
    assert badges[-1] == "1. Two, `seeds`: it has no noise"


def test_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text('{"version": 0, "models": []}')
    with pytest.raises(ValueError, match="version 0 of the format; this one reads 1"):
        read_report(tmp_path / "report.json")
