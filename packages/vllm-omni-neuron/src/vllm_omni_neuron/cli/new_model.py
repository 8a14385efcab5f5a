# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-neuron new-model`: a model package to start from, as a distribution that builds and passes its tests."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import EXIT_USAGE, fail, out

DISTRIBUTION = "vllm-omni-neuron"
TEMPLATE = Path(__file__).parents[1] / "templates" / "model"
MAX_LENGTH = 40
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
# Distributions of these names count as the plugin's own: they stand back where another one claims the same model.
_OURS = (DISTRIBUTION, "omni-neuron")


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise typer.BadParameter(
            f"{value!r} is no name for this; use lowercase letters, digits and single hyphens, such as acme-video"
        )
    if len(value) > MAX_LENGTH:
        raise typer.BadParameter(f"{value} has {len(value)} characters; {MAX_LENGTH} or fewer make readable code")
    if any(value == ours or value.startswith(f"{ours}-") for ours in _OURS):
        raise typer.BadParameter(
            f"{value} reads as one of this project's own packages; begin with a name of yours, such as acme-{value}"
        )
    module = import_name(value)
    if keyword.iskeyword(module) or module in sys.stdlib_module_names:
        raise typer.BadParameter(f"{value} would be imported as {module}, which is Python's own; use another name")
    if importlib.util.find_spec(module) is not None:
        raise typer.BadParameter(f"{value} would be imported as {module}, which is installed already; use another name")
    return value


def new_model(
    name: Annotated[
        str, typer.Argument(metavar="NAME", callback=_name, help="Of the distribution, such as acme-video.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FOLDER", help="The folder to make. Default: NAME.")
    ] = None,
) -> None:
    """Make a model package: a distribution with a small model, its tiny checkpoint and its conformance test.

    It can be installed, run and tested at once; replace the model by yours, part by part. Needs copier: uv pip install
    'vllm-omni-neuron[template]'. Exit codes: 0 done, 2 wrong usage.
    """
    folder = Path(name) if output is None else output
    if folder.exists():
        fail(f"{folder} exists, and nothing is overwritten; name another folder with --output", EXIT_USAGE)
    try:
        render(name, folder)
    except ModuleNotFoundError as error:
        if error.name != "copier":
            raise
        fail("new-model needs copier, which is not installed; uv pip install 'vllm-omni-neuron[template]'")
    files = sum(path.is_file() for path in folder.rglob("*"))
    out().print(
        f"made {folder}: {files} files. Next:\n"
        f"  uv pip install --editable '{folder.resolve()}[test]'\n"
        f"  VLLM_NEURON_CPU_MODE=1 pytest {folder}/tests\n"
        f"{folder}/README.md says what is where.",
        markup=False,
    )


def import_name(name: str) -> str:
    """The name by which the distribution `name` is imported."""
    return name.replace("-", "_")


def render(name: str, folder: Path) -> None:
    """Write the model package `name` to `folder`, which does not exist yet.

    Raises:
        ModuleNotFoundError: copier is not installed.
    """
    import copier

    copier.run_copy(
        str(TEMPLATE),
        folder,
        {
            "name": name,
            "import_name": import_name(name),
            "prefix": "".join(part.capitalize() for part in name.split("-")),
            "title": name.replace("-", " ").capitalize(),
            "bounds": _bounds(),
        },
        defaults=True,
        quiet=True,
        settings=copier.Settings(),  # not those of whoever runs it
    )


def _bounds() -> dict[str, str]:
    """Version bounds by distribution: those that this plugin declares, and its own minor version."""
    from packaging.requirements import Requirement

    declared = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or []]
    bounds: dict[str, Any] = {item.name: sorted(map(str, item.specifier), reverse=True) for item in declared}
    major, minor, *_ = metadata.version(DISTRIBUTION).split(".")
    bounds[DISTRIBUTION] = [f">={major}.{minor}", f"<{major}.{int(minor) + 1}"]
    return {item: ",".join(parts) for item, parts in bounds.items()}
