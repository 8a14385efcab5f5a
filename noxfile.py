# SPDX-License-Identifier: Apache-2.0
"""Every task of this repository. `./dev <session>` runs one; `./dev help` lists them.

`dev`, `demo`, `docs`, `lint`, `run`, `test`, `tests` and `typing` share one environment (.nox/dev) in which every
package is installed editable, held to constraints.txt; `lock` writes that file. The others make their own, from built
wheels, the way users install: `alone`, `foreign`, `lowest`, `new_model`, `released`, `third_party`, `wheels`;
docs/releasing.md says what `release` and `api_diff` do. CONTRIBUTING.md has the ones for every day.
"""

from __future__ import annotations

import datetime
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent / "tools" / "packaging"))

from page_script import script
from release_steps import (
    ReleaseError,
    breaks_rules,
    dated_changelog,
    declared_siblings,
    git_tags,
    import_name_of,
    last_release,
    manifest_of,
    packages_in_order,
    release_tag,
    sdist_problems,
    wheel_problems,
)

nox.needs_version = ">=2024.10"
nox.options.default_venv_backend = "uv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "typing", "test"]

ROOT = Path(__file__).parent
# In the order in which they may import each other. A package is a folder of packages/ named as its distribution.
PACKAGES = packages_in_order(ROOT / "packages")
# Optional parts that development installs too, beside the extra `test` of every package that has one.
DEV_EXTRAS = {"omni-neuron-runtime": ("stablehlo",)}
MODELS = tuple(
    package
    for package in PACKAGES
    if "vllm_omni_neuron.models" in manifest_of(ROOT / "packages" / package)["project"].get("entry-points", {})
)
DEV_ENVIRONMENT = ROOT / ".nox" / "dev"
DEV_REQUIREMENTS = ROOT / "requirements-dev.txt"
CONSTRAINTS = ROOT / "constraints.txt"
DIST = ROOT / "dist"


def _package_dir(package: str) -> Path:
    if package not in PACKAGES:
        raise SystemExit(f"unknown package {package!r}; the packages are {', '.join(PACKAGES)}")
    return ROOT / "packages" / package


def _manifest(package: str) -> dict:
    return manifest_of(_package_dir(package))


def _import_name(package: str) -> str:
    return import_name_of(_manifest(package))


def _dev_requirement(package: str) -> str:
    """What development installs of a package, as a path: with its tests' dependencies."""
    offered = _manifest(package)["project"].get("optional-dependencies", {})
    extras = [name for name in ("test", *DEV_EXTRAS.get(package, ())) if name in offered]
    path = f"./packages/{package}"
    return f"{path}[{','.join(extras)}]" if extras else path


def _test_environment() -> dict[str, str]:
    """What every test process sees, whatever the caller's shell exports."""
    return {
        "VLLM_NEURON_CPU_MODE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        # Without bytecode files every process compiles vLLM's and torch's sources anew: 17 s each. Empty is unset.
        "PYTHONDONTWRITEBYTECODE": "",
    }


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
        editable = [part for package in PACKAGES for part in ("--editable", _dev_requirement(package))]
        session.chdir(ROOT)
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
    paths = [
        "tests",
        *(f"packages/{package}/tests" for package in reversed(PACKAGES)),
        "tools/shapes/tests",
        "tools/packaging/tests",
    ]
    # More at a time would not fit: several files start engines or pools of eight processes.
    side_by_side = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"] if (os.cpu_count() or 1) > 1 else []
    return ["--durations=25", *side_by_side, *paths]


@dev_session
@nox.parametrize("package", PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """One package's own tests in the development environment: ./dev "tests(package='omni-neuron-runtime')"."""
    Dev(session).run("pytest", str(_package_dir(package) / "tests"), *session.posargs, env=_test_environment())


@nox.session(default=False, reuse_venv=False)
@nox.parametrize("package", PACKAGES)
def alone(session: nox.Session, package: str) -> None:
    """Build one package's wheel, install it with its declared dependencies only, import it, run its own tests."""
    _build_wheels(session)
    wheel = _wheel_of(package)
    session.install("--constraint", str(CONSTRAINTS), "--find-links", str(DIST), f"{package}[test] @ {wheel.as_uri()}")
    _test_installed(session, package)


@nox.session(default=False, reuse_venv=False)
@nox.parametrize("package", PACKAGES)
def lowest(session: nox.Session, package: str) -> None:
    """As `alone`, with the lowest version of every dependency that the package itself declares."""
    _build_wheels(session)
    project = _manifest(package)["project"]
    # Lowest are the requirements on the command line only, so the package's own are put there, one by one.
    requirements = [*project["dependencies"], *project.get("optional-dependencies", {}).get("test", [])]
    session.install("--resolution", "lowest-direct", "--find-links", str(DIST), *requirements)
    session.install("--no-deps", str(_wheel_of(package)))
    session.run("uv", "pip", "list", external=True)
    _test_installed(session, package)


@nox.session(default=False, reuse_venv=False)
@nox.parametrize("package", PACKAGES)
def released(session: nox.Session, package: str) -> None:
    """One package from its source, its siblings from wheels of their last releases; run its own tests.

    A sibling that has no release yet is built from the working tree, and that is said.
    """
    if DIST.exists():
        shutil.rmtree(DIST)
    for sibling in sorted(_declared_siblings(package)):
        tag = last_release(sibling, git_tags(ROOT))
        source = _package_dir(sibling)
        if tag is None:
            session.log(f"{sibling} has no release: its wheel is built from the working tree")
        else:
            session.log(f"{sibling}: {tag}")
            folder = Path(session.create_tmp()) / tag
            folder.mkdir(parents=True, exist_ok=True)
            archive = folder / "source.tar"
            session.run(
                "git", "-C", str(ROOT), "archive", "-o", str(archive), tag, str(source.relative_to(ROOT)), external=True
            )
            shutil.unpack_archive(archive, folder)
            source = folder / source.relative_to(ROOT)
        session.run("uv", "build", "--quiet", "--wheel", "--out-dir", str(DIST), str(source), external=True)
    DIST.mkdir(exist_ok=True)
    _forget_cached(session, *_declared_siblings(package))
    session.install(
        "--constraint", str(CONSTRAINTS), "--find-links", str(DIST), "--editable", f"{_package_dir(package)}[test]"
    )
    _test_installed(session, package)


@nox.session(default=False, reuse_venv=False)
def third_party(session: nox.Session) -> None:
    """Install the plugin and a stranger's model from wheels, in a fresh environment; list it and generate with it."""
    _build_wheels(session)
    example = ROOT / "examples" / "third_party_model"
    session.run("uv", "build", "--quiet", "--wheel", "--out-dir", str(DIST), str(example), external=True)
    _forget_cached(session, "acme-toy-video")
    session.install("--constraint", str(CONSTRAINTS), "--find-links", str(DIST), "acme-toy-video")
    session.chdir(session.create_tmp())
    shutil.copy(example / "generate.py", ".")
    for command in (
        ["vllm-omni-neuron", "doctor"],
        ["vllm-omni-neuron", "models"],
        ["python", "-m", "acme_toy_video.tiny", "tiny"],
        ["python", "generate.py", "tiny"],
        ["python", "generate.py", "tiny", "--context-parallel"],
    ):
        session.run(*command, env=_test_environment())


@nox.session(default=False, reuse_venv=False)
@nox.parametrize("package", MODELS)
def foreign(session: nox.Session, package: str) -> None:
    """One model's wheel beside all others in a fresh environment: found, run with TP 2 and CP 2; it needs no other."""
    _build_wheels(session)
    others = [other for other in MODELS if other != package]
    session.install("--constraint", str(CONSTRAINTS), "--find-links", str(DIST), package, *others)
    session.chdir(session.create_tmp())
    shutil.copy(ROOT / "tools" / "packaging" / "generate_tiny.py", ".")
    environment = _test_environment()
    for command in (
        ["vllm-omni-neuron", "doctor"],
        ["vllm-omni-neuron", "models"],
        ["python", "-m", f"{_import_name(package)}.tiny", "tiny"],
        ["python", "generate_tiny.py", "tiny", package, "all.json", "tensor_parallel_size", "ring_degree"],
    ):
        session.run(*command, env=environment)
    for other in others:
        session.run("uv", "pip", "uninstall", other, external=True)
        session.run(
            "python", "generate_tiny.py", "tiny", package, "without.json", "tensor_parallel_size", env=environment
        )
        session.run("python", "generate_tiny.py", "--compare", "all.json", "without.json")
        session.log(f"{package} without {other}: the same models, the same pixels")
        session.install("--no-deps", str(_wheel_of(other)))


@nox.session(default=False, venv_backend="none")
def new_model(session: nox.Session) -> None:
    """docs/onboarding.md, run as it stands in an empty folder: a model package from the template, up to its wheel."""
    _build_wheels(session)
    folder = Path(session.create_tmp()).resolve() / "onboarding"
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    program = folder.parent / "onboarding.sh"
    program.write_text(script(ROOT / "docs" / "onboarding.md"))
    session.chdir(folder)
    environment = {name: value for name, value in _test_environment().items() if name != "VLLM_NEURON_CPU_MODE"}
    environment |= {"UV_FIND_LINKS": str(DIST), "UV_CONSTRAINT": str(CONSTRAINTS), "OMP_NUM_THREADS": "1"}
    session.run("bash", str(program), env=environment, external=True)


def _test_installed(session: nox.Session, package: str) -> None:
    """Import the installed package, see that no undeclared sibling came with it, and run its own tests."""
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
    return declared_siblings(ROOT / "packages", package)


def _build_wheels(session: nox.Session, packages: Sequence[str] = PACKAGES) -> None:
    if DIST.exists():
        shutil.rmtree(DIST)
    for package in packages:
        session.run("uv", "build", "--quiet", "--out-dir", str(DIST), str(_package_dir(package)), external=True)
    _forget_cached(session, *packages)


def _forget_cached(session: nox.Session, *distributions: str) -> None:
    """Make uv install the wheels of now: it keeps them by name and version, which stay the same between releases."""
    if distributions:  # with none it would forget everything
        session.run("uv", "cache", "clean", "--quiet", *distributions, external=True)


def _wheel_of(package: str) -> Path:
    [wheel] = DIST.glob(f"{package.replace('-', '_')}-*.whl")
    return wheel


@nox.session(default=False, reuse_venv=False)
def wheels(session: nox.Session) -> None:
    """Build every wheel and source archive into dist/; check metadata and contents."""
    session.install("twine>=6")
    _build_wheels(session)
    _check_built(session, PACKAGES)


def _check_built(session: nox.Session, packages: Sequence[str]) -> None:
    archives = [*DIST.glob("*.whl"), *DIST.glob("*.tar.gz")]
    session.run("twine", "check", "--strict", *map(str, sorted(archives)))
    for package in packages:
        [sdist] = DIST.glob(f"{package.replace('-', '_')}-*.tar.gz")
        folder, wheel = _package_dir(package), _wheel_of(package)
        problems = [*wheel_problems(wheel, folder, PACKAGES), *sdist_problems(sdist, folder)]
        if problems:
            session.error(f"{wheel.name}:\n  " + "\n  ".join(problems))
        session.log(f"{wheel.name}: contents, metadata and entry points as declared")


@nox.session(default=False)
@nox.parametrize("package", PACKAGES)
def api_diff(session: nox.Session, package: str) -> None:
    """What changed in a package's public interface since its last release and would break its users."""
    session.install("griffe>=2")
    _api_diff(session, package)


def _api_diff(session: nox.Session, package: str, new_version: str | None = None) -> None:
    """Print the breaking changes; with `new_version`, fail where that version may not have any."""
    tag = last_release(package, git_tags(ROOT))
    if tag is None:
        session.log(
            f"{package} has no release (no tag {release_tag(package, '<version>')}): there is nothing to compare"
        )
        return
    refusal = new_version and breaks_rules(tag.removeprefix(release_tag(package, "")), new_version)
    if refusal:
        session.log(refusal)
    session.run(
        "griffe", "check", _import_name(package), "--search", f"packages/{package}/src", "--against", tag,
        success_codes=[0] if refusal else [0, 1],
    )  # fmt: skip


@nox.session(default=False)
@nox.parametrize("package", PACKAGES)
def release(session: nox.Session, package: str) -> None:
    """Make one package ready to publish: `./dev "release(package='omni-neuron-kernels')" minor`.

    The argument is what `hatchling version` takes; without one the present version is released. See docs/releasing.md.
    """
    folder = _package_dir(package)
    session.install("griffe>=2", "hatchling>=1.26", "twine>=6")
    git = ["git", "-C", str(ROOT)]
    if session.run(*git, "status", "--porcelain", "--", str(folder), external=True, silent=True):
        session.error(f"packages/{package} has changes that are not committed")
    try:
        version = _make_release(session, package)
    except BaseException:  # whatever it is ends the session with its own message; the files are as they were
        session.run(*git, "checkout", "--quiet", "--", str(folder), external=True)
        raise
    tag = release_tag(package, version)
    session.log(
        f'ready. Then: git commit -m "{package}: {version}" -- packages/{package}; git tag {tag}; uv publish dist/*'
    )


def _make_release(session: nox.Session, package: str) -> str:
    """Set version and changelog, check the interface, build; the version."""
    folder = _package_dir(package)
    session.chdir(folder)
    if session.posargs:
        session.run("hatchling", "version", *session.posargs)
    version = str(session.run("hatchling", "version", silent=True)).strip()
    session.chdir(ROOT)
    if release_tag(package, version) in git_tags(ROOT):
        session.error(f"{package} {version} is released already; name patch, minor or major")
    changelog = folder / "CHANGELOG.md"
    try:
        changelog.write_text(dated_changelog(changelog.read_text(), version, datetime.date.today()))
    except ReleaseError as error:
        session.error(str(error))
    _api_diff(session, package, version)
    _build_wheels(session, [package])
    _check_built(session, [package])
    return version


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
    """Write the generated pages of docs/ (`--check` only compares); CONTRIBUTING.md says what is written by hand."""
    development = Dev(session)
    development.run("python", "-m", "omni_neuron_runtime.env", "docs/environment.md", *session.posargs)
    development.run("python", "-m", "vllm_omni_neuron.stage_config", "docs/stage-configuration.md", *session.posargs)
    development.run("python", "tools/sdk_reference.py", "docs/sdk.md", *session.posargs)
    development.run("python", "tools/support_matrix.py", "docs/support-matrix.md", *session.posargs)


@nox.session(default=False)
def lock(session: nox.Session) -> None:
    """Compile constraints.txt anew: names and versions only, no index addresses."""
    editable = [f"-e {_dev_requirement(package)}" for package in PACKAGES]
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
