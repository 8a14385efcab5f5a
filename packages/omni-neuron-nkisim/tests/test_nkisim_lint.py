# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
import textwrap

import pytest

from omni_neuron_nkisim import lint

HEAD = "import nki\nimport nki.isa as nisa\nimport nki.language as nl\n\n"
KERNEL = HEAD + "@nki.jit\ndef kernel(a, flag):\n    {}\n"


def rules(tmp_path, **sources):
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
    return [finding.rule for finding in lint([tmp_path])]


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ("x = a is None", "is"),
        ("x = a is not None", "is"),
        ("x = [i for i in range(3)]", "comprehension"),
        ("x = sum(i for i in range(3))", "comprehension"),
        ("x = {i: i for i in range(3)}", "comprehension"),
        ("x = lambda i: i", "lambda"),
        ("try:\n        pass\n    except ValueError:\n        pass", "try"),
        ("with open('x') as x:\n        pass", "with"),
        ("yield a", "yield"),
        ("import math", "import"),
        ("global x", "global"),
        ("nisa.nc_matmul(a, a, a)", "accumulate"),
        ("nisa.nc_matmul(a, a, a, accumulate=None)", "accumulate"),
        ("nisa.nc_matmul_mx(a, a, a, a, a)", "accumulate"),
        ("x = nl.ndarray((4, 4), nl.float32, buffer='sbuf')", "string-buffer"),
        ("nisa.tensor_copy(a, a, mask=flag)", "removed"),
        ("x = nl.arange(4)", "removed"),
        ("kernel([a], flag)", "list-argument"),
        ("def inner(*, x):\n        return x", "star-signature"),
    ],
)
def test_each_rule_finds_its_construct(tmp_path, body, rule):
    assert rules(tmp_path, one=KERNEL.format(body)) == [rule]


@pytest.mark.parametrize(
    "body",
    [
        "x = a == flag",
        "with nl.no_reorder():\n        nisa.tensor_copy(a, a)",
        "nisa.nc_matmul(a, a, a, accumulate=(flag > 0))",
        "x = a.ap([[1, 2], [3, 4]])",
        "for i in range(3):\n        x = (i, flag)",
        "if flag:\n        x = 1\n    else:\n        x = 2",
    ],
)
def test_what_is_allowed_passes(tmp_path, body):
    assert rules(tmp_path, one=KERNEL.format(body)) == []


@pytest.mark.parametrize("signature", ["a, *rest", "a, **options", "a, *, b"])
def test_signatures(tmp_path, signature):
    assert rules(tmp_path, one=f"{HEAD}@nki.jit\ndef kernel({signature}):\n    pass\n") == ["star-signature"]


def test_defaults_are_no_lists(tmp_path):
    assert rules(tmp_path, one=f"{HEAD}@nki.jit\ndef kernel(a, b=[1]):\n    pass\n") == ["list-argument"]


def test_only_what_a_kernel_reaches_is_checked(tmp_path):
    source = HEAD + textwrap.dedent(
        """
        def host(a):
            return [part for part in a if part is not None]

        def helper(a):
            return deeper(a)

        def deeper(a):
            return a is None

        def kernel(a):
            return helper(a)

        compiled = nki.jit(kernel)
        """
    )
    [finding] = lint_one(tmp_path, source)
    assert (finding.rule, source.splitlines()[finding.line - 1].strip()) == ("is", "return a is None")


def lint_one(tmp_path, source):
    path = tmp_path / "one.py"
    path.write_text(source)
    return lint([path])


def test_functions_of_other_files_are_followed(tmp_path):
    found = rules(
        tmp_path,
        parts="import nki.isa as nisa\n\ndef part(a):\n    return lambda: a\n\ndef unused(a):\n    return a is None\n",
        one="import nki\nfrom parts import part\n\n@nki.jit\ndef kernel(a):\n    return part(a)\n",
        two="import nki\nimport parts\n\n@nki.jit\ndef kernel(a):\n    return parts.part(a)\n",
    )
    assert found == ["lambda"]


def test_classes_derive_from_nki_object_only(tmp_path):
    source = HEAD + textwrap.dedent(
        """
        class Good(nl.NKIObject):
            size: int

            def area(self):
                return self.size

        class Bad:
            def area(self):
                return self is None

        @nki.jit
        def kernel(a):
            return Good(size=1).area() + Bad().area()
        """
    )
    assert sorted(finding.rule for finding in lint_one(tmp_path, source)) == ["class", "is"]


def test_imports_of_kernel_files(tmp_path):
    source = (
        "from __future__ import annotations\nfrom typing import TYPE_CHECKING\nimport math\nimport nki\n"
        "import numpy as np\nfrom torch import nn\nif TYPE_CHECKING:\n    import torch\n\n"
        "@nki.jit\ndef kernel(a):\n    pass\n"
    )
    findings = lint_one(tmp_path, source)
    assert [(finding.rule, finding.line) for finding in findings] == [("foreign-import", 5), ("foreign-import", 6)]
    assert lint_one(tmp_path, "import torch\n\ndef plain(a):\n    return a is None\n") == []


def test_the_command(tmp_path):
    bad, good = tmp_path / "bad.py", tmp_path / "good.py"
    bad.write_text(KERNEL.format("x = a is None"))
    good.write_text(KERNEL.format("x = a == None"))

    def run(*paths):
        command = [sys.executable, "-W", "error", "-m", "omni_neuron_nkisim.lint", *map(str, paths)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    done = run(bad, good)
    assert done.returncode == 1
    assert done.stdout == f"{bad}:7: [is] `is` and `is not` are not supported; use == and !=\n"
    assert run(good).returncode == 0
    missing = run(tmp_path / "none.py")
    assert missing.returncode == 2
    assert "none.py does not exist" in missing.stderr
