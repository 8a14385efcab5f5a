# SPDX-License-Identifier: Apache-2.0
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_first_example_runs():
    [source] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(source.splitlines()) <= 20
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, *report = done.stdout.splitlines()
    assert first == "131072.0"
    assert any(line.startswith("vector") for line in report)
