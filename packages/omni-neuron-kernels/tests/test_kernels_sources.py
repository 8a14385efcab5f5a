# SPDX-License-Identifier: Apache-2.0
import ast
import re
import subprocess
import sys
from pathlib import Path

import omni_neuron_kernels
from omni_neuron_nkisim import lint

KERNELS = Path(omni_neuron_kernels.__file__).parent / "nki_kernels"
README = Path(__file__).parents[1] / "README.md"


def test_the_kernels_are_python_that_nki_takes():
    assert lint([KERNELS]) == []


def test_the_kernels_import_nothing_but_nki_each_other_and_the_standard_library():
    imported = set()
    for path in KERNELS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module != "omni_neuron_kernels.nki_kernels":
                imported.add((node.module or "").partition(".")[0])
    assert "nki" in imported
    assert imported - {"nki"} <= sys.stdlib_module_names


def test_the_first_example_runs():
    source = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    assert len(source.splitlines()) <= 20
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    expected = [line.partition("# prints ")[2] for line in source.splitlines() if "# prints " in line]
    assert len(expected) == 3
    for line, start in zip(done.stdout.splitlines(), expected, strict=True):
        assert line.startswith(start)
