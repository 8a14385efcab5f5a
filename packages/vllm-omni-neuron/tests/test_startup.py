# SPDX-License-Identifier: Apache-2.0
"""Worker processes end with the engine's process, also where that is killed and cannot stop them."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from vllm_omni_neuron import startup

# The worker ignores SIGTERM, as one does whose main thread waits in a collective.
ENGINE = """
import multiprocessing, signal, sys, time
from vllm_omni_neuron import startup

def worker(pipe):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    startup.ORPHAN_GRACE_S = 0.2
    startup.end_with_the_engine()
    pipe.send("ready")
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=worker, args=(writer,), daemon=True)
    process.start()
    reader.recv()
    print(process.pid, flush=True)
    time.sleep(600)
"""


def is_running(process: Path) -> bool:
    try:
        return "(zombie)" not in (process / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_worker_ends_with_an_engine_that_is_killed(tmp_path: Path, method: str) -> None:
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    engine = subprocess.Popen([sys.executable, str(script), method], stdout=subprocess.PIPE, text=True)
    try:
        assert engine.stdout is not None
        worker = Path("/proc") / engine.stdout.readline().strip()
        assert worker.name.isdigit() and worker.is_dir()
        engine.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 30
        while is_running(worker):
            assert time.monotonic() < deadline, f"the worker {worker.name} outlives its engine by 30 s"
            time.sleep(0.05)
    finally:
        engine.kill()
        engine.communicate()


def test_the_rendezvous_port_is_kept_for_rank_0() -> None:
    with socket.socket() as probe:  # does not listen either: nobody else is given the port meanwhile
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", 0))
        config = types.SimpleNamespace(master_port=probe.getsockname()[1])
        port = config.master_port
        keeper = contextlib.ExitStack()
        keeper.enter_context(startup.rendezvous_port(config))
    assert config.master_port == port
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    rank_0 = TCPStore("localhost", port, 1, is_master=True)
    keeper.close()
    rank_0.set("rank", "0")
    assert TCPStore("localhost", port, 1, is_master=False).get("rank") == b"0"


def test_a_rendezvous_port_that_was_taken_meanwhile_is_replaced() -> None:
    with socket.create_server(("", 0)) as other:
        config = types.SimpleNamespace(master_port=other.getsockname()[1])
        with startup.rendezvous_port(config):
            assert config.master_port != other.getsockname()[1]
            TCPStore("localhost", config.master_port, 1, is_master=True)
