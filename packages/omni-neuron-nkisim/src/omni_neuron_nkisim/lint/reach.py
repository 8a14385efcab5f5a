# SPDX-License-Identifier: Apache-2.0
"""Which functions of some files run inside a kernel, and what the rules say about them."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from omni_neuron_nkisim.lint.rules import Problem, class_problems, function_problems, is_jit

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, order=True)
class Finding:
    """One problem.

    Attributes:
        path, line: where.
        rule: its short name.
        message: what to write instead.
    """

    path: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: [{self.rule}] {self.message}"


@dataclass(eq=False)
class _File:
    """One parsed file: its functions and classes by name, what it imports, its kernels."""

    path: Path
    tree: ast.Module
    functions: dict[str, Function] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    imported: set[str] = field(default_factory=set)
    kernels: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for node in self.tree.body:
            if isinstance(node, Function):
                self.functions[node.name] = node
                if any(is_jit(decorator) for decorator in node.decorator_list):
                    self.kernels.add(node.name)
            elif isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
        for part in ast.walk(self.tree):
            if isinstance(part, ast.ImportFrom | ast.Import):
                self.imported |= {(alias.asname or alias.name).partition(".")[0] for alias in part.names}
            elif isinstance(part, ast.Call) and is_jit(part.func) and not isinstance(part.func, ast.Call):
                self.kernels |= {given.id for given in part.args if isinstance(given, ast.Name)}


def lint(paths: Iterable[str | os.PathLike[str]]) -> list[Finding]:
    """Findings in the functions that `@nki.jit` ones reach inside the given files, and in those files' imports.

    Args:
        paths: Python files, or folders of them. A function of another file is followed if that file is given too.

    Raises:
        FileNotFoundError: a path does not exist.
        SyntaxError: a file is not Python.
    """
    files = [_File(path, ast.parse(path.read_text(), str(path))) for path in _python_files(paths)]
    kernels = set().union(*(file.kernels for file in files))
    findings: set[Finding] = set()
    for file, definition in _reached(files):
        if isinstance(definition, ast.ClassDef):
            known = set().union(*(other.classes for other in files))
            problems: Iterator[Problem] = class_problems(definition, known)
        else:
            problems = function_problems(definition, kernels)
        findings |= {Finding(str(file.path), *problem) for problem in problems}
        findings |= {Finding(str(file.path), *problem) for problem in _import_problems(file, files)}
    return sorted(findings)


def _python_files(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    found: list[Path] = []
    for given in paths:
        path = Path(given)
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist")
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return list(dict.fromkeys(found))


def _reached(files: list[_File]) -> list[tuple[_File, Function | ast.ClassDef]]:
    """Kernels and what they refer to by name, in the same file or through an import."""
    pending: list[tuple[_File, Function | ast.ClassDef]] = [
        (file, file.functions[name]) for file in files for name in sorted(file.kernels) if name in file.functions
    ]
    done: list[tuple[_File, Function | ast.ClassDef]] = []
    seen: set[ast.AST] = set()
    while pending:
        file, definition = pending.pop()
        if definition in seen:
            continue
        seen.add(definition)
        done.append((file, definition))
        if isinstance(definition, ast.ClassDef):
            pending += [(file, part) for part in definition.body if isinstance(part, Function)]
        for name, through_module in _references(definition):
            others = [other for other in files if other is not file]
            for other in [*([] if through_module else [file]), *(others if _known(file, name, through_module) else [])]:
                target = other.functions.get(name) or other.classes.get(name)
                if target is not None:
                    pending.append((other, target))
    return done


def _references(definition: ast.AST) -> Iterator[tuple[str, str]]:
    """Names that a body uses, and through which module name."""
    for node in ast.walk(definition):
        if isinstance(node, ast.Name):
            yield node.id, ""
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.attr, node.value.id


def _known(file: _File, name: str, through_module: str) -> bool:
    return (through_module or name) in file.imported


def _import_problems(file: _File, files: list[_File]) -> Iterator[Problem]:
    """Imports of a file with kernel code: NKI, the standard library, and other files that are checked as well."""
    stems = {other.path.stem for other in files} | {other.path.parent.name for other in files}
    typing_only = {
        id(part)
        for node in file.tree.body
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for part in ast.walk(node)
    }
    for node in ast.walk(file.tree):
        if id(node) in typing_only or not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif node.level:
            names = [node.module or alias.name for alias in node.names]
        else:
            names = [node.module or ""]
        for name in names:
            top, last = name.partition(".")[0], name.rpartition(".")[2]
            if top != "nki" and top not in sys.stdlib_module_names and last not in stems:
                yield node.lineno, "foreign-import", f"{name}: kernel files import nki and the standard library only"
