# SPDX-License-Identifier: Apache-2.0
"""Lines of code that a model package has beyond the model itself: `python tools/packaging/count_glue.py` prints them.

A line counts that holds code: blank lines, comments and docstrings do not. Standard library only.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOREIGN = ("omni-neuron-zimage", "omni-neuron-hunyuan-video15")
# The one place that says which file is what. "model" computes the model, as any implementation of it must; a module
# that is not named here, such as one that prepares text, is "pipeline". "planning" is for `plan` and `lower`; optional.
KINDS = {
    "config.py": "model",
    "embeddings.py": "model",
    "rope.py": "model",
    "text_encoder.py": "model",
    "transformer.py": "model",
    "vae.py": "model",
    "__about__.py": "registration",
    "__init__.py": "registration",
    "registry.py": "registration",
    "spec.py": "registration",
    "checkpoint.py": "loaders",
    "mapping.py": "loaders",
    "lowering.py": "planning",
    "planning.py": "planning",
    "tiny.py": "tiny checkpoint",
}
COLUMNS = (
    "model",
    "pipeline",
    "registration",
    "loaders",
    "conformance test",
    "tiny checkpoint",
    "planning",
    "other tests",
)
# What the goal of 300 lines is about: what stands between the model's own code and a package that passes the kit.
GLUE = ("pipeline", "registration", "loaders", "conformance test")
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def lines_of_code(source: str) -> int:
    """Lines of `source` that hold code."""
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def count(package: Path) -> Counter[str]:
    """Lines of code in a package's folder, by column."""
    found: Counter[str] = Counter()
    for path in package.glob("src/*/*.py"):
        found[KINDS.get(path.name, "pipeline")] += lines_of_code(path.read_text(encoding="utf-8"))
    for path in package.glob("tests/*.py"):
        kind = "conformance test" if path.name.startswith("test_conformance") else "other tests"
        found[kind] += lines_of_code(path.read_text(encoding="utf-8"))
    return found


def table() -> str:
    """A Markdown table with a row for each foreign model."""
    rows = ["| | " + " | ".join(COLUMNS) + " | glue |", "|---|" + "---|" * (len(COLUMNS) + 1)]
    for name in FOREIGN:
        found = count(ROOT / "packages" / name)
        cells = [name, *(found[column] for column in COLUMNS), sum(found[column] for column in GLUE)]
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
