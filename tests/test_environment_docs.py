# SPDX-License-Identifier: Apache-2.0
"""Documentation of environment variables and the code that reads them agree, in both directions."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from omni_neuron_runtime.env import VARIABLES

ROOT = Path(__file__).parents[1]
OURS = re.compile(r"\b(?:VLLM_NEURON|OMNI_NEURON|NEURON)_[A-Z0-9_]*[A-Z0-9]\b")
SOURCES = sorted(ROOT.glob("packages/*/src/**/*.py"))
TABLE = ROOT / "packages" / "omni-neuron-runtime" / "src" / "omni_neuron_runtime" / "env" / "__init__.py"
# The simulator does without the runtime, so it reads its variables itself; they are in the table all the same.
STANDALONE = ROOT / "packages" / "omni-neuron-nkisim"
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("packages/*/README.md"))]


def _called(node: ast.Call) -> str:
    return ast.unparse(node.func)


def _constants(tree: ast.AST) -> dict[str, str]:
    """Names that are assigned a string literal somewhere in the module."""
    return {
        target.id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _names(node: ast.AST, constants: dict[str, str]) -> set[str]:
    """The strings that `node` itself is: a literal, or a name that holds one."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {node.value}
    if isinstance(node, ast.Name | ast.Attribute):
        name = node.id if isinstance(node, ast.Name) else node.attr
        return {constants[name]} if name in constants else set()
    return set()


def read_through_the_table(source: str) -> set[str]:
    """Variables that `source` reads with `env.get` or `env.is_set`."""
    tree = ast.parse(source)
    constants = _constants(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    found: set[str] = set()
    for call in calls:
        if re.search(r"\benv\.(get|is_set)$", _called(call)):
            found |= _names(call.args[0], constants)
    return found


def read_past_the_table(source: str) -> set[str]:
    """Variables of ours, or of the table, that `source` reads from os.environ; writing is not reading."""
    tree = ast.parse(source)
    constants = _constants(tree)
    found: set[str] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and node.args
            and re.search(r"(environ\.get|environ\.pop|getenv)$", _called(node))
        ):
            found |= _names(node.args[0], constants)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            if ast.unparse(node.value).endswith("environ"):
                found |= _names(node.slice, constants)
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]).endswith("environ"):
            found |= _names(node.left, constants)
    return {name for name in found if OURS.fullmatch(name) or name in VARIABLES}


def test_the_page_is_current() -> None:
    command = [sys.executable, "-m", "omni_neuron_runtime.env", str(ROOT / "docs" / "environment.md"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def set_by_a_profile(source: str) -> set[str]:
    """Variables that `source` names in a dict or tuple of strings; for the modules that hold environment profiles."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Dict | ast.Tuple)]
    items = [item for node in nodes for item in (node.keys if isinstance(node, ast.Dict) else node.elts) if item]
    return {name for item in items for name in _names(item, {})}


def test_every_variable_of_the_table_is_read_or_set() -> None:
    read = set().union(*(read_through_the_table(path.read_text()) for path in SOURCES))
    read |= set().union(*(read_past_the_table(path.read_text()) for path in SOURCES if path.is_relative_to(STANDALONE)))
    profiles = [path for path in SOURCES if path.match("sdk/profiles.py") or path.name == "spec.py"]
    given = set().union(*(set_by_a_profile(path.read_text()) for path in profiles))
    assert set(VARIABLES) - read - given == set(), "listed, but no code reads or sets them: remove the rows"


def test_everything_read_through_the_table_is_in_it() -> None:
    read = set().union(*(read_through_the_table(path.read_text()) for path in SOURCES))
    read |= set().union(*(read_past_the_table(path.read_text()) for path in SOURCES if path.is_relative_to(STANDALONE)))
    assert read - set(VARIABLES) == set()


def test_nothing_is_read_past_the_table() -> None:
    past = {
        str(path.relative_to(ROOT)): names
        for path in SOURCES
        if path != TABLE and not path.is_relative_to(STANDALONE) and (names := read_past_the_table(path.read_text()))
    }
    assert past == {}, "read these through omni_neuron_runtime.env"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.exists()], ids=lambda page: str(page.relative_to(ROOT))
)
def test_every_variable_that_a_page_names_is_in_the_table(page: Path) -> None:
    assert set(OURS.findall(page.read_text())) - set(VARIABLES) == set()


def test_the_searches_find_what_they_look_for() -> None:
    through = (
        'from omni_neuron_runtime import env\nNAME = "A_B"\nenv.get(NAME)\nruntime.env.is_set("C_D")\nx.get("E_F")\n'
    )
    assert read_through_the_table(through) == {"A_B", "C_D"}
    past = (
        'import os\nNAME = "NEURON_A"\nos.environ[NAME]\nos.environ.get("NEURON_B")\nos.getenv("VLLM_NEURON_C")\n'
        'os.environ["NEURON_WRITTEN"] = "1"\n"OMNI_NEURON_D" in os.environ\nos.environ.get("HOME")\n'
        'os.environ.get("OMP_NUM_THREADS")\n'
    )
    assert read_past_the_table(past) == {"NEURON_A", "NEURON_B", "VLLM_NEURON_C", "OMNI_NEURON_D", "OMP_NUM_THREADS"}
    assert set_by_a_profile('A = ("N_A", "N_B")\nB = {"N_C": "N_D", **A}\nf("N_E")\n') == {"N_A", "N_B", "N_C"}
    assert OURS.findall("set `NEURON_X_1`, not VLLM_NEURON_Y=1 or XNEURON_Z") == ["NEURON_X_1", "VLLM_NEURON_Y"]
