# SPDX-License-Identifier: Apache-2.0
"""What decides whether a package can be released, on small inputs."""

from __future__ import annotations

import datetime
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from release_steps import (
    ReleaseError,
    breaks_rules,
    dated_changelog,
    declared_siblings,
    last_release,
    packages_in_order,
    wheel_problems,
)

DAY = datetime.date(2026, 11, 30)


def test_the_highest_release_of_this_package_and_no_other() -> None:
    tags = [
        "omni-neuron-kernels-v0.9.0",
        "omni-neuron-kernels-v0.10.0",
        "omni-neuron-kernels-v1.0.0rc1",
        "other-v2.0.0",
    ]
    assert last_release("omni-neuron-kernels", tags) == "omni-neuron-kernels-v0.10.0"
    assert last_release("omni-neuron", tags) is None


def test_the_unreleased_section_gets_the_version_and_the_day() -> None:
    text = "# Changelog\n\n## 0.2.0 (unreleased)\n\n### Added\n\n- A thing.\n\n## 0.1.0 (2026-01-02)\n\n- The start.\n"
    assert dated_changelog(text, "0.3.0", DAY) == text.replace("0.2.0 (unreleased)", "0.3.0 (2026-11-30)")


@pytest.mark.parametrize(
    ("text", "version", "message"),
    [
        ("# Changelog\n\n## 0.1.0 (2026-01-02)\n\n- The start.\n", "0.2.0", "nothing to release"),
        ("## 0.2.0 (unreleased)\n\n## 0.1.0 (2026-01-02)\n\n- The start.\n", "0.2.0", "0.2.0 lists no change"),
        ("## 0.2.0 (unreleased)\n\n- A.\n\n## 0.1.0 (2026-01-02)\n\n- B.\n", "0.1.0", "0.1.0 is released"),
    ],
)
def test_a_changelog_that_is_not_ready(text: str, version: str, message: str) -> None:
    with pytest.raises(ReleaseError, match=message):
        dated_changelog(text, version, DAY)


@pytest.mark.parametrize(
    ("old", "new", "allowed"),
    [("0.1.0", "0.1.1", False), ("0.1.9", "0.2.0", True), ("1.2.0", "1.3.0", False), ("1.2.0", "2.0.0", True)],
)
def test_what_may_break(old: str, new: str, allowed: bool) -> None:
    assert (breaks_rules(old, new) is None) == allowed


def test_siblings_come_by_extras_that_are_asked_for(tmp_path: Path) -> None:
    extras = {
        "kit": {"test": ["kit[run, plot]>=0.1"], "run": ["plugin>=0.1,<0.2"], "plot": ["matplotlib"], "more": ["data"]},
        "plugin": {"test": ["simulator"]},
        "simulator": {},
        "data": {},
    }
    for name, optional in extras.items():
        (tmp_path / name).mkdir()
        lines = [f'[project]\nname = "{name}"\ndependencies = []', "[project.optional-dependencies]"]
        lines += [f"{extra} = {requirements}" for extra, requirements in optional.items()]
        (tmp_path / name / "pyproject.toml").write_text("\n".join(lines))
    assert declared_siblings(tmp_path, "kit") == {"plugin"}
    assert declared_siblings(tmp_path, "plugin") == {"simulator"}


def test_packages_come_after_what_they_need(tmp_path: Path) -> None:
    needs = {
        "a-model": ["torch>=2", "plugin[x]>=0.1,<0.2"],
        "plugin": ["base>=0.1"],
        "base": [],
        "also-base": ["numpy"],
    }
    for name, dependencies in needs.items():
        (tmp_path / name).mkdir()
        text = f'[project]\nname = "{name}"\ndependencies = {dependencies}\n'
        (tmp_path / name / "pyproject.toml").write_text(text)
    (tmp_path / "no-package").mkdir()
    assert packages_in_order(tmp_path) == ("also-base", "base", "plugin", "a-model")


def test_a_wheel_that_lacks_things(tmp_path: Path) -> None:
    package = tmp_path / "acme"
    (package / "src" / "acme").mkdir(parents=True)
    (package / "src" / "acme" / "__init__.py").touch()
    (package / "pyproject.toml").write_text(
        '[project.entry-points."some.group"]\nacme = "acme"\n'
        '[tool.hatch.build.targets.wheel]\npackages = ["src/acme"]\n'
    )
    wheel = tmp_path / "acme.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            "acme-1.dist-info/METADATA", "Name: acme\nRequires-Dist: omni-neuron-runtime[stablehlo]>=0.1\n\n"
        )
        archive.writestr("notes.txt", "")
    assert wheel_problems(wheel, package, ["omni-neuron-runtime"]) == [
        "missing from the wheel: acme/__init__.py",
        "not a source file: notes.txt",
        "no py.typed",
        "no licence text",
        "no licence expression",
        "sibling without bounds: omni-neuron-runtime[stablehlo]>=0.1",
        "entry point not in the wheel: some.group: acme",
    ]
