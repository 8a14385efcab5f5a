# SPDX-License-Identifier: Apache-2.0
"""What the engine concludes from the ranks' reports of a request."""

from __future__ import annotations

import multiprocessing as mp
import threading
import types
from multiprocessing.connection import Connection
from typing import Any

import pytest

from omni_neuron_parallel import CollectiveError
from vllm_omni_neuron import NeuronDiffusionWorker, WorkerDiedError, executor, rank_reports, startup


class Ranks:
    """Workers' ends of the pipes, and the engine's."""

    def __init__(self, world: int) -> None:
        pipes = [mp.Pipe(duplex=False) for _ in range(world)]
        self.writers: list[Connection] = [writer for _, writer in pipes]
        self.reports = rank_reports.RankReports([reader for reader, _ in pipes])
        self._numbers = [0] * world

    def run(self, rank: int, error: Exception | None = None) -> None:
        """The rank's next request, as its worker runs it."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(startup, "_pipe", self.writers[rank])
            patch.setattr(rank_reports, "_numbers", iter([self._numbers[rank]]))
            self._numbers[rank] += 1
            try:
                with rank_reports.reported("request fox"):
                    if error is not None:
                        raise error
            except type(error or Exception()) as raised:
                assert raised is error

    def verdict(self) -> str | None:
        self.reports.read()
        return self.reports.verdict()


def test_an_error_of_all_ranks_is_the_requests_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(2)
    ranks.run(1, ValueError("height must be positive"))
    assert ranks.verdict() is None  # rank 0 still has time
    assert ranks.reports.decided_at() is not None
    ranks.run(0, ValueError("height must be positive"))
    assert ranks.verdict() is None
    assert ranks.reports.decided_at() is None
    monkeypatch.setattr(rank_reports, "RANK_GRACE_S", 0.0)
    ranks.run(0)
    ranks.run(0, ValueError("a later one"))
    ranks.run(1)
    ranks.run(1)  # that rank 1 had no error does no harm: both are out of the request
    assert ranks.verdict() is None


def test_a_rank_that_failed_alone_is_named_with_its_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rank_reports, "RANK_GRACE_S", 0.0)
    ranks = Ranks(3)
    ranks.run(2, MemoryError("no room for tile 3"))
    ranks.run(1, CollectiveError("all_reduce failed"))
    reason = ranks.verdict() or ""
    assert reason.startswith(
        "diffusion worker rank 2 failed while executing request fox: MemoryError: no room for tile 3; rank 0 did not"
    )
    assert "Traceback" in caplog.text


def test_a_collective_that_failed_breaks_the_groups_even_if_all_ranks_say_so() -> None:
    ranks = Ranks(2)
    ranks.run(0, CollectiveError("all_reduce failed"))
    assert ranks.verdict() is None
    ranks.run(1)
    assert "rank 0 failed while executing request fox: CollectiveError: all_reduce failed" in (ranks.verdict() or "")


def test_the_pipe_of_a_rank_that_has_ended_is_not_waited_for() -> None:
    ranks = Ranks(2)
    ranks.run(1)
    ranks.writers[1].close()
    ranks.reports.read()
    assert len(ranks.reports.pipes()) == 1
    ranks.reports.close()
    ranks.run(0, ValueError("the engine does not listen any more"))
    assert ranks.reports.pipes() == []


def test_every_way_to_run_a_request_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(startup, "report", sent.append)
    instance = NeuronDiffusionWorker.__new__(NeuronDiffusionWorker)
    instance.lora_manager = None
    adapter = types.SimpleNamespace(lora_name="style")
    request = types.SimpleNamespace(request_id="17", sampling_params=types.SimpleNamespace(lora_request=adapter))
    scheduled = types.SimpleNamespace(scheduled_new_reqs=[types.SimpleNamespace(req=request)])
    for call in (
        lambda: instance.execute_model(request, None),
        lambda: instance.execute_model_batch(scheduled, None),
        lambda: instance.execute_stepwise(scheduled),
    ):
        with pytest.raises(NotImplementedError):
            call()
    assert [report["request"] for report in sent] == ["request 17"] * 3
    numbers = [report["number"] for report in sent]
    assert numbers == list(range(numbers[0], numbers[0] + 3))
    assert all(report["error"].startswith("NotImplementedError: adapter 'style'") for report in sent)


def running_executor(reports: rank_reports.RankReports, process: Any) -> Any:
    self: Any = executor.NeuronMultiprocExecutor.__new__(executor.NeuronMultiprocExecutor)
    self.od_config = types.SimpleNamespace(num_gpus=2, step_execution=False)
    self._processes, self._reports = [process], reports
    self._closed = self._is_failed = False
    self._failure_callbacks, self._futures_lock = [], threading.RLock()
    self._rpc_futures, self._output_futures, self._shutdown_cleaner = {}, {}, None
    return self


@pytest.fixture
def process() -> Any:
    """One that lives: its sentinel never becomes readable."""
    sentinel, other_end = mp.Pipe(duplex=False)
    return types.SimpleNamespace(sentinel=sentinel, other_end=other_end)


def call_of_a_request(
    self: Any, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> tuple[threading.Thread, list[BaseException]]:
    """A request that rank 1 fails: vLLM-Omni's executor has its error at once, from the rank's own result queue."""
    errors: list[BaseException] = []

    def fail(*_: Any) -> None:
        raise RuntimeError("no room for tile 3")

    def call() -> None:
        try:
            self.collective_rpc("execute_model")
        except RuntimeError as error:
            errors.append(error)

    monkeypatch.setattr(executor.MultiprocDiffusionExecutor, "collective_rpc", fail)
    monkeypatch.setattr(executor, "DEATH_NEWS_S", 0.05)
    ranks.run(1, MemoryError("no room for tile 3"))
    self._start_worker_monitor()
    thread = threading.Thread(target=call)
    thread.start()
    return thread, errors


def test_a_rank_that_failed_alone_stops_the_engine(monkeypatch: pytest.MonkeyPatch, process: Any) -> None:
    monkeypatch.setattr(rank_reports, "RANK_GRACE_S", 0.2)
    ranks = Ranks(2)
    self = running_executor(ranks.reports, process)
    stopped = threading.Event()
    monkeypatch.setattr(executor.NeuronMultiprocExecutor, "shutdown", lambda self: stopped.set())
    thread, errors = call_of_a_request(self, ranks, monkeypatch)
    thread.join(20)
    assert stopped.wait(20)
    message = "rank 1 failed while executing request fox: MemoryError: no room for tile 3; rank 0 did not come out"
    with pytest.raises(WorkerDiedError, match=message):
        raise errors[0]
    assert self._is_failed


def test_the_caller_waits_for_the_other_ranks_and_gets_the_requests_error(
    monkeypatch: pytest.MonkeyPatch, process: Any
) -> None:
    """Else the next request would reach rank 1 while rank 0 is still in this one."""
    ranks = Ranks(2)
    self = running_executor(ranks.reports, process)
    thread, errors = call_of_a_request(self, ranks, monkeypatch)
    thread.join(0.5)
    assert thread.is_alive()
    ranks.run(0, ValueError("no room for tile 3"))
    thread.join(20)
    [error] = errors
    assert type(error) is RuntimeError and str(error) == "no room for tile 3"
    assert self.failure_reason is None and not self._is_failed
