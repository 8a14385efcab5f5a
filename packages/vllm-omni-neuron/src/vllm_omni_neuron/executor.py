# SPDX-License-Identifier: Apache-2.0
"""The multi-process executor: vLLM-Omni's, with workers that are named when they die, fail or hang."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.connection
import os
import secrets
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.diffusion.executor.multiproc_executor import MultiprocDiffusionExecutor
from vllm_omni.diffusion.executor.uniproc_executor import UniProcDiffusionExecutor
from vllm_omni.diffusion.utils.future_utils import try_set_exception

import omni_neuron_runtime as runtime
from vllm_omni_neuron import preflight, startup
from vllm_omni_neuron.rank_reports import RankReports

logger = logging.getLogger(__name__)

# Seconds that workers get to end by themselves, after SIGTERM, and after SIGKILL. After a death nobody waits long:
# the survivors may sit in a collective that nothing interrupts, and what they leave is removed here anyway.
# SIGKILL always works, but on a busy machine the kernel needs seconds to take a large process apart.
NORMAL_GRACE_S = (15.0, 5.0, 8.0)
FAILURE_GRACE_S = (2.0, 1.0, 8.0)
# A worker's peers often notice its death before the engine does; a failed request waits this long for the news.
DEATH_NEWS_S = 1.0

# vLLM-Omni gives a request 600 s, which a first request that compiles or a long video exceeds. Deaths and collectives
# have deadlines of their own; this one is for a rank that computes for ever. vLLM-Omni's variable still decides if set.
REQUEST_TIMEOUT_S = 24 * 3600.0
REQUEST_TIMEOUT_VARIABLE = "VLLM_OMNI_DLO_DP_WAVE_TIMEOUT"
REQUEST_METHODS = ("execute_model", "execute_model_batch", "execute_stepwise")


class WorkerDiedError(RuntimeError):
    """The engine has stopped because of a worker, which the message names with its rank.

    Its process ended without being told to (the message has signal or exit code), or it failed in a request that other
    ranks are still in (the message has its error).
    """


class WorkerStartupError(RuntimeError):
    """A worker did not become ready. The message names rank, phase and the worker's own error."""


def describe_exit(exitcode: int | None) -> str:
    """`was killed by SIGKILL (exit code -9)` or `exited with code 3`."""
    if exitcode is None or exitcode >= 0:
        return f"exited with code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    return f"was killed by {name} (exit code {exitcode})"


def stop_processes(processes: Sequence[BaseProcess], grace_s: tuple[float, float, float]) -> list[BaseProcess]:
    """Wait for `processes` to end, then send SIGTERM, then SIGKILL; returns those that are still alive."""
    alive = [process for process in processes if process.is_alive()]
    for action, seconds in zip((None, "terminate", "kill"), grace_s, strict=True):
        if action is not None:
            for process in alive:
                logger.warning("sending %s to diffusion worker %s (pid %s)", action, process.name, process.pid)
                getattr(process, action)()
        deadline = time.monotonic() + seconds
        for process in alive:
            process.join(max(0.0, deadline - time.monotonic()))
        alive = [process for process in alive if process.is_alive()]
        if not alive:
            break
    return alive


def remove_shared_memory(prefix: str) -> list[str]:
    """Remove the segments `/dev/shm/<prefix>*`, which killed workers leave; returns their names."""
    from multiprocessing.shared_memory import SharedMemory

    removed = []
    for path in sorted(Path("/dev/shm").glob(f"{prefix}*")):
        try:
            # Attaching registers it with the resource tracker, which workers share with us, and unlinking forgets it.
            segment = SharedMemory(name=path.name)
        except FileNotFoundError:
            continue
        segment.close()
        segment.unlink()
        removed.append(path.name)
    return removed


class WorkerCleaner:
    """Stops the workers and removes what they leave. Called again, it waits for the first call and retries the rest.

    vLLM-Omni's own returns at once while another thread cleans up; the caller's process may then end, and hang, with
    workers alive.
    """

    def __init__(self, broadcast_mq: Any, processes: list[BaseProcess], shm_prefix: str) -> None:
        self.broadcast_mq = broadcast_mq
        self.processes = processes
        self.shm_prefix = shm_prefix
        self.failed = False
        self._lock = threading.Lock()

    def __call__(self) -> None:
        """Stop whatever still runs; safe from several threads."""
        with self._lock:
            if self.broadcast_mq is not None:
                self._say_goodbye()
            self.processes = stop_processes(self.processes, FAILURE_GRACE_S if self.failed else NORMAL_GRACE_S)
            if self.processes:
                logger.error("diffusion workers survive SIGKILL: %s", [process.pid for process in self.processes])
            removed = remove_shared_memory(self.shm_prefix)
            if removed:
                logger.info("removed shared memory that workers left: %s", ", ".join(removed))

    def _say_goodbye(self) -> None:
        from vllm_omni.diffusion.data import SHUTDOWN_MESSAGE

        mq, self.broadcast_mq = self.broadcast_mq, None
        try:
            mq.enqueue(SHUTDOWN_MESSAGE, timeout=1.0)
        except Exception as error:
            logger.warning("could not ask the workers to stop: %s", error)


class NeuronMultiprocExecutor(MultiprocDiffusionExecutor):
    """One process per rank.

    The configuration is checked against the machine before any process starts. A worker that fails or hangs while it
    starts, dies later, or fails in a request that others are still in, ends the engine with an error that names it;
    nothing of the engine is left behind.
    """

    failure_reason: str | None = None
    _reports = RankReports()

    def _init_executor(self) -> None:
        preflight.check_world_size(self.od_config)
        preflight.check_shared_memory()
        # Unique per engine, and short: a name's length is limited.
        self._shm_prefix = f"omnx{os.getpid():x}{secrets.token_hex(3)}_"
        try:
            super()._init_executor()
        except BaseException:
            self._abandon_start()
            raise
        self._finalizer.detach()  # type: ignore[has-type]
        self._shutdown_cleaner = WorkerCleaner(self._broadcast_mq, self._processes, self._shm_prefix)
        self._shutdown_cleaner.failed = self._is_failed
        self._finalizer = weakref.finalize(self, self._shutdown_cleaner)

    def _abandon_start(self) -> None:
        """Let go of the broadcast queue, whose shared memory lives as long as anyone refers to it."""
        broadcast_mq = getattr(self, "_broadcast_mq", None)
        if broadcast_mq is not None:
            broadcast_mq.shutdown()
        self._broadcast_mq = None
        remove_shared_memory(self._shm_prefix)

    # Start-up

    def _launch_workers(self, broadcast_handle: Any, wake_events: list[Any]) -> tuple[list[BaseProcess], list[Any]]:
        """Start all workers and wait until each is ready.

        Raises:
            WorkerStartupError: one failed, ended or was not ready in OMNI_NEURON_STARTUP_TIMEOUT_S seconds.
        """
        od_config = self.od_config
        world = cast(int, od_config.num_gpus)
        context = startup.worker_context()
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        try:
            with startup.rendezvous_port(od_config):
                with (
                    preflight.worker_environment(world),
                    preflight.model_environment(od_config),
                    preflight.root_communicator(world),
                ):
                    for rank in range(world):
                        reader, writer = context.Pipe(duplex=False)
                        arguments = (
                            rank,
                            writer,
                            f"{self._shm_prefix}{rank}_",
                            dict(os.environ),
                            od_config,
                            broadcast_handle,
                            wake_events[rank],
                            od_config.worker_extension_cls,
                            getattr(od_config, "custom_pipeline_args", None),
                        )
                        process = context.Process(
                            target=startup.worker_main, args=arguments, name=f"DiffusionWorker-{rank}", daemon=True
                        )
                        process.start()
                        writer.close()
                        processes.append(process)
                        pipes.append(reader)
                timeout_s = float(runtime.env.get("OMNI_NEURON_STARTUP_TIMEOUT_S"))
                handles = wait_until_ready(processes, pipes, timeout_s)
        except BaseException:
            stop_processes(processes, (0.0, *FAILURE_GRACE_S[1:]))
            for pipe in pipes:
                pipe.close()
            raise
        self._reports = RankReports(pipes)
        return processes, handles

    # Failure

    def _start_worker_monitor(self) -> None:
        def watch(
            processes: list[BaseProcess],
            reports: RankReports,
            executor: Callable[[], NeuronMultiprocExecutor | None],
        ) -> None:
            sentinels = [process.sentinel for process in processes]
            with contextlib.closing(reports):
                while True:
                    decided_at = reports.decided_at()
                    timeout = None if decided_at is None else max(0.0, decided_at - time.monotonic())
                    ready = multiprocessing.connection.wait([*sentinels, *reports.pipes()], timeout)
                    reports.read()
                    alive = executor()
                    if alive is None or alive._closed:
                        return
                    ended = [rank for rank, sentinel in enumerate(sentinels) if sentinel in ready]
                    reason = alive._describe_deaths(ended) if ended else reports.verdict()
                    if reason is not None:
                        alive._fail(reason)
                        return
                    del alive  # the executor ends when nobody else refers to it

        threading.Thread(
            target=watch,
            args=(list(self._processes), self._reports, weakref.ref(self)),
            daemon=True,
            name="diffusion-worker-monitor",
        ).start()

    def _fail(self, reason: str) -> None:
        """The workers cannot go on: tell whoever waits, stop what is left of them, tell the engine. In this order."""
        self.failure_reason = f"{reason}. The engine has stopped, start a new one"
        self._is_failed = True
        logger.error("%s", self.failure_reason)
        if isinstance(self._shutdown_cleaner, WorkerCleaner):
            self._shutdown_cleaner.failed = True
        with self._futures_lock:
            for future in (*self._rpc_futures.values(), *self._output_futures.values()):
                try_set_exception(future, WorkerDiedError(self.failure_reason))
        self.shutdown()
        for callback in self._failure_callbacks:
            try:
                callback()
            except Exception:
                logger.exception("a failure callback raised")

    def _describe_deaths(self, ranks: Sequence[int]) -> str:
        deaths = []
        for rank in ranks:
            process = self._processes[rank]
            deadline = time.monotonic() + DEATH_NEWS_S
            # The exit code follows the sentinel by an instant, or by two where another thread asks for it as well.
            while process.exitcode is None and time.monotonic() < deadline:
                time.sleep(0.01)
            deaths.append(f"diffusion worker rank {rank} (pid {process.pid}) {describe_exit(process.exitcode)}")
        return f"{'; '.join(deaths)}; world size {self.od_config.num_gpus}"

    def _ensure_open(self) -> None:
        if self.failure_reason is not None:
            raise WorkerDiedError(self.failure_reason)
        super()._ensure_open()

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        unique_reply_rank: int | None = None,
        exec_all_ranks: bool = False,
    ) -> Any:
        """Run `method` on the workers, as vLLM-Omni's executor does.

        After an error of one rank it returns when all have come out of the request, or the engine has stopped: the next
        request must not reach a rank while others are still in this one.

        Raises:
            WorkerDiedError: a worker ended meanwhile, its peers' own errors only say that a connection broke; or one
                failed and others did not come out of the request.
        """
        if method in REQUEST_METHODS and not runtime.env.is_set(REQUEST_TIMEOUT_VARIABLE):
            timeout = REQUEST_TIMEOUT_S
        try:
            return super().collective_rpc(method, timeout, args, kwargs, unique_reply_rank, exec_all_ranks)
        except WorkerDiedError:
            raise
        except Exception as error:
            reason = self._why_stopped()
            if reason is None:
                raise
            raise WorkerDiedError(reason) from error

    def _why_stopped(self) -> str | None:
        """Why the engine stops, if a worker ends within `DEATH_NEWS_S` or has left a request that others are in."""
        sentinels = [process.sentinel for process in self._processes]
        if self.failure_reason is None and sentinels and not self._closed:
            ended = multiprocessing.connection.wait(sentinels, timeout=DEATH_NEWS_S)
            # The monitor knows it too and is about to say why: it first waits for the exit code, or for other ranks.
            began = time.monotonic()
            while self.failure_reason is None and not self._closed:
                # In this order. A rank reports an error before it sends it to the caller, so that it is there by now.
                news = [began] if ended or self._reports.unread() else []
                decided_at = self._reports.decided_at()
                news += [] if decided_at is None else [decided_at]
                if not news or time.monotonic() >= max(news) + 2 * DEATH_NEWS_S:
                    break
                time.sleep(0.01)
        return self.failure_reason

    def shutdown(self) -> None:
        """Stop the workers and let go of everything in shared memory, semaphores included."""
        super().shutdown()
        self.wake_events: list[Any] = []

    def check_health(self) -> None:
        """As vLLM-Omni's.

        Raises:
            EngineDeadError: a worker has ended; the message names it.
        """
        if self.failure_reason is not None:
            error = EngineDeadError()
            error.args = (self.failure_reason,)
            raise error
        super().check_health()


class NeuronUniProcExecutor(UniProcDiffusionExecutor):
    """The one rank in the engine's own process, after the check of the configuration against the machine.

    The model's environment is that of the process while the engine lives.
    """

    _environment = contextlib.ExitStack()  # what `shutdown` undoes

    def _init_executor(self) -> None:
        preflight.check_world_size(self.od_config)
        with contextlib.ExitStack() as started:
            started.enter_context(preflight.model_environment(self.od_config))
            with startup.rendezvous_port(self.od_config):
                super()._init_executor()
            self._environment = started.pop_all()

    def shutdown(self) -> None:
        """As vLLM-Omni's; the process's environment is as before."""
        super().shutdown()
        self._environment.close()


class _Start:
    """How far one rank has come, and until when it has time."""

    def __init__(self, now: float, limit_s: float) -> None:
        self.phase, self.deadline = startup.IMPORTING, now + limit_s
        self.limit = self._whole = f"{limit_s:g} s (OMNI_NEURON_STARTUP_TIMEOUT_S)"
        self._left_s: float | None = None  # of the start-up, while a phase with a limit of its own runs

    def enter(self, phase: str, limit_s: float | None) -> None:
        """Go on to `phase`; the clock of the start-up stands still while one with its own limit runs."""
        now = time.monotonic()
        left_s = self.deadline - now if self._left_s is None else self._left_s
        self.phase = phase
        if limit_s is None:
            self._left_s, self.limit, self.deadline = None, self._whole, now + left_s
        else:
            self._left_s, self.limit, self.deadline = left_s, f"{limit_s:g} s", now + limit_s


def wait_until_ready(processes: Sequence[BaseProcess], pipes: Sequence[Connection], timeout_s: float) -> list[Any]:
    """The result-queue handles of all workers, in rank order, once each has said that it is ready.

    Args:
        processes, pipes: of the workers, in rank order.
        timeout_s: for each of them, without the phases that have a limit of their own.

    Raises:
        WorkerStartupError: as `NeuronMultiprocExecutor._launch_workers` says.
    """
    now = time.monotonic()
    starts = [_Start(now, timeout_s) for _ in processes]
    handles: dict[int, Any] = {}
    while len(handles) < len(processes):
        waiting = {pipes[rank]: rank for rank in range(len(processes)) if rank not in handles}
        earliest = min(starts[rank].deadline for rank in waiting.values())
        readable = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, earliest - time.monotonic()))
        if not readable:
            _raise_for_late({rank: starts[rank] for rank in sorted(waiting.values())})
        for pipe in readable:
            rank = waiting[cast(Connection, pipe)]
            start = starts[rank]
            message = _receive(cast(Connection, pipe), rank, processes[rank], start.phase)
            if message["status"] == "phase":
                start.enter(message["phase"], message["limit_s"])
                if rank == 0 and message["limit_s"] is not None:
                    logger.info(
                        "diffusion workers are %s, for which they have %s besides the rest of the start-up; "
                        "vLLM-Omni's limit for the whole (init_timeout, 600 s unless you raise it) goes on",
                        start.phase,
                        start.limit,
                    )
            elif message["status"] == "ready":
                handles[rank] = message["result_handle"]
            else:
                logger.error("diffusion worker rank %d failed:\n%s", rank, message["traceback"])
                raise WorkerStartupError(f"diffusion worker rank {rank} failed while {start.phase}: {message['error']}")
    return [handles[rank] for rank in range(len(processes))]


def _raise_for_late(waiting: dict[int, _Start]) -> None:
    """Name the ranks whose time is over, if there are any."""
    now = time.monotonic()
    late = {rank: start for rank, start in waiting.items() if now >= start.deadline}
    for limit in {start.limit for start in late.values()}:
        slow = "; ".join(f"rank {rank} is still {start.phase}" for rank, start in late.items() if start.limit == limit)
        raise WorkerStartupError(f"not all diffusion workers became ready in {limit}: {slow}")


def _receive(pipe: Connection, rank: int, process: BaseProcess, phase: str) -> dict[str, Any]:
    try:
        return cast(dict[str, Any], pipe.recv())
    except (EOFError, OSError) as error:
        process.join(DEATH_NEWS_S)
        raise WorkerStartupError(
            f"diffusion worker rank {rank} (pid {process.pid}) {describe_exit(process.exitcode)} while {phase}"
        ) from error
