# SPDX-License-Identifier: Apache-2.0
"""The rules, each on one syntax node of a function that runs inside a kernel; from the language guide and releases."""

from __future__ import annotations

import ast
from collections.abc import Iterator

BUFFERS = ("sbuf", "psum", "hbm", "private_hbm", "shared_hbm")
REMOVED = ("arange", "mgrid", "par_dim", "tile_index")

Problem = tuple[int, str, str]  # line, rule, message


def function_problems(function: ast.FunctionDef | ast.AsyncFunctionDef, kernels: set[str]) -> Iterator[Problem]:
    """What a kernel, or a function it calls, may not contain; `kernels` are the names of jitted functions."""
    yield from _signature(function)
    for node in ast.walk(function):
        if isinstance(node, ast.FunctionDef) and node is not function:
            yield from _signature(node)
        for rule, message in _node(node, kernels):
            yield getattr(node, "lineno", function.lineno), rule, message


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Problem]:
    arguments = function.args
    if arguments.kwonlyargs or arguments.vararg or arguments.kwarg:
        yield (
            function.lineno,
            "star-signature",
            f"{function.name}: no `*`, `*args`, `**kwargs` or keyword-only arguments",
        )
    if isinstance(function, ast.AsyncFunctionDef):
        yield function.lineno, "async", f"{function.name}: no async functions"
    for default in arguments.defaults:
        if isinstance(default, ast.List):
            yield default.lineno, "list-argument", f"{function.name}: a list as default; kernels take tuples"


def _node(node: ast.AST, kernels: set[str]) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Compare) and any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
        yield "is", "`is` and `is not` are not supported; use == and !="
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        yield "comprehension", "no comprehensions or generators; write the loop"
    elif isinstance(node, ast.Lambda):
        yield "lambda", "no lambda; define a function"
    elif isinstance(node, ast.Try | ast.TryStar):
        yield "try", "no try"
    elif isinstance(node, ast.With | ast.AsyncWith):
        if not all(_last_name(item.context_expr) == "no_reorder" for item in node.items):
            yield "with", "`with` is for nl.no_reorder() only"
    elif isinstance(node, ast.Yield | ast.YieldFrom | ast.Await):
        yield "yield", "no yield or await"
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield "import", "no import inside a kernel"
    elif isinstance(node, ast.Global | ast.Nonlocal):
        yield "global", "no global or nonlocal; kernels are pure"
    elif isinstance(node, ast.Attribute) and node.attr in REMOVED and isinstance(node.value, ast.Name):
        if node.value.id in ("nl", "language"):
            yield "removed", f"nl.{node.attr} does not exist since NKI 0.3"
    elif isinstance(node, ast.Call):
        yield from _call(node, kernels)


def _call(node: ast.Call, kernels: set[str]) -> Iterator[tuple[str, str]]:
    name = _last_name(node.func)
    keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
    if "mask" in keywords:
        yield "removed", "mask= does not exist since NKI 0.3"
    buffer = keywords.get("buffer")
    if isinstance(buffer, ast.Constant) and buffer.value in BUFFERS:
        yield "string-buffer", f"buffer={buffer.value!r}: buffers are objects, nl.{buffer.value}"
    if name in ("nc_matmul", "nc_matmul_mx"):
        given = keywords.get("accumulate")
        if given is None or (isinstance(given, ast.Constant) and given.value is None):
            yield "accumulate", f"{name} without accumulate=True or False depends on what is in PSUM"
    if name in kernels and any(isinstance(value, ast.List) for value in (*node.args, *keywords.values())):
        yield "list-argument", f"{name}: a list as argument; kernels take tuples"


def class_problems(definition: ast.ClassDef, known: set[str]) -> Iterator[Problem]:
    """A class that a kernel uses derives from nl.NKIObject, Enum or another such class, and from nothing else."""
    names = [_last_name(base) for base in definition.bases]
    if not names or not all(name in {"NKIObject", "Enum", *known} for name in names):
        yield definition.lineno, "class", f"{definition.name}: derive from nl.NKIObject (or Enum) only"


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Call | ast.Subscript):
        return _last_name(node.func if isinstance(node, ast.Call) else node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_jit(node: ast.AST) -> bool:
    """`nki.jit`, `jit`, or a call of it."""
    return _last_name(node) == "jit"
