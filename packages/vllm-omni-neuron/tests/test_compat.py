# SPDX-License-Identifier: Apache-2.0
"""The seams into vLLM and vLLM-Omni."""

from __future__ import annotations

import logging
import queue
import subprocess
import sys
import threading
import types
from typing import Any

import pytest
import torch
from vllm_omni.diffusion.data import AsyncOutputKind, DiffusionOutput
from vllm_omni.diffusion.ipc import unpack_diffusion_output_shm

from vllm_omni_neuron import compat, shared_memory


def worker_proc(*items: Any) -> Any:
    sent: list[Any] = []
    proc = types.SimpleNamespace(
        _async_output_queue=queue.Queue(),
        _async_output_done=threading.Condition(),
        _async_output_pending=len(items),
        _enqueue_result=sent.append,
        sent=sent,
    )
    for item in (*items, None):
        proc._async_output_queue.put(item)
    return proc


def test_results_are_packed_without_a_stream() -> None:
    video = torch.arange(2_000_000, dtype=torch.int32)  # above vLLM-Omni's threshold for shared memory
    proc = worker_proc((DiffusionOutput(output=video), "id", None))
    compat.pack_outputs_on_host(proc)
    [message] = proc.sent
    assert (message.kind, message.async_output_id, message.error) == (AsyncOutputKind.OUTPUT_READY, "id", None)
    unpack_diffusion_output_shm(message.output)
    assert torch.equal(message.output.output, video)
    assert proc._async_output_pending == 0


def test_a_result_that_cannot_be_packed_is_an_error_and_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(output: Any) -> None:
        if output == "bad":
            raise OSError("No space left on device")

    monkeypatch.setattr("vllm_omni.diffusion.ipc.pack_diffusion_output_shm", fail)
    proc = worker_proc(("bad", "one", None), ("good", "two", None))
    compat.pack_outputs_on_host(proc)
    assert "No space left on device" in proc.sent[0].error
    assert proc.sent[1].error is None
    assert proc._async_output_pending == 0


def test_results_are_packed_alike_on_a_device_and_not_beyond_the_room_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm_omni.diffusion import ipc
    from vllm_omni.diffusion.worker.diffusion_worker import WorkerProc

    monkeypatch.setattr("omni_neuron_runtime.is_cpu_mode", lambda: False)
    for owner, name in ((WorkerProc, "_async_output_loop"), (ipc, "_array_to_shm")):  # put back at the end
        stock = getattr(owner.__dict__[name], compat._PATCHED, owner.__dict__[name])
        monkeypatch.setattr(owner, name, stock)
    compat.apply_worker_patches()
    monkeypatch.setattr(shared_memory, "space", lambda: shared_memory.Space(4 << 20, 64 << 20))
    fits, does_not = (DiffusionOutput(output=torch.ones(size << 20, dtype=torch.int32)) for size in (1, 2))
    proc = worker_proc((does_not, "one", None), (fits, "two", None))
    WorkerProc._async_output_loop(proc)
    assert "a result needs 8 MiB of shared memory, /dev/shm has 4 MiB free of 64 MiB: " in proc.sent[0].error
    assert "--shm-size" in proc.sent[0].error
    assert proc.sent[1].error is None
    unpack_diffusion_output_shm(proc.sent[1].output)


def test_loggers_of_model_packages_write_where_vllms_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "OUR_LOGGERS", ())  # other tests read them through the root logger
    model, own = logging.getLogger("acme_toy_of_this_test"), logging.getLogger("acme_own_handler_of_this_test")
    own.addHandler(logging.NullHandler())
    compat.share_vllm_log_handlers(model.name, own.name, "vllm")
    assert model.parent is logging.getLogger("vllm")
    assert own.parent is logging.getLogger()  # it has somewhere to write
    assert logging.getLogger("vllm").parent is logging.getLogger()


def test_collective_timeout_is_for_the_time_of_the_call() -> None:
    from torch.distributed import distributed_c10d

    before = distributed_c10d.default_pg_timeout
    with compat.collective_timeout(7):
        assert distributed_c10d._get_default_timeout("gloo").total_seconds() == 7
    assert distributed_c10d.default_pg_timeout == before


def test_segments_are_named() -> None:
    probe = (
        "from multiprocessing.shared_memory import SharedMemory\n"
        "from vllm_omni_neuron.compat import name_shared_memory\n"
        "name_shared_memory('omnxtest_3_')\n"
        "segment = SharedMemory(create=True, size=8)\n"
        "print(segment.name); segment.close(); segment.unlink()\n"
    )
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("omnxtest_3_")


def test_engine_patches_choose_our_executors_and_can_be_applied_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    from vllm.v1.engine.exceptions import EngineDeadError
    from vllm_omni.diffusion import registry
    from vllm_omni.diffusion.executor.abstract import DiffusionExecutor
    from vllm_omni.diffusion.inline_stage_diffusion_client import InlineStageDiffusionClient

    # Set to themselves, so that they are put back at the end.
    monkeypatch.setattr(registry, "_load_process_func", registry._load_process_func)
    for owner, name in ((DiffusionExecutor, "get_class"), (InlineStageDiffusionClient, "get_diffusion_output_nowait")):
        monkeypatch.setattr(owner, name, owner.__dict__[name])
    compat.apply_engine_patches()
    first = DiffusionExecutor.__dict__["get_class"]
    compat.apply_engine_patches()
    assert DiffusionExecutor.__dict__["get_class"] is first

    chosen = [
        DiffusionExecutor.get_class(
            types.SimpleNamespace(num_gpus=world, distributed_executor_backend=backend)
        ).__name__
        for world, backend in ((1, None), (2, None), (1, "mp"))
    ]
    assert chosen == ["NeuronUniProcExecutor", "NeuronMultiprocExecutor", "NeuronMultiprocExecutor"]

    class Dead(InlineStageDiffusionClient):
        def __init__(self, reason: str | None) -> None:
            self._output_queue, self._engine_dead, self.stage_id = asyncio.Queue(), True, 0
            self._engine = types.SimpleNamespace(executor=types.SimpleNamespace(failure_reason=reason))

    with pytest.raises(EngineDeadError, match="stage 0's diffusion engine is dead: rank 3 was killed"):
        Dead("rank 3 was killed").get_diffusion_output_nowait()
    with pytest.raises(EngineDeadError) as without_reason:
        Dead(None).get_diffusion_output_nowait()
    assert "rank" not in str(without_reason.value)


@pytest.mark.parametrize(("owns", "left"), [(True, ["loaded"]), (False, ["vae_patch_parallel_size", "loaded"])])
def test_what_a_pipeline_does_itself_is_not_called_ignored(
    monkeypatch: pytest.MonkeyPatch, owns: bool, left: list[str]
) -> None:
    from vllm_omni.diffusion import registry

    class Kept(logging.Handler):  # of the logger itself: vLLM-Omni's may not propagate, depending on what ran before
        def __init__(self) -> None:
            super().__init__()
            self.messages: list[str] = []

        def emit(self, record: logging.LogRecord) -> None:
            self.messages.append(record.getMessage().partition("=")[0])

    kept = Kept()
    monkeypatch.setattr(registry.logger, "handlers", [kept])

    pipeline = type("Pipeline", (), {"owns_parallelism": owns})
    monkeypatch.setattr(registry.DiffusionModelRegistry, "_try_load_model_cls", lambda name: pipeline)
    ignored = "vae_patch_parallel_size=%d is set but VAE patch parallelism is NOT enabled for %s; ignoring."
    with compat.quiet_about_own_parallelism("Pipeline"):
        registry.logger.warning(ignored, 2, "Pipeline")
        registry.logger.warning("loaded")
    assert kept.messages == left
    registry.logger.warning(ignored, 2, "another")
    assert len(kept.messages) == len(left) + 1
