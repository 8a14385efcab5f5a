# SPDX-License-Identifier: Apache-2.0
"""The cache of compiled graphs: one folder a module, shared by the ranks of a host and copied between hosts.

    <root>/graphs/<graph key>                 one line: the key of the module that this graph was lowered to
    <root>/modules/<key>/module.mlir          the StableHLO
    <root>/modules/<key>/meta.json            what it is, and the digest of module.mlir
    <root>/modules/<key>/<fingerprint>.bin    an executable for one kind of host, its digest before it
    <root>/locks/<graph key>                  held (flock) by the process that compiles

A graph key is known before lowering, a module's key only after it; the first leads to the second, so that a warm start
lowers nothing. A lock is the kernel's: it ends with the process that holds it, however that ends. Whatever is stored is
written beside its place and renamed into it, so a reader sees all of it or nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_neuron_runtime import env
from omni_neuron_runtime.compile.counters import COUNTERS
from omni_neuron_runtime.compile.errors import CompileError

logger = logging.getLogger(__name__)

MODULE, META = "module.mlir", "meta.json"
_KEY = re.compile(r"[0-9a-f]{64}")
_MEMBER = re.compile(rf"modules/{_KEY.pattern}/(module\.mlir|meta\.json)|graphs/{_KEY.pattern}")
_POLL_SECONDS = 0.05


def content_key(text: str, facts: Mapping[str, Any]) -> str:
    """SHA-256 over a text and what else decides what is made of it; 64 hex digits, the same in every process.

    Args:
        text: the module's, or the graph's.
        facts: JSON values: versions, compiler arguments, target, topology.
    """
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode())
    digest.update(text.encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Artifact:
    """One module of the cache.

    Attributes:
        key: of the module.
        folder: its folder.
        text: the StableHLO.
        meta: `name`, `facts` and whatever else was recorded.
    """

    key: str
    folder: Path
    text: str
    meta: dict[str, Any]


class ArtifactCache:
    """A folder of artifacts.

    Args:
        root: the folder; made when something is stored.
        max_bytes: the least recently used modules go when all of them are larger; None for no limit.
        wait_seconds: how long to wait for another process that compiles the same graph.
        fail_on_miss: refuse to compile.
    """

    def __init__(
        self, root: Path, *, max_bytes: int | None = None, wait_seconds: float = 1800.0, fail_on_miss: bool = False
    ):
        self.root, self.max_bytes, self.wait_seconds, self.fail_on_miss = root, max_bytes, wait_seconds, fail_on_miss

    @classmethod
    def from_environment(cls, root: str | Path | None = None) -> ArtifactCache:
        """The cache that the environment describes, or one of another folder with the same limits."""
        folder = root or env.get("OMNI_NEURON_COMPILE_CACHE_DIR") or Path.home() / ".cache" / "omni-neuron" / "compile"
        return cls(
            Path(folder),
            max_bytes=env.get("OMNI_NEURON_COMPILE_CACHE_GB") * 2**30,
            wait_seconds=env.get("OMNI_NEURON_COMPILE_TIMEOUT_S"),
            fail_on_miss=env.get("OMNI_NEURON_COMPILE_FAIL_ON_MISS"),
        )

    def module(self, name: str, graph_key: str, facts: Mapping[str, Any], lower: Callable[[], str]) -> Artifact:
        """The module of a graph: from the cache, or lowered now by this process while the others wait.

        Args:
            name: the graph's, for messages.
            graph_key: `content_key` of the graph before lowering.
            facts: what the module's own key covers besides its text.
            lower: makes the StableHLO.

        Raises:
            CompileError: a miss with `fail_on_miss`, or another process holds the lock beyond the deadline.
        """
        found = self._find(graph_key)
        if found is None:
            self._refuse_miss(name, graph_key, "StableHLO")
            with self._lock(graph_key, name):
                found = self._find(graph_key)
                if found is None:
                    text = lower()
                    COUNTERS.lowerings += 1
                    return self._store(name, graph_key, text, facts)
        COUNTERS.artifact_hits += 1
        os.utime(found.folder)  # this is what the size limit calls used
        return found

    def executable(self, artifact: Artifact, fingerprint: str, build: Callable[[], bytes]) -> bytes:
        """A module's executable for this kind of host: from the cache, or built now by one process.

        Args:
            artifact: the module.
            fingerprint: hex digits that name the kind of host and the compiler's version.
            build: compiles and serialises.

        Returns:
            What `build` returned, here or in another process.

        Raises:
            CompileError: as `module`.
        """
        path = artifact.folder / f"{fingerprint}.bin"
        name = str(artifact.meta["name"])
        payload = _read_checked(path)
        if payload is None:
            self._refuse_miss(name, artifact.key, f"an executable for this kind of host ({fingerprint})")
            with self._lock(artifact.key, name):
                payload = _read_checked(path)
                if payload is None:
                    payload = build()
                    COUNTERS.compilations += 1
                    artifact.folder.mkdir(parents=True, exist_ok=True)
                    _write(path, hashlib.sha256(payload).digest() + payload)
                    self._evict(keep=artifact.key)
                    return payload
        COUNTERS.executable_hits += 1
        return payload

    def entries(self) -> list[dict[str, Any]]:
        """What is in the cache: `key`, `name`, `bytes`, `used` (seconds since the epoch), `facts`; the latest first."""
        found = []
        for folder in self._folders():
            size = sum(path.stat().st_size for path in folder.iterdir())
            try:
                meta = json.loads((folder / META).read_text())
            except (OSError, ValueError):
                meta = {"name": "(damaged)", "facts": {}}
            used = folder.stat().st_mtime
            found.append({"key": folder.name, "bytes": size, "used": used, **meta})
        return sorted(found, key=lambda entry: -entry["used"])

    def remove(self, keys: Sequence[str]) -> list[str]:
        """Remove the modules whose keys start with one of `keys`.

        Returns:
            The full keys of what was removed.

        Raises:
            ValueError: a key that no module has.
        """
        present = [folder.name for folder in self._folders()]
        chosen: list[str] = []
        for key in keys:
            matching = [name for name in present if name.startswith(key)]
            if not matching:
                raise ValueError(f"no module of {self.root} has a key that starts with {key!r}; it has {len(present)}")
            chosen += [name for name in matching if name not in chosen]
        for key in chosen:
            shutil.rmtree(self.root / "modules" / key)
        self._forget_graphs()
        return chosen

    def export(self, path: Path) -> int:
        """Write every module (StableHLO, not the executables, which are a host's own) into a tar file.

        Returns:
            The number of modules.
        """
        keys = []
        with tarfile.open(path, "w:gz") as archive:
            for folder in self._folders():
                if self._load(folder.name) is None:
                    continue
                keys.append(folder.name)
                for name in (MODULE, META):
                    archive.add(folder / name, f"modules/{folder.name}/{name}")
            for graph in self._graphs():
                if graph.read_text() in keys:
                    archive.add(graph, f"graphs/{graph.name}")
        return len(keys)

    def import_(self, path: Path) -> int:
        """Take in the modules of a tar file that `export` wrote; those that are here already stay.

        Returns:
            The number of new modules.

        Raises:
            ValueError: the file holds something else, or a damaged module.
        """
        new = 0
        self.root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.root, prefix="import-") as staging, tarfile.open(path) as archive:
            strange = [m.name for m in archive if not m.isfile() or not _MEMBER.fullmatch(m.name)]
            if strange:
                raise ValueError(f"{path} is no export of a compile cache: it holds {strange[0]!r}")
            archive.extractall(staging, filter="data")
            staged = ArtifactCache(Path(staging))
            damaged = [folder.name for folder in staged._folders() if staged._load(folder.name) is None]
            if damaged:
                raise ValueError(f"{path}: the module {damaged[0]} is damaged; nothing was taken in")
            for folder in staged._folders():
                new += _move(folder, self.root / "modules" / folder.name)
            for graph in staged._graphs():
                _write(self.root / "graphs" / graph.name, graph.read_bytes())
        self._evict()
        return new

    def _find(self, graph_key: str) -> Artifact | None:
        index = self.root / "graphs" / graph_key
        try:
            key = index.read_text()
        except FileNotFoundError:
            return None
        if not _KEY.fullmatch(key):
            _say_damaged(index)
            return None
        return self._load(key)

    def _load(self, key: str) -> Artifact | None:
        folder = self.root / "modules" / key
        try:
            text, meta = (folder / MODULE).read_text(), json.loads((folder / META).read_text())
            intact = content_key(text, meta["facts"]) == key
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            intact = False
        if not intact:
            _say_damaged(folder)
            return None
        return Artifact(key, folder, text, meta)

    def _store(self, name: str, graph_key: str, text: str, facts: Mapping[str, Any]) -> Artifact:
        key = content_key(text, facts)
        folder = self.root / "modules" / key
        meta = {"name": name, "facts": dict(facts)}
        # Executables that stand beside a damaged module stay: they have digests of their own.
        _write(folder / MODULE, text.encode())
        _write(folder / META, json.dumps(meta, indent=1, sort_keys=True).encode())
        _write(self.root / "graphs" / graph_key, key.encode())
        self._evict(keep=key)
        return Artifact(key, folder, text, meta)

    def _refuse_miss(self, name: str, key: str, what: str) -> None:
        if self.fail_on_miss:
            raise CompileError(
                f"{name}: {what} is not in the compile cache {self.root} (key {key}) and "
                f"OMNI_NEURON_COMPILE_FAIL_ON_MISS=1 forbids to compile; copy a cache that has it here, or unset the "
                f"variable"
            )

    @contextlib.contextmanager
    def _lock(self, key: str, name: str) -> Iterator[None]:
        path = self.root / "locks" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+") as file:
            deadline, waiting = time.monotonic() + self.wait_seconds, False
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise CompileError(
                            f"{name}: another process (id {path.read_text().strip() or 'unknown'}) has compiled this "
                            f"graph for more than {self.wait_seconds:.0f} s (OMNI_NEURON_COMPILE_TIMEOUT_S) and holds "
                            f"{path}; the lock goes when that process ends"
                        ) from None
                    if not waiting:
                        waiting = True
                        COUNTERS.waits += 1
                        logger.info("waiting for another process that compiles %s", name)
                time.sleep(_POLL_SECONDS)
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def _evict(self, keep: str | None = None) -> None:
        if self.max_bytes is None:
            return
        entries = self.entries()
        total = sum(entry["bytes"] for entry in entries)
        for entry in reversed(entries):
            if total <= self.max_bytes:
                break
            if entry["key"] != keep:
                logger.info("the compile cache is over its limit: %s (%s) goes", entry["name"], entry["key"][:12])
                shutil.rmtree(self.root / "modules" / entry["key"], ignore_errors=True)
                total -= entry["bytes"]
        self._forget_graphs()

    def _forget_graphs(self) -> None:
        for graph in self._graphs():
            if not (self.root / "modules" / graph.read_text()).exists():
                graph.unlink(missing_ok=True)

    def _folders(self) -> list[Path]:
        modules = self.root / "modules"
        return sorted(path for path in modules.iterdir() if _KEY.fullmatch(path.name)) if modules.is_dir() else []

    def _graphs(self) -> list[Path]:
        graphs = self.root / "graphs"
        return sorted(path for path in graphs.iterdir() if _KEY.fullmatch(path.name)) if graphs.is_dir() else []


def _read_checked(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    digest, payload = content[:32], content[32:]
    if hashlib.sha256(payload).digest() != digest:
        _say_damaged(path)
        return None
    return payload


def _say_damaged(path: Path) -> None:
    COUNTERS.corrupted += 1
    logger.warning("%s is damaged and will be made anew", path)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not NamedTemporaryFile: a killed process would leave it, and its name would have to be told from a real one.
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    staging.write_bytes(content)
    staging.replace(path)


def _move(folder: Path, target: Path) -> bool:
    """Move a whole folder to its place unless something is there; whether it moved."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        return False
    folder.rename(target)
    return True
