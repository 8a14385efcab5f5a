# SPDX-License-Identifier: Apache-2.0
"""The simulator takes nki's place only on request, and never a real one's. Each case in a fresh process."""

import os
import subprocess
import sys

import pytest

REAL = {
    "nki/__init__.py": "def jit(f):\n    return f\nMARK = 'real'\n",
    "nki/language.py": "def ndarray():\n    pass\n",
}
PLACEHOLDERS = {
    "that raises": {"nki/__init__.py": "raise RuntimeError('install from the Neuron repository')\n"},
    "that is empty": {"nki/__init__.py": "\n"},
}


def python(source, *path, **variables):
    environment = {key: value for key, value in os.environ.items() if key != "OMNI_NEURON_NKISIM"} | variables
    environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    command = [sys.executable, "-c", source]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_importing_the_package_installs_nothing():
    done = python("import omni_neuron_nkisim, sys; print('nki' in sys.modules, omni_neuron_nkisim.is_installed())")
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_the_call_installs_all_modules_and_uninstall_removes_them():
    source = """
import sys, omni_neuron_nkisim as sim
assert sim.install() and sim.install() and sim.is_installed()
import nki, nki.language as nl, nki.isa as nisa, nki.collectives as ncc, nki.typing as nt
from nki.isa.constants import engine
assert nisa.engine is engine and nki.isa is nisa and nt.tensor[128, 512]
with sim.settings(nki_version="0.4.0"):
    assert nki.__version__ == "0.4.0"
assert nki.__version__ == "0.6.0" and nki.simulate(nki.jit(lambda: 3))() == 3
from importlib.util import find_spec
assert find_spec("nki").name == "nki" and find_spec("nki.isa").name == "nki.isa"
sim.uninstall()
assert find_spec("nki") is None
assert not [name for name in sys.modules if name == "nki" or name.startswith("nki.")]
print("done")
"""
    done = python(source)
    assert done.stdout.strip() == "done", done.stderr


@pytest.mark.parametrize("value", ["1", "0", ""])
def test_the_variable(value):
    done = python("import omni_neuron_nkisim as s; print(s.is_installed())", OMNI_NEURON_NKISIM=value)
    assert done.stdout.strip() == str(value == "1"), done.stderr


def test_a_wrong_variable_is_refused():
    done = python("import omni_neuron_nkisim", OMNI_NEURON_NKISIM="yes")
    assert "OMNI_NEURON_NKISIM='yes' is not valid: it takes 0 or 1" in done.stderr


def test_a_real_nki_is_left_alone(tmp_path):
    source = "import omni_neuron_nkisim as s; print(s.install(), s.is_installed()); import nki; print(nki.MARK)"
    done = python(source, write(tmp_path, REAL))
    assert done.stdout.split() == ["False", "False", "real"], done.stderr


@pytest.mark.parametrize("kind", PLACEHOLDERS)
def test_a_placeholder_is_no_real_nki(tmp_path, kind):
    source = (
        "import omni_neuron_nkisim as s\nassert s.install()\nimport nki.isa\nprint(nki.isa.nc_matmul.__name__)\n"
        "s.uninstall()\nimport sys\nprint('nki.isa' in sys.modules)\n"
    )
    done = python(source, write(tmp_path, PLACEHOLDERS[kind]))
    assert done.stdout.split() == ["nc_matmul", "False"], done.stderr


def test_a_placeholder_imported_before_comes_back(tmp_path):
    source = (
        "import nki, omni_neuron_nkisim as s\nbefore = nki\ns.install()\nimport nki\nassert nki is not before\n"
        "s.uninstall()\nimport nki\nassert nki is before\nprint('done')\n"
    )
    done = python(source, write(tmp_path, PLACEHOLDERS["that is empty"]))
    assert done.stdout.strip() == "done", done.stderr


@pytest.mark.parametrize("option", [True, False])
def test_the_pytest_option(tmp_path, option):
    (tmp_path / "test_it.py").write_text(
        "import omni_neuron_nkisim\n\ndef test_it():\n    assert omni_neuron_nkisim.is_installed()\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    done = subprocess.run(command + ["--nkisim"] * option, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (done.returncode == 0) == option, done.stdout


@pytest.mark.parametrize("module", ["nki", "nki.isa", "nki.language", "nki.collectives", "nki.isa.constants"])
def test_a_missing_name_raises_with_what_there_is(module):
    import importlib

    part = importlib.import_module(module)
    with pytest.raises(AttributeError, match=rf"{module} has no 'nothing' in the simulator .*it has "):
        part.nothing  # noqa: B018


def test_only_numpy_and_ml_dtypes_are_imported():
    source = (
        "import sys\nbefore = set(sys.modules)\nimport omni_neuron_nkisim as s\ns.install()\n"
        "tops = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(t for t in tops - set(sys.stdlib_module_names) if 'cython' not in t))\n"
    )
    done = python(source)
    assert set(done.stdout.split()) <= {"numpy", "ml_dtypes", "omni_neuron_nkisim", "nki"}, done.stdout + done.stderr
