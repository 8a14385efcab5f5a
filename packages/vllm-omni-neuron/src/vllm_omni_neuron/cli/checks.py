# SPDX-License-Identifier: Apache-2.0
"""What `doctor` looks at. Each check fills one section of the report and adds its problems and notes.

A check may raise: `run_checks` turns that into a problem. The runtime package is imported inside the checks, because
this is the command that has to work when it cannot be imported.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from packaging.utils import canonicalize_name

from vllm_omni_neuron import shared_memory
from vllm_omni_neuron.requirements import how_to_meet, installed_version, requirements_of, unmet_requirements

from .models import describe

DISTRIBUTION = "vllm-omni-neuron"
PARALLEL_DISTRIBUTION = "omni-neuron-parallel"  # the worker uses it whatever VLLM_PLUGINS names
LIBRARIES = ("transformers", "diffusers", "safetensors")
ENTRY_POINT_GROUPS = (
    "vllm_omni.platform_plugins",
    "vllm.platform_plugins",
    "vllm_omni.general_plugins",
    "vllm_omni_neuron.models",
    "omni_neuron.kernels",
    "omni_neuron.parallel",
    "torch_dynamo_backends",
)
OUR_OMNI_PLATFORM = "vllm_omni_neuron.platforms.omni_platform.NeuronOmniPlatform"

PROBE_SECONDS = 300
_PROBE_MARK = "vllm-omni-neuron-probe:"
_PROBE = f"""
import json, vllm.platforms, vllm_omni.platforms
from vllm_omni_neuron.registry import broken_pipelines
name = lambda instance: type(instance).__module__ + "." + type(instance).__qualname__
found = {{"vllm": name(vllm.platforms.current_platform), "vllm_omni": name(vllm_omni.platforms.current_omni_platform)}}
found["broken_pipelines"] = broken_pipelines()
print({_PROBE_MARK!r} + json.dumps(found))
"""


@dataclass
class Report:
    """Everything that `doctor` found; `problems` stop or spoil a generation, `notes` may be as intended."""

    sections: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The report as JSON-ready data."""
        return {**self.sections, "problems": self.problems, "notes": self.notes, "ok": not self.problems}


def run_checks(progress: Callable[[str], None] = lambda name: None) -> Report:
    """Run every check, in order; one that breaks becomes a problem and the others still run."""
    report = Report()
    for name, check in CHECKS.items():
        progress(name)
        try:
            report.sections[name] = check(report)
        except Exception as error:  # whatever is broken here is what the reader wants to know
            report.sections[name] = None
            report.problems.append(f"{name} could not be checked: {type(error).__name__}: {error}")
    return report


def check_packages(report: Report) -> list[dict[str, Any]]:
    """Installed versions against the bounds that this package declares; then libraries and siblings, as they are."""
    rows = [_package_row(DISTRIBUTION)]
    rows += [_package_row(one.name, str(one.specifier)) for one in requirements_of(DISTRIBUTION)]
    for unmet in unmet_requirements(DISTRIBUTION):
        report.problems.append(f"{DISTRIBUTION} {unmet}; {how_to_meet(DISTRIBUTION, [unmet])}")
    siblings = sorted(
        {
            canonicalize_name(distribution.name)
            for distribution in metadata.distributions()
            if distribution.name and canonicalize_name(distribution.name).startswith("omni-neuron-")
        }
    )
    named = {canonicalize_name(row["name"]) for row in rows}
    return rows + [_package_row(name) for name in (*LIBRARIES, *siblings) if name not in named]


def _package_row(name: str, required: str = "") -> dict[str, Any]:
    return {"name": name, "version": installed_version(name), "required": required}


def check_system(report: Report) -> dict[str, Any]:
    """Python and the machine."""
    return {"python": platform.python_version(), "executable": sys.executable, "machine": platform.platform()}


def check_neuron_packages(report: Report) -> dict[str, str | None]:
    """The vendor's packages; needed on a device only."""
    import omni_neuron_runtime as runtime

    packages = runtime.neuron_packages()
    if runtime.has_neuron_device() and not runtime.is_cpu_mode():
        missing = [name for name, version in packages.items() if version is None]
        if missing:
            report.problems.append(f"there is a Neuron device, but {', '.join(missing)} is not installed")
    autoload = runtime.autoload_problem()
    if autoload is not None:
        (report.notes if runtime.is_cpu_mode() else report.problems).append(autoload)
    return packages


def check_devices(report: Report) -> dict[str, Any]:
    """What the plugin would run on."""
    import omni_neuron_runtime as runtime

    active = runtime.is_active()
    if not active:
        report.problems.append(
            "the plugin stays inactive: there is no /dev/neuron* and VLLM_NEURON_CPU_MODE is not 1; "
            "set VLLM_NEURON_CPU_MODE=1 to run on the CPU"
        )
    return {
        "neuron_device": runtime.has_neuron_device(),
        "cpu_mode": runtime.is_cpu_mode(),
        "active": active,
        "platform_target": runtime.platform_target() if active else None,
        "visible_cores": runtime.visible_cores(),
        "device_count": runtime.device_count(),
    }


def check_entry_points(report: Report) -> list[dict[str, Any]]:
    """Every entry point in every group that these packages use: loaded, or why not. `check_models` loads models."""
    import omni_neuron_runtime as runtime
    from vllm_omni_neuron.registry import GROUP

    rows = []
    for group in ENTRY_POINT_GROUPS:
        providers = runtime.discover_providers(group, unfiltered=(PARALLEL_DISTRIBUTION,))
        if group != GROUP:
            providers.load_all()
        for provider in providers:
            rows.append(
                {
                    "group": group,
                    "name": provider.name,
                    "value": provider.value,
                    "distribution": provider.distribution,
                    "version": provider.version,
                    "status": provider.status,
                    "reason": provider.reason or None,
                }
            )
            where = f"{provider.name} = {provider.value} of {provider.distribution} {provider.version} ({group})"
            if provider.status == "failed":
                report.problems.append(f"entry point {where} does not load: {provider.reason}")
            elif provider.status in ("filtered", "shadowed"):
                report.notes.append(f"entry point {where} is not used: {provider.reason}")
    return rows


def check_models(report: Report) -> list[dict[str, Any]]:
    """The architectures that model packages offer."""
    from vllm_omni_neuron.registry import discover_models

    rows = [describe(model) for model in discover_models()]
    for row in rows:
        if row["status"] == "failed":
            report.problems.append(f"models of {row['distribution']} {row['version']} cannot be used: {row['reason']}")
        elif row["status"] == "shadowed" and row["architecture"]:
            report.notes.append(f"{row['architecture']} of {row['distribution']} is not used: {row['reason']}")
        for variable in row["environment"]:
            if variable["replaced"] is not None:
                report.notes.append(
                    f"{variable['name']}={variable['value']} is set and stays, where {row['architecture']} of "
                    f"{row['distribution']} would have {variable['replaced']}"
                )
    # The architectures of one distribution share what it lacks.
    report.problems += dict.fromkeys(
        f"{row['distribution']} {row['version']}: {problem}" for row in rows for problem in row["problems"]
    )
    if not any(row["status"] == "registered" for row in rows):
        report.notes.append(
            "no model package can be used: `generate` has nothing to run; uv pip install omni-neuron-wan22"
        )
    return rows


def check_plugin_filter(report: Report) -> dict[str, Any]:
    """What VLLM_PLUGINS lets through."""
    from omni_neuron_runtime import env

    names = env.get("VLLM_PLUGINS")
    if names is None:
        return {"value": None, "unknown": []}
    rows = report.sections.get("entry_points") or []
    value = ",".join(names)
    allowed = [name.strip() for name in names if name.strip()]
    known = {row["name"] for row in rows}
    unknown = [name for name in allowed if name not in known]
    for name in unknown:
        report.notes.append(f"VLLM_PLUGINS names {name!r}, and none of the groups above has such an entry point")
    ours = {row["group"]: row for row in rows if row["distribution"] == DISTRIBUTION}
    dropped = [group for group, row in ours.items() if row["status"] == "filtered"]
    if dropped:
        report.problems.append(
            f"VLLM_PLUGINS={value!r} drops this plugin's own entry point 'neuron' in {', '.join(dropped)}; "
            f"add it: VLLM_PLUGINS={','.join([*allowed, 'neuron'])}"
        )
    return {"value": value, "unknown": unknown}


def check_shared_memory(report: Report) -> dict[str, Any]:
    """Ranks exchange tensors through /dev/shm; one that is too small kills them with SIGBUS."""
    section = {"path": str(shared_memory.PATH), "needed_free_bytes": shared_memory.ADVISED_FREE_BYTES}
    if not shared_memory.PATH.is_dir():
        report.problems.append(f"there is no {shared_memory.PATH}; worker processes exchange tensors through it")
        return {**section, "total_bytes": None, "free_bytes": None}
    space = shared_memory.space()
    if space.too_small:
        report.problems.append(space.too_small)
    elif space.tight:
        (report.notes if _cpu_mode() else report.problems).append(space.tight)
    return {**section, "total_bytes": space.total, "free_bytes": space.free}


def _cpu_mode() -> bool:
    try:
        from omni_neuron_runtime import is_cpu_mode

        return is_cpu_mode()
    except (ImportError, ValueError):  # broken or set to nonsense: reported elsewhere, and no reason to be lenient
        return False


def check_environment(report: Report) -> list[dict[str, Any]]:
    """The variables of the table that are set."""
    from omni_neuron_runtime import env

    rows = []
    for name in env.VARIABLES:
        if not env.is_set(name):
            continue
        error = None
        try:
            env.get(name)
        except env.EnvironmentVariableError as invalid:
            error = str(invalid)
            report.problems.append(error)
        rows.append({"name": name, "value": os.environ[name], "error": error})
    return rows


def check_platform(report: Report) -> dict[str, Any]:
    """The platforms that vLLM and vLLM-Omni resolve, and whether the models' pipelines can be imported.

    Asked in a process of its own: it may hang or crash.
    """
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired:
        report.problems.append(f"vLLM-Omni did not resolve a platform within {PROBE_SECONDS} s")
        return {"vllm": None, "vllm_omni": None}
    answers = [line for line in probe.stdout.splitlines() if line.startswith(_PROBE_MARK)]
    if not answers:
        last = (probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
        report.problems.append(f"vLLM-Omni cannot be imported: {last}")
        return {"vllm": None, "vllm_omni": None}
    found: dict[str, Any] = json.loads(answers[-1].removeprefix(_PROBE_MARK))
    report.problems += found.pop("broken_pipelines")
    devices = report.sections.get("devices")
    if devices and devices["active"] and found["vllm_omni"] != OUR_OMNI_PLATFORM:
        report.problems.append(f"vLLM-Omni resolves the platform {found['vllm_omni']}, not {OUR_OMNI_PLATFORM}")
    return found


CHECKS: dict[str, Callable[[Report], Any]] = {
    "system": check_system,
    "packages": check_packages,
    "neuron_packages": check_neuron_packages,
    "environment": check_environment,
    "devices": check_devices,
    "shared_memory": check_shared_memory,
    "entry_points": check_entry_points,
    "models": check_models,
    "plugin_filter": check_plugin_filter,
    "platform": check_platform,
}
