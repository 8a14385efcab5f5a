# SPDX-License-Identifier: Apache-2.0
"""What a distribution says that it requires, against what is installed. Reads metadata; imports none of it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

# Whose public names are the model SDK: with a version that it was not made for, a model package is not imported.
SDK_DISTRIBUTIONS = ("vllm-omni-neuron", "omni-neuron-kernels", "omni-neuron-parallel", "omni-neuron-runtime")


@dataclass(frozen=True)
class Unmet:
    """A requirement that the installed distributions do not meet.

    Attributes:
        name: of the distribution that is required, normalised.
        requirement: as declared, such as "vllm-omni-neuron>=0.2,<0.3".
        installed: its version; None where it is not installed.
    """

    name: str
    requirement: str
    installed: str | None

    @property
    def of_sdk(self) -> bool:
        """Whether it is one of the distributions that the model SDK is made of."""
        return self.name in SDK_DISTRIBUTIONS

    def __str__(self) -> str:
        found = "it is not installed" if self.installed is None else f"{self.installed} is installed"
        return f"needs {self.requirement}, and {found}"


def requirements_of(distribution: str) -> list[Requirement]:
    """What `distribution` requires here, without its extras; none where it is not installed.

    A line that is no requirement is left aside: some old build backends write such, and pip complains about them.
    """
    try:
        lines = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found.append(requirement)
    return found


def unmet_requirements(distribution: str) -> list[Unmet]:
    """Which of its requirements are not installed, or not in a version that it allows."""
    found = [(requirement, installed_version(requirement.name)) for requirement in requirements_of(distribution)]
    return [
        Unmet(canonicalize_name(requirement.name), f"{requirement.name}{requirement.specifier}", version)
        for requirement, version in found
        if version is None or not requirement.specifier.contains(version, prereleases=True)
    ]


def installed_version(distribution: str) -> str | None:
    """Its version; None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def how_to_meet(distribution: str, unmet: list[Unmet]) -> str:
    """The command that meets them: an SDK of another version goes together with the package that needs it."""
    of_sdk = [one.name for one in unmet if one.of_sdk]
    if of_sdk:
        return f"uv pip install --upgrade {' '.join([distribution, *of_sdk])}"
    return "uv pip install " + " ".join(f"'{one.requirement}'" for one in unmet)


def why_import_failed(distribution: str, error: BaseException) -> str:
    """The error that an import of a module of `distribution` ended with, and what to do about it.

    Args:
        distribution: whose module was imported.
        error: what the import raised.
    """
    said = f"{type(error).__name__}: {error}"
    if not isinstance(error, ImportError):
        return said
    package = (error.name or "").partition(".")[0]
    unmet = unmet_requirements(distribution)
    if canonicalize_name(package) in SDK_DISTRIBUTIONS:
        theirs = canonicalize_name(package)
        return (
            f"{said}: it is not written for {theirs} {installed_version(theirs)}; "
            f"uv pip install --upgrade {distribution} {theirs}"
        )
    if unmet:
        return f"{said}: {distribution} {'; '.join(map(str, unmet))}; {how_to_meet(distribution, unmet)}"
    if isinstance(error, ModuleNotFoundError) and package and importlib.util.find_spec(package) is None:
        return f"{said}: {distribution} does not require what provides {package}; uv pip install that"
    return said
