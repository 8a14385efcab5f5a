# SPDX-License-Identifier: Apache-2.0
"""Start-up, death and clean-up of workers, without an engine."""

from __future__ import annotations

import concurrent.futures
import multiprocessing as mp
import os
import secrets
import signal
import socket
import threading
import time
import types
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni_neuron import (
    WorkerDiedError,
    WorkerStartupError,
    executor,
    preflight,
    rank_reports,
    shared_memory,
    startup,
)

SPAWN = mp.get_context("spawn")
# This process's own: `worker_main` adopts it.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}


class FakeProcess:
    """A process that ended, or did not."""

    def __init__(self, exitcode: int | None = None, pid: int = 41) -> None:
        self.exitcode, self.pid, self.name = exitcode, pid, "DiffusionWorker"

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        pass


@pytest.fixture
def pipes() -> list[tuple[Connection, Connection]]:
    return [mp.Pipe(duplex=False) for _ in range(2)]


def wait(pipes: list[tuple[Connection, Connection]], timeout_s: float = 5.0, exitcode: int | None = None) -> list[Any]:
    processes: Any = [FakeProcess(exitcode) for _ in pipes]
    return executor.wait_until_ready(processes, [reader for reader, _ in pipes], timeout_s)


def sleeping_process() -> Any:
    process = SPAWN.Process(target=time.sleep, args=(60,), daemon=True)
    process.start()
    return process


def test_ready_in_any_order(pipes: list[tuple[Connection, Connection]]) -> None:
    for rank in (1, 0):
        pipes[rank][1].send({"status": "phase", "phase": startup.LOADING, "limit_s": None})
        pipes[rank][1].send({"status": "ready", "result_handle": f"handle {rank}"})
    assert wait(pipes) == ["handle 0", "handle 1"]


def test_a_workers_own_error_reaches_the_engine(pipes: list[tuple[Connection, Connection]]) -> None:
    pipes[1][1].send({"status": "phase", "phase": startup.LOADING, "limit_s": None})
    pipes[1][1].send({"status": "error", "error": "ValueError: no vae folder", "traceback": "…"})
    with pytest.raises(WorkerStartupError, match="rank 1 failed while loading the model: ValueError: no vae folder"):
        wait(pipes)


def test_a_late_worker_is_named_with_its_phase(pipes: list[tuple[Connection, Connection]]) -> None:
    pipes[0][1].send({"status": "ready", "result_handle": 0})
    pipes[1][1].send({"status": "phase", "phase": startup.DEVICE, "limit_s": None})
    with pytest.raises(WorkerStartupError, match=r"in 0.2 s .*: rank 1 is still initialising its device"):
        wait(pipes, timeout_s=0.2)


def test_a_phase_with_its_own_limit_is_not_the_start_ups(pipes: list[tuple[Connection, Connection]]) -> None:
    """A compilation that takes longer than the start-up may is no failure, and has an end as well."""
    for _, worker in pipes:
        worker.send({"status": "phase", "phase": "compiling for 480×832×81", "limit_s": 60.0})
    ready = threading.Timer(1.0, lambda: [worker.send({"status": "ready", "result_handle": 0}) for _, worker in pipes])
    ready.start()
    assert wait(pipes, timeout_s=0.5) == [0, 0]
    ready.join()
    pipes[0][1].send({"status": "ready", "result_handle": 0})
    pipes[1][1].send({"status": "phase", "phase": "compiling for 480×832×81", "limit_s": 0.2})
    with pytest.raises(WorkerStartupError, match=r"ready in 0.2 s: rank 1 is still compiling for 480×832×81$"):
        wait(pipes, timeout_s=60.0)
    # What was left of the start-up's time goes on afterwards.
    pipes[0][1].send({"status": "ready", "result_handle": 0})
    for phase, limit in (("compiling for 480×832×81", 60.0), (startup.LOADING, None)):
        pipes[1][1].send({"status": "phase", "phase": phase, "limit_s": limit})
    with pytest.raises(WorkerStartupError, match=r"in 0.3 s \(OMNI_.*: rank 1 is still loading the model$"):
        wait(pipes, timeout_s=0.3)


def test_a_worker_that_dies_while_it_starts(pipes: list[tuple[Connection, Connection]]) -> None:
    pipes[1][1].close()
    with pytest.raises(WorkerStartupError, match=r"rank 1 \(pid 41\) was killed by SIGKILL .* while starting"):
        wait(pipes, exitcode=-9)


@pytest.mark.parametrize(
    ("exitcode", "text"),
    [
        (-9, "was killed by SIGKILL (exit code -9)"),
        (-11, "was killed by SIGSEGV (exit code -11)"),
        (3, "exited with code 3"),
    ],
)
def test_exit_codes(exitcode: int, text: str) -> None:
    assert executor.describe_exit(exitcode) == text


def test_worker_main_sends_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_omni.diffusion.worker import WorkerProc

    def fail(rank: int, od_config: Any, pipe: Any, *rest: Any) -> None:
        startup.report_phase(startup.LOADING)
        raise ValueError(f"rank {rank} cannot load {od_config}")

    monkeypatch.setattr(WorkerProc, "worker_main", fail)
    monkeypatch.setattr("vllm_omni_neuron.compat.name_shared_memory", lambda prefix: None)
    monkeypatch.setattr(startup, "_pipe", None)
    reader, writer = mp.Pipe(duplex=False)
    with pytest.raises(SystemExit):
        startup.worker_main(1, writer, "prefix", ENVIRONMENT, "the model")
    assert reader.recv() == {"status": "phase", "phase": startup.LOADING, "limit_s": None}
    message = reader.recv()
    assert message["error"] == "ValueError: rank 1 cannot load the model"
    assert "Traceback" in message["traceback"]


def test_workers_start_with_the_models_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the profile says and the user has not set; the engine's own environment is as before."""
    monkeypatch.delenv("NEURON_SCRATCHPAD_PAGE_SIZE", raising=False)
    monkeypatch.delenv("NEURON_RT_ROOT_COMM_ID", raising=False)
    monkeypatch.setenv("NEURON_VISIBLE_DEVICES", "6-7")
    given: list[dict[str, str]] = []

    class Context:
        Pipe = staticmethod(mp.Pipe)

        def Process(self, args: tuple[Any, ...], **rest: Any) -> FakeProcess:  # noqa: N802
            given.append(args[3])
            raise ValueError("not started")

    monkeypatch.setattr(startup, "worker_context", Context)
    config = types.SimpleNamespace(num_gpus=2, model_class_name="ToyPipeline", worker_extension_cls=None, master_port=0)
    engine: Any = object.__new__(executor.NeuronMultiprocExecutor)
    engine.od_config, engine._shm_prefix = config, "prefix"
    with pytest.raises(ValueError, match="not started"):
        engine._launch_workers(None, [None, None])
    assert given[0]["NEURON_SCRATCHPAD_PAGE_SIZE"] == "2048"
    assert "NEURON_SCRATCHPAD_PAGE_SIZE" not in os.environ
    assert "NEURON_RT_ROOT_COMM_ID" not in given[0]  # in CPU mode there is no such runtime

    monkeypatch.setattr("omni_neuron_runtime.is_cpu_mode", lambda: False)
    with pytest.raises(ValueError, match="not started"):
        engine._launch_workers(None, [None, None])
    host, _, port = given[1]["NEURON_RT_ROOT_COMM_ID"].partition(":")
    assert host == "localhost" and int(port) % 256 == (61234 + 6) % 256
    assert "NEURON_RT_ROOT_COMM_ID" not in os.environ


def test_the_port_of_the_root_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines on other cores have other ports, one that is taken is passed over, and the user's own stays."""
    monkeypatch.setattr("omni_neuron_runtime.is_cpu_mode", lambda: False)
    monkeypatch.delenv("NEURON_RT_ROOT_COMM_ID", raising=False)

    def ports(cores: str) -> set[int]:
        monkeypatch.setenv("NEURON_VISIBLE_DEVICES", cores)
        with preflight.root_communicator(2):
            first = int(os.environ["NEURON_RT_ROOT_COMM_ID"].partition(":")[2])
            with socket.create_server(("", first)), pytest.MonkeyPatch.context() as patch:
                patch.delenv("NEURON_RT_ROOT_COMM_ID")
                with preflight.root_communicator(2):
                    return {first, int(os.environ["NEURON_RT_ROOT_COMM_ID"].partition(":")[2])}

    assert len(ports("0-7") | ports("8-15")) == 4
    monkeypatch.setenv("NEURON_RT_ROOT_COMM_ID", "10.0.0.1:5")
    with preflight.root_communicator(2):
        assert os.environ["NEURON_RT_ROOT_COMM_ID"] == "10.0.0.1:5"


def test_one_rank_has_the_models_environment_while_its_engine_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_omni.diffusion.executor.uniproc_executor import UniProcDiffusionExecutor

    monkeypatch.delenv("NEURON_SCRATCHPAD_PAGE_SIZE", raising=False)
    monkeypatch.setattr(preflight, "check_world_size", lambda od_config: None)
    monkeypatch.setattr(UniProcDiffusionExecutor, "shutdown", lambda self: None)
    engine: Any = object.__new__(executor.NeuronUniProcExecutor)
    engine.od_config = types.SimpleNamespace(num_gpus=1, model_class_name="ToyPipeline", master_port=0)

    def fail(self: Any) -> None:
        raise RuntimeError("no weights")

    monkeypatch.setattr(UniProcDiffusionExecutor, "_init_executor", fail)
    with pytest.raises(RuntimeError, match="no weights"):
        engine._init_executor()
    assert "NEURON_SCRATCHPAD_PAGE_SIZE" not in os.environ

    monkeypatch.setattr(UniProcDiffusionExecutor, "_init_executor", lambda self: None)
    engine._init_executor()
    assert os.environ["NEURON_SCRATCHPAD_PAGE_SIZE"] == "2048"
    for _ in range(2):
        engine.shutdown()
        assert "NEURON_SCRATCHPAD_PAGE_SIZE" not in os.environ


def test_worker_main_after_ready_is_vllm_omnis_own_and_reports_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_omni.diffusion.worker import WorkerProc

    def run(rank: int, od_config: Any, pipe: Any, *rest: Any) -> None:
        pipe.send({"status": "ready", "result_handle": rank})
        startup.report_phase("never sent")
        with rank_reports.reported("request 7"):
            pass
        raise ValueError("later")

    monkeypatch.setattr(WorkerProc, "worker_main", run)
    monkeypatch.setattr("vllm_omni_neuron.compat.name_shared_memory", lambda prefix: None)
    monkeypatch.setattr(startup, "_pipe", None)
    reader, writer = mp.Pipe(duplex=False)
    with pytest.raises(ValueError, match="later"):
        startup.worker_main(0, writer, "prefix", ENVIRONMENT, "the model")
    assert reader.recv()["status"] == "ready"
    assert reader.recv()["request"] == "request 7"
    assert not reader.poll()


def test_stop_processes_escalates() -> None:
    process = sleeping_process()
    started = time.monotonic()
    assert executor.stop_processes([process], (0.0, 10.0, 10.0)) == []
    assert time.monotonic() - started < 10
    assert process.exitcode == -signal.SIGTERM


def test_shared_memory_of_killed_workers_is_removed() -> None:
    from multiprocessing.shared_memory import SharedMemory

    prefix = f"omnxtest{secrets.token_hex(3)}_"
    segment = SharedMemory(name=f"{prefix}1_aa", create=True, size=64)
    segment.close()
    assert executor.remove_shared_memory(prefix) == [f"{prefix}1_aa"]
    assert not list(Path("/dev/shm").glob(f"{prefix}*"))
    assert executor.remove_shared_memory(prefix) == []


class FakeBroadcast:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def enqueue(self, message: Any, timeout: float | None = None) -> None:
        self.sent.append(message)


def running_executor(*processes: Any) -> executor.NeuronMultiprocExecutor:
    """An executor as `_init_executor` leaves it, around these processes."""
    self = executor.NeuronMultiprocExecutor.__new__(executor.NeuronMultiprocExecutor)
    self.od_config = types.SimpleNamespace(num_gpus=len(processes), step_execution=False)
    self._processes = list(processes)
    self._closed = self._is_failed = False
    self._failure_callbacks = []
    self._futures_lock = threading.RLock()
    self._rpc_futures, self._output_futures, self._completed_outputs = {}, {}, {}
    self._batch_split_map, self._dropped_output_ids = {}, {}
    self._rpc_id_counter, self._rpc_id_lock = 0, threading.Lock()
    self._pump_stop = threading.Event()
    self._broadcast_mq = self._result_mq = FakeBroadcast()
    self._shutdown_cleaner = executor.WorkerCleaner(self._broadcast_mq, self._processes, f"omnx{secrets.token_hex(4)}")
    self._finalizer = types.SimpleNamespace(alive=False)
    self.wake_events = [object()]
    return self


def test_a_killed_worker_fails_what_waits_and_stops_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "FAILURE_GRACE_S", (0.1, 5.0, 5.0))
    victim, survivor = sleeping_process(), sleeping_process()
    self = running_executor(survivor, victim)
    output: concurrent.futures.Future[Any] = concurrent.futures.Future()
    self._output_futures["id"] = output
    told = threading.Event()
    self.register_failure_callback(told.set)
    self._start_worker_monitor()
    errors: list[BaseException] = []

    def call() -> None:
        try:
            self.collective_rpc("execute_model", timeout=30.0, unique_reply_rank=0, exec_all_ranks=True)
        except BaseException as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    while not self._rpc_futures:
        time.sleep(0.01)
    os.kill(victim.pid, signal.SIGKILL)
    caller.join(10)
    message = rf"diffusion worker rank 1 \(pid {victim.pid}\) was killed by SIGKILL \(exit code -9\); world size 2"
    with pytest.raises(WorkerDiedError, match=message):
        raise errors[0]
    with pytest.raises(WorkerDiedError, match="rank 1"):
        output.result(timeout=5)
    assert told.wait(10)
    assert not survivor.is_alive()
    assert self.is_dead
    assert self.wake_events == []
    with pytest.raises(EngineDeadError) as dead:
        self.check_health()
    assert "rank 1" in str(dead.value)
    with pytest.raises(WorkerDiedError, match="rank 1"):
        self.collective_rpc("anything")


def test_a_peers_broken_connection_is_explained_by_the_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """The survivors' own error may arrive first and only says that a connection broke."""
    victim, survivor = sleeping_process(), sleeping_process()
    self = running_executor(victim, survivor)
    monkeypatch.setattr(executor, "FAILURE_GRACE_S", (0.1, 5.0, 5.0))

    def broken(*_: Any, **__: Any) -> None:
        os.kill(victim.pid, signal.SIGKILL)
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(executor.MultiprocDiffusionExecutor, "collective_rpc", broken)
    self._start_worker_monitor()
    with pytest.raises(WorkerDiedError, match=r"rank 0 .* was killed by SIGKILL"):
        self.collective_rpc("execute_model")


def test_an_ordinary_error_stays_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    process = sleeping_process()
    self = running_executor(process)
    monkeypatch.setattr(executor, "DEATH_NEWS_S", 0.1)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("height must be positive")

    monkeypatch.setattr(executor.MultiprocDiffusionExecutor, "collective_rpc", fail)
    with pytest.raises(RuntimeError, match="height must be positive"):
        self.collective_rpc("execute_model")
    process.kill()


@pytest.mark.parametrize(("variable", "expected"), [(None, executor.REQUEST_TIMEOUT_S), ("5", 600.0)])
def test_a_request_has_vllm_omnis_deadline_only_where_it_is_set(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, expected: float
) -> None:
    monkeypatch.delenv(executor.REQUEST_TIMEOUT_VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(executor.REQUEST_TIMEOUT_VARIABLE, variable)
    monkeypatch.setattr(
        executor.MultiprocDiffusionExecutor, "collective_rpc", lambda _self, method, timeout, *_: (method, timeout)
    )
    self = running_executor()
    assert self.collective_rpc("execute_model", timeout=600.0) == ("execute_model", expected)
    assert self.collective_rpc("list_loras", timeout=3.0) == ("list_loras", 3.0)


# Preflight


def configuration(world: int, **sizes: int) -> Any:
    return types.SimpleNamespace(num_gpus=world, parallel_config=types.SimpleNamespace(**sizes))


@pytest.mark.parametrize(("visible", "world", "fits"), [("0-3", 4, True), ("0-3", 2, False), ("0,7", 4, False)])
def test_world_size_against_visible_devices(
    monkeypatch: pytest.MonkeyPatch, visible: str, world: int, fits: bool
) -> None:
    monkeypatch.setenv("NEURON_VISIBLE_DEVICES", visible)
    od_config = configuration(world, tensor_parallel_size=world)
    if fits:
        preflight.check_world_size(od_config)
        return
    with pytest.raises(ValueError, match=rf"world size {world} \(tensor_parallel_size {world}\) does not match the"):
        preflight.check_world_size(od_config)


def test_world_size_against_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_neuron_runtime.device_count", lambda: 4)
    with pytest.raises(ValueError, match=r"world size 8 .* needs 8 devices, this machine has 4"):
        preflight.check_world_size(configuration(8, tensor_parallel_size=4, cfg_parallel_size=2))


def test_logical_cores_of_another_size_are_refused_before_a_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_NEURON_CPU_MODE")
    for name, value in (("PLATFORM_TARGET_OVERRIDE", "trn2"), ("VISIBLE_DEVICES", "0"), ("LOGICAL_NC_CONFIG", "1")):
        monkeypatch.setenv(f"NEURON_{name}", value)
    with pytest.raises(ValueError, match="NEURON_LOGICAL_NC_CONFIG=1 is not supported on trn2: valid is 2"):
        preflight.check_world_size(configuration(1))


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "data_parallel_size"])
def test_axes_without_a_layout_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} 2 is not supported"):
        preflight.check_world_size(configuration(2, **{name: 2}))


def shm_of(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shared_memory, "space", lambda: shared_memory.Space(free, 64 << 20))


def test_shared_memory_too_small(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    shm_of(monkeypatch, 8 << 20)
    with pytest.raises(RuntimeError, match=r"/dev/shm has 8 MiB free of 64 MiB.*--shm-size=2g"):
        preflight.check_shared_memory()
    shm_of(monkeypatch, 60 << 20)
    preflight.check_shared_memory()
    assert "60 MiB free" in caplog.text
    caplog.clear()
    shm_of(monkeypatch, 4 << 30)
    preflight.check_shared_memory()
    assert not caplog.records


def test_threads_are_shared_among_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.os, "sched_getaffinity", lambda _: range(6))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [preflight.threads_per_worker(world) for world in (1, 2, 4, 16)] == [6, 3, 1, 1]
    with preflight.worker_environment(2):
        assert os.environ["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in os.environ
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    with preflight.worker_environment(2):
        assert os.environ["OMP_NUM_THREADS"] == "5"
    assert os.environ["OMP_NUM_THREADS"] == "5"
