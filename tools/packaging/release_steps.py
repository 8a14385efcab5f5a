# SPDX-License-Identifier: Apache-2.0
"""What releasing one package of this repository needs besides its build: tags, changelog and what a wheel must hold.

Standard library only: noxfile.py imports it in nox's own environment.
"""

from __future__ import annotations

import datetime
import email
import graphlib
import re
import subprocess
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

VERSION = re.compile(r"\d+\.\d+\.\d+")
HEADING = re.compile(r"^## (?P<version>\S+) \((?P<state>[^)]*)\)$", re.MULTILINE)


class ReleaseError(ValueError):
    """A release is not ready; the message says what to do."""


def release_tag(package: str, version: str) -> str:
    """The git tag of a release: packages of one repository have versions, and so tags, of their own."""
    return f"{package}-v{version}"


def last_release(package: str, tags: Iterable[str]) -> str | None:
    """The tag of the highest released version of `package`; None before the first."""
    prefix = release_tag(package, "")
    versions = [tag.removeprefix(prefix) for tag in tags if tag.startswith(prefix)]
    released = [version for version in versions if VERSION.fullmatch(version)]
    if not released:
        return None
    return release_tag(package, max(released, key=lambda version: [int(part) for part in version.split(".")]))


def git_tags(root: Path) -> list[str]:
    """All tags of the repository."""
    return subprocess.run(["git", "tag"], cwd=root, check=True, capture_output=True, text=True).stdout.split()


def dated_changelog(text: str, version: str, day: datetime.date) -> str:
    """The changelog with its unreleased section as that of `version`, released on `day`.

    Raises:
        ReleaseError: there is no unreleased section on top, it says nothing, or `version` is released already.
    """
    sections = list(HEADING.finditer(text))
    if not sections or sections[0]["state"] != "unreleased":
        raise ReleaseError('the changelog has no section "## <version> (unreleased)" on top: nothing to release')
    if version in {section["version"] for section in sections[1:]}:
        raise ReleaseError(f"the changelog says that {version} is released; name a higher one")
    body = text[sections[0].end() : sections[1].start() if len(sections) > 1 else len(text)]
    if not re.search(r"^- ", body, re.MULTILINE):
        raise ReleaseError(f"the changelog's section of {sections[0]['version']} lists no change")
    start, end = sections[0].span()
    return f"{text[:start]}## {version} ({day.isoformat()}){text[end:]}"


def breaks_rules(old: str, new: str) -> str | None:
    """Why a release `new` after `old` may not break the public interface; None where it may.

    Semantic Versioning: a breaking change needs a new major version, or a new minor one before 1.0.
    """
    before, after = ([int(part) for part in version.split(".")] for version in (old, new))
    allowed = after[0] > before[0] or (before[0] == 0 and after[1] > before[1])
    return None if allowed else f"{new} after {old} may add to the interface but not break it"


def manifest_of(package_dir: Path) -> dict[str, Any]:
    """A package's pyproject.toml."""
    return tomllib.loads((package_dir / "pyproject.toml").read_text())


def import_name_of(manifest: dict[str, Any]) -> str:
    """The name by which a package is imported."""
    [folder] = manifest["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    return str(folder).rpartition("/")[2]


def packages_in_order(folder: Path) -> tuple[str, ...]:
    """The distributions under `folder`, each after those of them that it needs; equals by name."""
    needs: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*/pyproject.toml")):
        project = manifest_of(path.parent)["project"]
        needs[project["name"]] = [required_name(requirement) for requirement in project["dependencies"]]
    sorter = graphlib.TopologicalSorter(
        {name: [other for other in found if other in needs] for name, found in needs.items()}
    )
    sorter.prepare()
    ordered: list[str] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        ordered += ready
        sorter.done(*ready)
    return tuple(ordered)


def required_name(requirement: str) -> str:
    """The distribution that a requirement, with its extras, bounds and markers, names."""
    return re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0]


def required_extras(requirement: str) -> list[str]:
    """The extras that a requirement asks for."""
    found = re.match(r"[\w.-]+\s*\[([^\]]*)\]", requirement)
    return [extra.strip() for extra in found[1].split(",")] if found else []


def declared_siblings(folder: Path, package: str) -> set[str]:
    """The distributions under `folder` that come with `package` and its extra `test`, through others of them, too."""
    manifests = [manifest_of(path.parent) for path in folder.glob("*/pyproject.toml")]
    projects = {manifest["project"]["name"]: manifest["project"] for manifest in manifests}
    pending: list[tuple[str, str | None]] = [(package, None), (package, "test")]
    seen: set[tuple[str, str | None]] = set()
    while pending:
        name, extra = pending.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        project = projects[name]
        optional = project.get("optional-dependencies", {})
        for requirement in project["dependencies"] if extra is None else optional.get(extra, []):
            other = required_name(requirement)
            if other in projects:
                pending += [(other, None), *((other, wanted) for wanted in required_extras(requirement))]
    return {name for name, _ in seen} - {package}


def wheel_problems(wheel: Path, package_dir: Path, siblings: Iterable[str]) -> list[str]:
    """What is wrong with a built wheel: files, typing marker, licence, siblings' bounds, entry points."""
    manifest = manifest_of(package_dir)
    import_name = import_name_of(manifest)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata_name = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(metadata_name))
        entry_points = next((archive.read(name).decode() for name in names if name.endswith("entry_points.txt")), "")
    sources = {
        str(path.relative_to(package_dir / "src"))
        for path in (package_dir / "src" / import_name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    problems = [f"missing from the wheel: {name}" for name in sorted(sources - set(names))]
    problems += [f"not a source file: {name}" for name in names if ".dist-info/" not in name and name not in sources]
    problems += [] if f"{import_name}/py.typed" in names else ["no py.typed"]
    problems += [] if any(name.endswith(".dist-info/licenses/LICENSE") for name in names) else ["no licence text"]
    problems += [] if metadata["License-Expression"] == "Apache-2.0" else ["no licence expression"]
    for requirement in metadata.get_all("Requires-Dist") or []:
        if required_name(requirement) in siblings and ("<" not in requirement or ">=" not in requirement):
            problems.append(f"sibling without bounds: {requirement}")
    for group, entries in manifest["project"].get("entry-points", {}).items():
        problems += [
            f"entry point not in the wheel: {group}: {name}" for name in entries if f"{name} = " not in entry_points
        ]
    return problems


def sdist_problems(sdist: Path, package_dir: Path) -> list[str]:
    """Files that a source archive lacks: sources, tests, and what a distribution's root holds."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {
        str(path.relative_to(package_dir))
        for folder in ("src", "tests")
        for path in (package_dir / folder).rglob("*.py")
    }
    missing = (wanted | {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"}) - names
    return [f"missing from the source archive: {name}" for name in sorted(missing)]
