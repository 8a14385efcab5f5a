# SPDX-License-Identifier: Apache-2.0
"""From pytest's reports to the kit's: what every process sends of its tests, and what one makes of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .case import supported
from .ranks import load
from .report import ModelReport, Outcome, TestResult, worst
from .suite import NOT_SUPPORTED, ModelConformance, layouts_of, names_of_tests

# The tests that show a feature; those of images only where the suite's request brings them.
TESTS_OF_FEATURES: dict[str, tuple[str, ...]] = {
    "compile": ("graphs", "recompilation"),
    "vae_tiling": ("vae_patch",),
    "cpu_offload": ("discovery",),
    "context_ring": ("context_ring",),
    "tensor_capture": ("tensor_capture",),
    "sleep": ("sleep",),
    "warmup_shapes": ("warmup_shapes",),
    "image_input": ("parity_float32",),
    "last_image_input": ("parity_float32",),
}
IMAGES_OF_FEATURES = {"image_input": "image", "last_image_input": "last_image"}
TESTS_OF_DTYPES = {"float32": "parity_float32", "bfloat16": "parity_bfloat16"}


def record_of(suite: type[ModelConformance], report: Any, figures: dict[str, Any]) -> dict[str, Any] | None:
    """One of pytest's reports of a kit's test, JSON-ready; None for a phase that decides nothing."""
    if (report.when == "teardown" and not report.failed) or (report.when == "setup" and report.passed):
        return None
    name, _, case = report.nodeid.rpartition("::")[2].removeprefix("test_").partition("[")
    outcome: Outcome = "passed" if report.passed else "failed"
    reason = ""
    if report.skipped:
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = text.removeprefix("Skipped: ")
        outcome = "not_supported" if reason.startswith(NOT_SUPPORTED) else "untested"
        reason = reason.removeprefix(NOT_SUPPORTED)
    elif report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = (str(report.longrepr) if crash is None else crash.message).strip().partition("\n")[0]
    return {
        "model": facts_of(suite),
        "name": name,
        "case": case.rstrip("]"),
        "outcome": outcome,
        "reason": reason,
        "seconds": round(report.duration, 2),
        "figures": figures,
    }


def facts_of(suite: type[ModelConformance]) -> dict[str, Any]:
    """What a report says of a model whatever its tests found, JSON-ready; made once for a class."""
    known = suite.__dict__.get("_facts")
    if known is None:
        known = _facts_of(suite)
        suite._facts = known  # type: ignore[attr-defined]
    return known


def _facts_of(suite: type[ModelConformance]) -> dict[str, Any]:
    from vllm_omni_neuron import discover_models

    spec = load(suite.spec)
    claims = [model for model in discover_models() if model.architecture == spec.architecture]
    layouts = layouts_of(suite)
    return {
        "suite": suite.__name__,
        "architecture": spec.architecture,
        "title": spec.title,
        "distribution": claims[0].distribution if claims else "",
        "version": claims[0].version if claims else "",
        "axes": dict(spec.axes),
        "features": dict(spec.features),
        "dtypes": list(spec.dtypes),
        "not_supported": dict(suite.not_supported),
        "images": sorted(suite.request.images),
        "layouts": {str(layout): list(layout.axes) for layout in layouts if supported(layout, spec)},
        "tests": [
            title
            for name in names_of_tests()
            for title in ([f"layout[{layout}]" for layout in layouts] if name == "layout" else [name])
        ],
    }


def model_reports(records: Iterable[dict[str, Any]]) -> list[ModelReport]:
    """The records of a session by model; of a test that failed in two phases the last one."""
    models: dict[tuple[str, str], tuple[dict[str, Any], dict[str, TestResult]]] = {}
    for record in records:
        facts = record["model"]
        _, results = models.setdefault((facts["architecture"], facts["suite"]), (facts, {}))
        result = TestResult(**{name: value for name, value in record.items() if name != "model"})
        results[result.title] = result
    return [_model_report(facts, results) for facts, results in models.values()]


def _model_report(facts: dict[str, Any], results: dict[str, TestResult]) -> ModelReport:
    tests = tuple(
        results.get(title)
        or TestResult(title.partition("[")[0], title.partition("[")[2].rstrip("]"), "untested", "not run")
        for title in dict.fromkeys([*facts["tests"], *results])
    )

    def found(titles: Sequence[str]) -> Outcome:
        return worst(test.outcome for test in tests if test.title in titles)

    axes: dict[str, dict[str, Any]] = {}
    for axis in ("tp", "sp", "cp", "cfg", "vae_patch"):
        if axis not in facts["axes"]:
            reason = facts["not_supported"].get(axis, "")
            axes[axis] = {"limit": 1, "outcome": "not_supported", "reason": reason}
            continue
        titles = [f"layout[{name}]" for name, used in facts["layouts"].items() if axis in used]
        outcome = found(["vae_patch"] if axis == "vae_patch" else titles)
        axes[axis] = {"limit": facts["axes"][axis], "outcome": outcome, "reason": ""}
    features: dict[str, dict[str, Any]] = {}
    for feature, support in facts["features"].items():
        if support is not True:
            features[feature] = {"supported": False, "outcome": "not_supported", "reason": support}
            continue
        image = IMAGES_OF_FEATURES.get(feature)
        shown = TESTS_OF_FEATURES.get(feature, ()) if image is None or image in facts["images"] else ()
        reason = facts["not_supported"].get(feature, "")
        features[feature] = {"supported": True, "outcome": found(shown), "reason": reason}
    return ModelReport(
        architecture=facts["architecture"],
        title=facts["title"],
        distribution=facts["distribution"],
        version=facts["version"],
        suite=facts["suite"],
        axes=axes,
        features=features,
        dtypes={dtype: found([TESTS_OF_DTYPES[dtype]]) for dtype in facts["dtypes"]},
        tests=tests,
    )
