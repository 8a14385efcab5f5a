# SPDX-License-Identifier: Apache-2.0
"""Writes docs/sdk.md from the docstrings of the model SDK's public names: `python tools/sdk_reference.py docs/sdk.md`.

Reads sources with griffe and imports none of them.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[1]
SDK = "vllm_omni_neuron.sdk"
# The other packages whose public names are part of the SDK: listed with one line each.
LISTED = ("omni_neuron_parallel", "omni_neuron_kernels", "omni_neuron_runtime")
STARS = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}
LABELS = {
    griffe.DocstringSectionKind.parameters: "Arguments",
    griffe.DocstringSectionKind.attributes: "Attributes",
    griffe.DocstringSectionKind.returns: "Returns",
    griffe.DocstringSectionKind.yields: "Yields",
    griffe.DocstringSectionKind.raises: "Raises",
}
HEAD = """\
<!-- Generated from docstrings by `./dev docs`. Edit the docstrings, not this page. -->
# The model SDK

What a model package may use: the public names of `vllm_omni_neuron.sdk`, in full below, and those of
`omni_neuron_parallel`, `omni_neuron_kernels` and `omni_neuron_runtime`, listed at the end. Nothing else of these
packages is for model packages: what is not here may change in any release.
"""


class MissingDocstringError(ValueError):
    """A public name has no docstring; the message names it."""


def page() -> str:
    """The whole page, as Markdown.

    Raises:
        MissingDocstringError: a public name of the SDK has none.
    """
    sdk = _load(SDK)
    by_module: dict[str, list[griffe.Object]] = {}
    for name in sorted(_exports(sdk)):
        found = _resolve(sdk, name)
        by_module.setdefault(found.module.path, []).append(found)
    lines = [HEAD, "| topic | names |", "|---|---|"]
    for path in sorted(by_module):
        names = ", ".join(f"[`{one.name}`](#{one.name.lower()})" for one in by_module[path])
        lines.append(f"| [{_title(path)}](#module-{_title(path)}) | {names} |")
    for path in sorted(by_module):
        module = by_module[path][0].module
        lines += ["", f"## Module {_title(path)}", "", _text(module)]
        for one in by_module[path]:
            lines += ["", *_object(one)]
    for package in LISTED:
        lines += ["", *_listed(package)]
    return "\n".join(lines) + "\n"


def _load(package: str) -> griffe.Module:
    sources = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
    loader = griffe.GriffeLoader(search_paths=sources, docstring_parser=griffe.Parser.google, allow_inspection=False)
    loaded = loader.load(package.partition(".")[0])
    loader.resolve_aliases(external=True, implicit=True)
    found = loaded
    for part in package.split(".")[1:]:
        found = found[part]
    assert isinstance(found, griffe.Module)
    return found


def _exports(module: griffe.Module) -> list[str]:
    return [str(name) for name in module.exports or []]


def _resolve(module: griffe.Module, name: str) -> griffe.Object:
    member = module[name]
    return member.final_target if member.is_alias else member


def _title(path: str) -> str:
    return path.rpartition(".")[2]


def _text(one: griffe.Object) -> str:
    """The docstring without its sections.

    Raises:
        MissingDocstringError: it has none.
    """
    if one.docstring is None:
        raise MissingDocstringError(f"{one.path} has no docstring")
    parts = [part for part in one.docstring.parsed if part.kind is griffe.DocstringSectionKind.text]
    return "\n\n".join(part.value.strip() for part in parts)


def _object(one: griffe.Object) -> Iterator[str]:
    yield f"### {one.name}"
    yield ""
    if one.is_class:
        yield from _class(one)
    elif one.is_function:
        yield f"```python\n{_signature(one)}\n```"
        yield from _body(one)
    else:
        yield f"```python\n{_attribute(one)}\n```"
        yield from _body(one)


def _class(one: griffe.Class) -> Iterator[str]:
    bases = ", ".join(str(base) for base in one.bases)
    yield f"```python\nclass {one.name}{f'({bases})' if bases else ''}\n```"
    yield from _body(one)
    for name, member in one.members.items():
        if name.startswith("_") or member.is_alias or not (member.is_function or "property" in member.labels):
            continue
        shown = name if "property" in member.labels else _signature(member)
        label = f" ({', '.join(sorted(member.labels & {'classmethod', 'staticmethod', 'property'}))})"
        yield f"\n**`{' '.join(shown.split())}`**{label if label != ' ()' else ''}"
        yield from _body(member)


def _body(one: griffe.Object) -> Iterator[str]:
    text = _text(one)
    if text:
        yield f"\n{text}"
    for section in one.docstring.parsed if one.docstring else ():
        if section.kind in LABELS:
            yield f"\n{LABELS[section.kind]}:\n"
            yield from (_item(item) for item in section.value)


def _item(item: griffe.DocstringElement) -> str:
    name = getattr(item, "name", "") or (str(item.annotation) if isinstance(item, griffe.DocstringRaise) else "")
    description = " ".join(item.description.split())
    return f"- `{name}`: {description}" if name else f"- {description}"


def _signature(one: griffe.Function) -> str:
    parameters = [parameter for parameter in one.parameters if parameter.name not in ("self", "cls")]
    shown, positional = [], True
    for parameter in parameters:
        star = STARS.get(parameter.kind, "")
        if star == "*":
            positional = False
        if parameter.kind is griffe.ParameterKind.keyword_only and positional:
            shown.append("*")
            positional = False
        text = f"{star}{parameter.name}"
        if parameter.annotation is not None:
            text += f": {parameter.annotation}"
        if parameter.default is not None and not star:
            text += f" = {parameter.default}" if parameter.annotation is not None else f"={parameter.default}"
        shown.append(text)
    returns = f" -> {one.returns}" if one.returns is not None else ""
    return f"{one.name}({', '.join(shown)}){returns}"


def _attribute(one: griffe.Attribute) -> str:
    return f"{one.name} = {one.value}" if one.value is not None else one.name


def _listed(package: str) -> Iterator[str]:
    module = _load(package)
    yield f"## {package}"
    yield ""
    yield "| name | |"
    yield "|---|---|"
    for name in sorted(_exports(module), key=str.lower):
        if name.startswith("__"):
            continue
        one = _resolve(module, name)
        first = " ".join(_text(one).split("\n\n")[0].split()) if one.docstring else ""
        yield f"| `{name}` | {first.replace('|', chr(92) + '|')} |"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="the page to write")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page is not current")
    arguments = parser.parse_args()
    # It warns of lines such as "height, width: pixels.", which describe two names at once.
    logging.getLogger("griffe").setLevel(logging.ERROR)
    text = page()
    if not arguments.check:
        arguments.path.write_text(text, encoding="utf-8")
    elif not arguments.path.exists() or arguments.path.read_text(encoding="utf-8") != text:
        sys.exit(f"{arguments.path} is not current: run `python tools/sdk_reference.py {arguments.path}`")


if __name__ == "__main__":
    main()
