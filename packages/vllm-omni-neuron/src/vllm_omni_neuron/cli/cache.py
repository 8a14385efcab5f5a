# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-neuron cache`: what the compile cache holds, and moving it to another machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import err, fail, out, plain_table, print_json

if TYPE_CHECKING:
    from omni_neuron_runtime import ArtifactCache

cache = typer.Typer(help="List, remove, export and import what the compile backends have made.", no_args_is_help=True)

Folder = Annotated[
    Path | None, typer.Option("--dir", help="The cache. Default: OMNI_NEURON_COMPILE_CACHE_DIR, or its default.")
]


@cache.command("ls")
def list_(
    folder: Folder = None,
    json_: Annotated[bool, typer.Option("--json", help="The entries as JSON on stdout.")] = False,
) -> None:
    """List the modules, the one that was used last first."""
    found = _cache(folder)
    entries = found.entries()
    if json_:
        print_json(entries)
        return
    table = plain_table("key", "name", "MiB", "last used")
    for entry in entries:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry["used"]))
        table.add_row(entry["key"][:12], entry["name"], f"{entry['bytes'] / 2**20:.1f}", used)
    out().print(table)
    total = sum(entry["bytes"] for entry in entries)
    err().print(f"{len(entries)} modules, {total / 2**20:.1f} MiB in {found.root}")


@cache.command("rm")
def remove(
    keys: Annotated[list[str] | None, typer.Argument(help="Keys, or how they start.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove every module.")] = False,
    folder: Folder = None,
) -> None:
    """Remove modules."""
    found = _cache(folder)
    if bool(keys) == everything:
        raise typer.BadParameter("give keys, or --all", param_hint="KEYS")
    try:
        removed = found.remove(keys or [entry["key"] for entry in found.entries()])
    except ValueError as error:
        fail(str(error))
    err().print(f"{len(removed)} modules removed")


@cache.command("export")
def export(
    path: Annotated[Path, typer.Argument(help="The file to write, such as cache.tar.gz.")], folder: Folder = None
) -> None:
    """Write all modules into one file. Executables stay behind: they are made for one kind of host."""
    err().print(f"{_cache(folder).export(path)} modules written to {path}")


@cache.command("import")
def import_(
    path: Annotated[Path, typer.Argument(help="A file that `cache export` wrote.", exists=True, dir_okay=False)],
    folder: Folder = None,
) -> None:
    """Take in the modules of an exported file."""
    try:
        err().print(f"{_cache(folder).import_(path)} new modules")
    except ValueError as error:
        fail(str(error))


def _cache(folder: Path | None) -> ArtifactCache:
    from omni_neuron_runtime import ArtifactCache

    return ArtifactCache.from_environment(folder)
