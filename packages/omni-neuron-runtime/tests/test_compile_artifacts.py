# SPDX-License-Identifier: Apache-2.0
"""The cache of compiled graphs, with stand-ins for the compiler."""

import multiprocessing
import os
import tarfile
import threading
import time

import pytest

from omni_neuron_runtime import COUNTERS, ArtifactCache, CompileError
from omni_neuron_runtime.compile.artifacts import content_key

FACTS = {"compiler_args": ["-a", "-b"], "target": "trn2", "world_size": 4}
KEY = content_key("graph", FACTS)


@pytest.fixture(autouse=True)
def _counts():
    COUNTERS.reset()


def never():
    raise AssertionError("compiled again")


def test_a_second_start_makes_nothing(tmp_path):
    first = ArtifactCache(tmp_path).module("dit", KEY, FACTS, lambda: "module {}")
    assert ArtifactCache(tmp_path).executable(first, "ab", lambda: b"code") == b"code"
    COUNTERS.reset()
    again = ArtifactCache(tmp_path, fail_on_miss=True)
    second = again.module("dit", KEY, FACTS, never)
    assert (second.text, second.key, second.meta) == (first.text, first.key, {"name": "dit", "facts": FACTS})
    assert again.executable(second, "ab", never) == b"code"
    assert (COUNTERS.lowerings, COUNTERS.compilations) == (0, 0)
    assert (COUNTERS.artifact_hits, COUNTERS.executable_hits) == (1, 1)


def test_keys():
    assert content_key("graph", dict(reversed(FACTS.items()))) == KEY
    changed = [("other", FACTS), *(("graph", {**FACTS, name: "changed"}) for name in FACTS)]
    assert len({KEY, *(content_key(*pair) for pair in changed)}) == 1 + len(changed)


def test_damaged_entries_are_made_anew(tmp_path, caplog):
    cache = ArtifactCache(tmp_path)
    artifact = cache.module("dit", KEY, FACTS, lambda: "module {}")
    cache.executable(artifact, "ab", lambda: b"code")
    for path, content in (
        (artifact.folder / "module.mlir", "module { }"),
        (artifact.folder / "meta.json", "{"),
        (tmp_path / "graphs" / KEY, "not a key"),
    ):
        path.write_text(content)
        assert cache.module("dit", KEY, FACTS, lambda: "module {}").text == "module {}"
        assert f"{path if path.name == KEY else path.parent} is damaged" in caplog.text
    (artifact.folder / "ab.bin").write_bytes(b"x" * 40)
    assert cache.executable(artifact, "ab", lambda: b"code") == b"code"
    assert cache.executable(artifact, "ab", never) == b"code"
    # Seen once before and once behind the lock, each.
    assert COUNTERS.corrupted == 8


def test_a_miss_can_be_fatal(tmp_path):
    cache = ArtifactCache(tmp_path, fail_on_miss=True)
    with pytest.raises(CompileError, match=rf"dit: StableHLO is not in the compile cache .*key {KEY}.*FAIL_ON_MISS"):
        cache.module("dit", KEY, FACTS, never)
    artifact = ArtifactCache(tmp_path).module("dit", KEY, FACTS, lambda: "module {}")
    with pytest.raises(CompileError, match=r"an executable for this kind of host \(ab\) is not in the compile cache"):
        cache.executable(artifact, "ab", never)


def test_one_compiles_and_the_others_wait(tmp_path):
    started, finish, results = threading.Event(), threading.Event(), []

    def slow():
        started.set()
        finish.wait(30)
        return "module {}"

    def ask(lower):
        results.append(ArtifactCache(tmp_path).module("dit", KEY, FACTS, lower).text)

    threads = [threading.Thread(target=ask, args=(slow,))]
    threads[0].start()
    started.wait(30)
    threads += [threading.Thread(target=ask, args=(never,)) for _ in range(3)]
    for thread in threads[1:]:
        thread.start()
    while COUNTERS.waits < 3:
        threads[1].join(0.01)
    with pytest.raises(CompileError, match=rf"another process \(id {os.getpid()}\) has compiled this graph for more"):
        ArtifactCache(tmp_path, wait_seconds=0).module("dit", KEY, FACTS, never)
    finish.set()
    for thread in threads:
        thread.join(30)
    assert results == ["module {}"] * 4
    assert (COUNTERS.lowerings, COUNTERS.artifact_hits) == (1, 3)


def start_an_engine(root, barrier, order, compiled):
    """What the backends ask of the cache for three graphs; what this process compiled goes into a file."""

    def make(what):
        def now():
            with compiled.open("a") as file:
                file.write(f"{what}\n")
            time.sleep(0.05)
            return what.encode() if what.startswith("code") else what

        return now

    barrier.wait(30)
    for index in order:
        cache, key = ArtifactCache(root, wait_seconds=30), content_key(f"graph {index}", FACTS)
        artifact = cache.module("dit", key, FACTS, make(f"module {index}"))
        assert artifact.text == f"module {index}"
        assert cache.executable(artifact, "ab", make(f"code {index}")) == f"code {index}".encode()
    os._exit(0 if COUNTERS.artifact_hits + COUNTERS.lowerings == 3 else 1)


def test_two_engines_that_start_at_once_compile_each_graph_once(tmp_path):
    fork = multiprocessing.get_context("fork")
    barrier, compiled = fork.Barrier(2), tmp_path / "compiled"
    orders = [(0, 1, 2), (2, 0, 1)]
    engines = [
        fork.Process(target=start_an_engine, args=(tmp_path / "cache", barrier, order, compiled)) for order in orders
    ]
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.join(60)
    assert [engine.exitcode for engine in engines] == [0, 0]
    assert sorted(compiled.read_text().split("\n")[:-1]) == [
        "code 0", "code 1", "code 2", "module 0", "module 1", "module 2"
    ]  # fmt: skip


def compile_for_ever(root, started):
    def lower():
        started.set()
        time.sleep(600)

    ArtifactCache(root).module("dit", KEY, FACTS, lower)


def test_a_killed_compiler_leaves_no_lock(tmp_path):
    fork = multiprocessing.get_context("fork")
    started = fork.Event()
    compiler = fork.Process(target=compile_for_ever, args=(tmp_path, started))
    compiler.start()
    assert started.wait(30)
    cache = ArtifactCache(tmp_path, wait_seconds=0)
    with pytest.raises(CompileError, match=rf"another process \(id {compiler.pid}\).*OMNI_NEURON_COMPILE_TIMEOUT_S"):
        cache.module("dit", KEY, FACTS, never)
    compiler.kill()
    compiler.join(30)
    assert cache.module("dit", KEY, FACTS, lambda: "module {}").text == "module {}"
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]


def test_a_failure_leaves_nothing(tmp_path):
    with pytest.raises(AssertionError, match="compiled again"):
        ArtifactCache(tmp_path).module("dit", KEY, FACTS, never)
    assert ArtifactCache(tmp_path).entries() == []
    assert ArtifactCache(tmp_path, wait_seconds=0).module("dit", KEY, FACTS, lambda: "module {}").text == "module {}"


def padded(index):
    return lambda: f"module {{}} // {index}" + " " * 1000


def fill(cache, count):
    for index in range(count):
        key = content_key(f"graph {index}", FACTS)
        artifact = cache.module(f"graph {index}", key, FACTS, padded(index))
        os.utime(artifact.folder, (index, index))


def test_the_least_recently_used_goes(tmp_path):
    fill(ArtifactCache(tmp_path), 3)
    limited = ArtifactCache(tmp_path, max_bytes=4 * 1200)
    limited.module("graph 0", content_key("graph 0", FACTS), FACTS, never)  # used again: now graph 1 is the oldest
    for index in (3, 4):
        limited.module("new", content_key(f"graph {index}", FACTS), FACTS, padded(index))
    assert sorted(entry["name"] for entry in limited.entries()) == ["graph 0", "graph 2", "new", "new"]
    assert len(list((tmp_path / "graphs").iterdir())) == 4


def test_list_and_remove(tmp_path):
    cache = ArtifactCache(tmp_path)
    assert cache.entries() == []
    fill(cache, 3)
    entries = cache.entries()
    assert [entry["name"] for entry in entries] == ["graph 2", "graph 1", "graph 0"]
    assert entries[0]["bytes"] > 1000
    assert cache.remove([entries[0]["key"][:12]]) == [entries[0]["key"]]
    assert len(cache.entries()) == 2
    with pytest.raises(ValueError, match=r"no module of .* has a key that starts with 'xyz'; it has 2"):
        cache.remove(["xyz"])


def test_export_and_import(tmp_path):
    source, target = ArtifactCache(tmp_path / "a"), ArtifactCache(tmp_path / "b")
    fill(source, 2)
    assert source.export(tmp_path / "cache.tar.gz") == 2
    assert target.import_(tmp_path / "cache.tar.gz") == 2
    assert target.import_(tmp_path / "cache.tar.gz") == 0
    assert target.module("graph 1", content_key("graph 1", FACTS), FACTS, never).text.startswith("module {} // 1")


def test_an_import_that_is_something_else(tmp_path):
    cache = ArtifactCache(tmp_path / "b")
    (tmp_path / "x").write_text("x")
    with tarfile.open(tmp_path / "strange.tar", "w") as archive:
        archive.add(tmp_path / "x", "../x")
    with pytest.raises(ValueError, match=r"is no export of a compile cache: it holds '../x'"):
        cache.import_(tmp_path / "strange.tar")
    folder = ArtifactCache(tmp_path / "a").module("dit", KEY, FACTS, lambda: "module {}").folder
    with tarfile.open(tmp_path / "damaged.tar", "w") as archive:
        archive.add(tmp_path / "x", f"modules/{folder.name}/module.mlir")
        archive.add(folder / "meta.json", f"modules/{folder.name}/meta.json")
    with pytest.raises(ValueError, match="is damaged; nothing was taken in"):
        cache.import_(tmp_path / "damaged.tar")
    assert cache.entries() == []
