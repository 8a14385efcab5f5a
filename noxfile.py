# SPDX-License-Identifier: Apache-2.0
"""Every task of this repository. `./dev <session>` runs one; `./dev help` lists them.

`dev`, `demo`, `run`, `test`, `tests` and `typing` share one environment (.nox/dev) in which every package is installed
editable, held to constraints.txt. `alone` and `wheels` make their own, from built wheels, the way users install.
"""

from __future__ import annotations

import email
import os
import shutil
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import nox

nox.needs_version = ">=2024.10"
nox.options.default_venv_backend = "uv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "typing", "test"]

ROOT = Path(__file__).parent
# In the order in which they may import each other.
PACKAGES = (
    "omni-neuron-nkisim",
    "omni-neuron-runtime",
    "omni-neuron-testkit",
    "omni-neuron-shapes",
    "omni-neuron-kernels",
    "omni-neuron-parallel",
    "vllm-omni-neuron",
    "omni-neuron-wan22",
)
# Optional parts that development installs too.
DEV_EXTRAS = {"omni-neuron-runtime": "[stablehlo]", "omni-neuron-testkit": "[accuracy]"}
DEV_ENVIRONMENT = ROOT / ".nox" / "dev"
DEV_REQUIREMENTS = ROOT / "requirements-dev.txt"
CONSTRAINTS = ROOT / "constraints.txt"
DIST = ROOT / "dist"


def _package_dir(package: str) -> Path:
    if package not in PACKAGES:
        raise SystemExit(f"unknown package {package!r}; the packages are {', '.join(PACKAGES)}")
    return ROOT / "packages" / package


def _manifest(package: str) -> dict:
    return tomllib.loads((_package_dir(package) / "pyproject.toml").read_text())


def _import_name(package: str) -> str:
    return _manifest(package)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"][0].rpartition("/")[2]


def _test_environment() -> dict[str, str]:
    """What every test process sees, whatever the caller's shell exports."""
    return {"VLLM_NEURON_CPU_MODE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def _dev_inputs() -> str:
    """What the development environment is made from; when it changes, the environment is brought up to date."""
    files = [DEV_REQUIREMENTS, CONSTRAINTS, *(_package_dir(package) / "pyproject.toml" for package in PACKAGES)]
    return "\n".join(path.read_text() for path in files)


class Dev:
    """The development environment that several sessions share (nox itself gives every session one of its own)."""

    def __init__(self, session: nox.Session) -> None:
        self.session = session
        stamp = DEV_ENVIRONMENT / "omni-neuron-dev.stamp"
        if stamp.exists() and stamp.read_text() == _dev_inputs():
            return
        if not (DEV_ENVIRONMENT / "bin" / "python").exists():
            session.run(
                "uv", "venv", "--quiet", "--clear", "--python", sys.executable, str(DEV_ENVIRONMENT), external=True
            )
        paths = [f"{_package_dir(package)}{DEV_EXTRAS.get(package, '')}" for package in PACKAGES]
        editable = [part for path in paths for part in ("--editable", path)]
        command = ["uv", "pip", "install", "--constraint", str(CONSTRAINTS), "--requirement", str(DEV_REQUIREMENTS)]
        session.run(*command, *editable, external=True, env={"VIRTUAL_ENV": str(DEV_ENVIRONMENT)})
        stamp.write_text(_dev_inputs())

    def run(self, program: str, *arguments: str, env: dict[str, str] | None = None) -> None:
        """Run `program`, the environment's own where it has one, as if the environment were activated."""
        own = DEV_ENVIRONMENT / "bin" / program
        path = f"{DEV_ENVIRONMENT / 'bin'}{os.pathsep}{os.environ['PATH']}"
        activated = {"VIRTUAL_ENV": str(DEV_ENVIRONMENT), "PATH": path, **(env or {})}
        self.session.run(str(own) if own.exists() else program, *arguments, env=activated, external=True)


def dev_session(function: Callable[..., None]) -> Callable[..., None]:
    """A session that runs in the shared development environment."""
    return nox.session(function, venv_backend="none", default=False)


@dev_session
def dev(session: nox.Session) -> None:
    """Make or update the development environment, and nothing else."""
    Dev(session)
    session.log(f"ready: {DEV_ENVIRONMENT}")


@dev_session
def run(session: nox.Session) -> None:
    """Run any command in the development environment: ./dev run vllm-omni-neuron doctor."""
    if not session.posargs:
        session.error("name a command, for example: ./dev run vllm-omni-neuron doctor")
    Dev(session).run(*session.posargs)


@dev_session
def demo(session: nox.Session) -> None:
    """Turn three prompts into MP4s on this CPU and say what they show; arguments go to examples/demo.py."""
    Dev(session).run("python", "examples/demo.py", *session.posargs, env=_test_environment())


@dev_session
def test(session: nox.Session) -> None:
    """Lint, types, then every test of every package and of the repository; arguments go to pytest."""
    development = Dev(session)
    if not session.posargs:
        _lint(development)
        _typing(development)
    # OpenMP threads of two processes on two cores spin against each other; both collect the tests in one order.
    environment = {**_test_environment(), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    development.run("pytest", *(session.posargs or _all_tests()), env=environment)


def _all_tests() -> list[str]:
    """pytest's arguments for everything: two files at a time where there are the cores, the longest ones first."""
    paths = ["tests", *(f"packages/{package}/tests" for package in reversed(PACKAGES)), "tools/shapes/tests"]
    # More at a time would not fit: several files start engines or pools of eight processes.
    side_by_side = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"] if (os.cpu_count() or 1) > 1 else []
    return ["--durations=25", *side_by_side, *paths]


@dev_session
@nox.parametrize("package", PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """One package's own tests in the development environment: ./dev 'tests(omni-neuron-runtime)'."""
    Dev(session).run("pytest", str(_package_dir(package) / "tests"), *session.posargs, env=_test_environment())


@nox.session(default=False, reuse_venv=False)
@nox.parametrize("package", PACKAGES)
def alone(session: nox.Session, package: str) -> None:
    """Build one package's wheel, install it with its declared dependencies only, import it, run its own tests."""
    _build_wheels(session)
    wheel = _wheel_of(package)
    session.install("--constraint", str(CONSTRAINTS), "--find-links", str(DIST), f"{package}[test] @ {wheel.as_uri()}")
    undeclared = [other for other in PACKAGES if other not in {package, *_declared_siblings(package)}]
    names = [_import_name(other) for other in undeclared]
    probe = (
        "import importlib, importlib.util, sys\n"
        f"module = importlib.import_module({_import_name(package)!r})\n"
        "print(module.__name__, module.__version__, module.__file__)\n"
        f"present = [name for name in {names!r} if importlib.util.find_spec(name)]\n"
        "sys.exit(f'undeclared siblings are installed: {present}' if present else 0)\n"
    )
    workdir = session.create_tmp()
    session.chdir(workdir)
    session.run("python", "-c", probe)
    configuration = str(ROOT / "pyproject.toml")
    session.run(
        "pytest", "-c", configuration, "--rootdir", str(_package_dir(package)), "-p", "no:cacheprovider",
        str(_package_dir(package) / "tests"), *session.posargs, env=_test_environment(),
    )  # fmt: skip


def _declared_siblings(package: str) -> set[str]:
    """The siblings that `package` and its tests depend on, directly or through another sibling."""
    found: set[str] = set()
    pending = [package]
    while pending:
        project = _manifest(pending.pop())["project"]
        for requirement in [*project["dependencies"], *project.get("optional-dependencies", {}).get("test", [])]:
            name = requirement.split(";")[0].split("[")[0].split(">")[0].split("=")[0].strip()
            if name in PACKAGES and name not in found:
                found.add(name)
                pending.append(name)
    return found


def _build_wheels(session: nox.Session) -> None:
    if DIST.exists():
        shutil.rmtree(DIST)
    for package in PACKAGES:
        session.run("uv", "build", "--quiet", "--out-dir", str(DIST), str(_package_dir(package)), external=True)


def _wheel_of(package: str) -> Path:
    [wheel] = DIST.glob(f"{package.replace('-', '_')}-*.whl")
    return wheel


@nox.session(default=False, reuse_venv=False)
def wheels(session: nox.Session) -> None:
    """Build every wheel and source archive into dist/; check metadata and contents."""
    session.install("twine>=6")
    _build_wheels(session)
    archives = [*DIST.glob("*.whl"), *DIST.glob("*.tar.gz")]
    session.run("twine", "check", "--strict", *map(str, sorted(archives)))
    for package in PACKAGES:
        _check_wheel(session, package)
        _check_sdist(session, package)


def _check_wheel(session: nox.Session, package: str) -> None:
    wheel, import_name = _wheel_of(package), _import_name(package)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata_name = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(metadata_name))
        entry_points = next((archive.read(name).decode() for name in names if name.endswith("entry_points.txt")), "")
    sources = {
        str(path.relative_to(_package_dir(package) / "src"))
        for path in (_package_dir(package) / "src" / import_name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    problems = [f"missing from the wheel: {name}" for name in sorted(sources - set(names))]
    problems += [f"not a source file: {name}" for name in names if ".dist-info/" not in name and name not in sources]
    problems += [] if f"{import_name}/py.typed" in names else ["no py.typed"]
    problems += [] if any(name.endswith(".dist-info/licenses/LICENSE") for name in names) else ["no licence text"]
    problems += [] if metadata["License-Expression"] == "Apache-2.0" else ["no licence expression"]
    for requirement in metadata.get_all("Requires-Dist") or []:
        name = requirement.split(";")[0].split("<")[0].split(">")[0].strip()
        if name in PACKAGES and ("<" not in requirement or ">=" not in requirement):
            problems.append(f"sibling without bounds: {requirement}")
    for group, entries in _manifest(package)["project"].get("entry-points", {}).items():
        problems += [
            f"entry point not in the wheel: {group}: {name}" for name in entries if f"{name} = " not in entry_points
        ]
    if problems:
        session.error(f"{wheel.name}:\n  " + "\n  ".join(problems))
    session.log(f"{wheel.name}: {len(sources)} files, metadata and entry points as declared")


def _check_sdist(session: nox.Session, package: str) -> None:
    [sdist] = DIST.glob(f"{package.replace('-', '_')}-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {
        str(path.relative_to(_package_dir(package)))
        for folder in ("src", "tests")
        for path in (_package_dir(package) / folder).rglob("*.py")
    }
    missing = sorted((wanted | {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"}) - names)
    if missing:
        session.error(f"{sdist.name} lacks {', '.join(missing)}")


@dev_session
def lint(session: nox.Session) -> None:
    """Ruff's linter and formatter, on everything."""
    _lint(Dev(session))


@dev_session
def typing(session: nox.Session) -> None:
    """Mypy on the packages' sources."""
    _typing(Dev(session))


def _lint(development: Dev) -> None:
    development.run("ruff", "check", ".")
    development.run("ruff", "format", "--check", ".")


def _typing(development: Dev) -> None:
    development.run("mypy", *(f"packages/{package}/src" for package in PACKAGES))


@dev_session
def docs(session: nox.Session) -> None:
    """Write the generated pages of docs/ (`--check` only compares)."""
    development = Dev(session)
    development.run("python", "-m", "omni_neuron_runtime.env", "docs/environment.md", *session.posargs)
    development.run("python", "-m", "vllm_omni_neuron.stage_config", "docs/stage-configuration.md", *session.posargs)


@nox.session(default=False)
def lock(session: nox.Session) -> None:
    """Compile constraints.txt anew: names and versions only, no index addresses."""
    editable = [f"-e ./packages/{package}{DEV_EXTRAS.get(package, '')}" for package in PACKAGES]
    source = Path(session.create_tmp()) / "all.in"
    source.write_text("\n".join([*editable, DEV_REQUIREMENTS.read_text()]))
    session.chdir(ROOT)
    command = ["uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--no-emit-index-url"]
    command += [part for package in PACKAGES for part in ("--no-emit-package", package)]
    command += ["--python", sys.executable, "--universal", "--output-file", str(CONSTRAINTS), str(source)]
    session.run(*command, external=True, env={"UV_CUSTOM_COMPILE_COMMAND": "./dev lock", **_no_index(os.environ)})


def _no_index(environment: os._Environ[str]) -> dict[str, str]:
    """Keep a caller's private index out of the lock file."""
    return {name: "" for name in ("UV_EXTRA_INDEX_URL",) if name in environment}
