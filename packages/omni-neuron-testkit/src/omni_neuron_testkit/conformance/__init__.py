# SPDX-License-Identifier: Apache-2.0
"""The conformance kit: a model package subclasses `ModelConformance`, and pytest says whether its model is right.

Names are imported when they are asked for; the plugin of pytest loads none of them in a run without the kit.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omni_neuron_testkit.conformance.case import (
        STANDARD_LAYOUTS,
        KitRequest,
        Layout,
        Published,
        ReferenceRun,
        diffusers_reference,
    )
    from omni_neuron_testkit.conformance.report import (
        ModelReport,
        Outcome,
        TestResult,
        as_badges,
        as_text,
        read_report,
        write_report,
    )
    from omni_neuron_testkit.conformance.suite import ModelConformance

_HOMES = {
    "case": ["STANDARD_LAYOUTS", "KitRequest", "Layout", "Published", "ReferenceRun", "diffusers_reference"],
    "report": ["ModelReport", "Outcome", "TestResult", "as_badges", "as_text", "read_report", "write_report"],
    "suite": ["ModelConformance"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "STANDARD_LAYOUTS",
    "KitRequest",
    "Layout",
    "ModelConformance",
    "ModelReport",
    "Outcome",
    "Published",
    "ReferenceRun",
    "TestResult",
    "as_badges",
    "as_text",
    "diffusers_reference",
    "read_report",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
