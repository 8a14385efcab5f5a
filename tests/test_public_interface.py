# SPDX-License-Identifier: Apache-2.0
"""The packages' sources import each other only through what a package exports, and what they declare to depend on.

Public are the names in `__all__` of a package, and of its subpackages that its README names, such as
`omni_neuron_parallel.planning`. Packages are found by their folders.
"""

from __future__ import annotations

import ast
import itertools
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@dataclass
class Package:
    """A distribution of this repository.

    Attributes:
        sources: the folder of its import name.
        siblings: import names that it declares to depend on, extras included.
        exports: public names, by dotted name of the package or subpackage.
    """

    sources: Path
    siblings: set[str]
    exports: dict[str, set[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Package:
        [sources] = [path.parent for path in folder.glob("src/*/__init__.py")]
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        extras = project.get("optional-dependencies", {}).values()
        declared = itertools.chain(project["dependencies"], *extras)
        package = cls(sources, {re.split(r"[^\w.-]", name)[0].replace("-", "_") for name in declared})
        package.exports[sources.name] = _all(sources / "__init__.py")
        readme = (folder / "README.md").read_text() if (folder / "README.md").exists() else ""
        for inner in sources.glob("*/__init__.py"):
            dotted = f"{sources.name}.{inner.parent.name}"
            if f"`{dotted}`" in readme:
                package.exports[dotted] = _all(inner)
                package.exports[sources.name].add(inner.parent.name)
        return package


def _all(path: Path) -> set[str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return set(ast.literal_eval(node.value))
    return set()


def violations(own: str, source: str, packages: dict[str, Package]) -> Iterator[str]:
    """What a source file of the package `own` takes of its siblings and may not, with lines."""
    exports = {dotted: names for package in packages.values() for dotted, names in package.exports.items()}
    modules: dict[str, str] = {}  # local name → the sibling, or the subpackage, that it stands for
    tree = ast.parse(source)
    for node in ast.walk(tree):
        taken: list[tuple[str, str | None]] = []
        if isinstance(node, ast.Import):
            taken = [(alias.name, None) for alias in node.names]
            modules |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            taken = [(node.module, alias.name) for alias in node.names]
            modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        for module, name in taken:
            sibling = module.partition(".")[0]
            if sibling == own or sibling not in packages:
                continue
            if sibling not in packages[own].siblings:
                yield f"line {node.lineno}: {sibling} is no declared dependency"
            if module not in exports:
                yield f"line {node.lineno}: {module} is not public"
            elif name is not None and name not in exports[module]:
                yield f"line {node.lineno}: {name} is not in {module}.__all__"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id, "")
            sibling = module.partition(".")[0]
            if module in exports and sibling != own and node.attr not in exports[module]:
                yield f"line {node.lineno}: {module}.{node.attr} is not in {module}.__all__"


@pytest.fixture(scope="module")
def packages() -> dict[str, Package]:
    found = [Package.read(path.parent) for path in sorted((ROOT / "packages").glob("*/pyproject.toml"))]
    return {package.sources.name: package for package in found}


def test_siblings_are_imported_through_their_public_names(packages: dict[str, Package]) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}, {violation}"
        for own, package in packages.items()
        for path in sorted(package.sources.rglob("*.py"))
        for violation in violations(own, path.read_text(), packages)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("from vllm_omni_neuron.sdk.request import RequestError", "line 1: vllm_omni_neuron.sdk.request is not public"),
        ("from vllm_omni_neuron.settings import model_settings", "line 1: vllm_omni_neuron.settings is not public"),
        ("from vllm_omni_neuron.sdk import secret", "line 1: secret is not in vllm_omni_neuron.sdk.__all__"),
        ("import omni_neuron_runtime.weights", "line 1: omni_neuron_runtime.weights is not public"),
        ("import omni_neuron_runtime as r\nr.weights", "line 2: omni_neuron_runtime.weights is not in .*__all__"),
        ("from vllm_omni_neuron import sdk\nsdk.secret", "line 2: vllm_omni_neuron.sdk.secret is not in .*__all__"),
        ("def f():\n    import omni_neuron_nkisim", "line 2: omni_neuron_nkisim is no declared dependency"),
    ],
)
def test_what_is_private_is_found(packages: dict[str, Package], source: str, message: str) -> None:
    packages = packages | {"own": Package(Path(), {"vllm_omni_neuron", "omni_neuron_runtime"})}
    found = list(violations("own", source, packages))
    assert len(found) == 1 and re.fullmatch(message, found[0]), found


def test_what_is_public_is_none(packages: dict[str, Package]) -> None:
    packages = packages | {"own": Package(Path(), {"vllm_omni_neuron", "omni_neuron_parallel", "omni_neuron_runtime"})}
    source = (
        "from omni_neuron_parallel.planning import ModelSizes\nfrom omni_neuron_runtime import env\nenv.get\n"
        "from vllm_omni_neuron import sdk\nsdk.RequestError\nimport torch.nn\nfrom . import anything\n"
    )
    assert not list(violations("own", source, packages))
