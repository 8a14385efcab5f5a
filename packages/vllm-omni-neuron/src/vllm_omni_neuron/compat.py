# SPDX-License-Identifier: Apache-2.0
"""Every seam into private behaviour of vLLM and vLLM-Omni 0.30, each with its reason and when it can go.

Replaced in the engine's process, by `apply_engine_patches` (called from `register_neuron_pipelines`):

- `DiffusionExecutor.get_class` answers our subclass of the executor that it would answer. A dead or hanging worker must
  be named to the caller and the layout be checked before a process starts, and no platform hook chooses the executor.
  Goes when the platform interface names an executor class.
- `InlineStageDiffusionClient.get_diffusion_output_nowait` adds the executor's reason to its "engine is dead", which can
  overtake the failed request's own error. Goes when the client asks the executor for a reason.
- `registry._load_process_func`, which imports the pipeline's module in the engine's process: an error of that import
  names the distribution and the fix. Goes when vLLM-Omni says whose model it cannot import.

Replaced in each worker, by `apply_worker_patches` (called when `vllm_omni_neuron.worker` is imported):

- `WorkerProc._async_output_loop` packs results without a side stream. It builds a stream on
  `torch.accelerator.current_accelerator()`, which is None in CPU mode; on a device it numbers it with the rank, where
  every process has one core, number 0, and copies into pinned memory, of which there is none. The thread dies and the
  engine waits for ever. Patching `torch.accelerator` instead would make Dynamo start CUDA. Goes when the loop works
  without an accelerator and asks the platform for device and pinned memory.
- `vllm_omni.diffusion.ipc._array_to_shm` looks first whether `/dev/shm` has room for a result: to make a segment always
  succeeds, and writing past the room kills the process. Goes when it allocates what it makes.
- `multiprocessing.shared_memory._make_filename` gives a spawned worker's segments a prefix of the engine's
  (`name_shared_memory`), so that the engine can remove what a killed worker leaves. Goes when vLLM-Omni's `ipc` and
  vLLM's `MessageQueue` name their segments.

Set in the environment, by `neuron_platform_plugin`:

- `HUMMING_DISABLE_PARALLEL_BUILD`: vLLM imports a library of CUDA kernels that starts two Python processes to build its
  launcher, in vain and in every worker again. Goes when vLLM does not import it where there is no CUDA.

For the time of one call:

- `torch.distributed.distributed_c10d.default_pg_timeout` (`collective_timeout`): vLLM-Omni and vLLM make all process
  groups without a timeout, which means 30 minutes. Goes when `init_distributed_environment` takes a timeout.
- `torch.nn.functional.gelu` (`restore_gelu`): Neuron's runtimes replace it by a Python function, which breaks
  full-graph capture. Goes when they stop.

- Warnings of `vllm_omni.diffusion.registry` and `.offloader` are dropped while a pipeline loads that says
  `owns_parallelism = True` (`quiet_about_own_parallelism`): they say that context and VAE patch parallelism and CPU
  offload are ignored, which they are not. Goes when a pipeline can tell vLLM-Omni so.

Relied on, not replaced:

- `vllm_omni.diffusion.registry._DIFFUSION_{PRE,POST}_PROCESS_FUNCS` (`forget_process_funcs`): registering over a
  built-in architecture keeps the built-in's hooks unless new ones are named. Goes when None can mean none.
- `vllm_omni.diffusion.model_metadata._DIFFUSION_MODEL_METADATA` (`set_final_output_type`): the video endpoints refuse
  an architecture that this table does not call a video model. Goes when `register_diffusion_model` takes the metadata.
- `DiffusionModelRunner`: `load_model`, `_initialize_generator`, `device`, `pipeline`, `od_config`.
- `DiffusionWorker`: `init_device`, `load_model`, `execute_model`, `execute_model_batch`, `execute_stepwise`,
  `init_lora_manager`, `add_lora`, `shutdown`, `sleep`, `wake_up`, `handle_sleep_task`, `handle_wake_task`;
  `WorkerProc`: `worker_main`, `_async_output_queue`, `_enqueue_result`, `_async_output_done`, `_async_output_pending`.
- `MultiprocDiffusionExecutor`: `_init_executor`, `_launch_workers` (arguments and result), `_start_worker_monitor`,
  `_ensure_open`, `_processes`, `_closed`, `_is_failed`, `_failure_callbacks`, `_shutdown_cleaner`, `_finalizer`,
  `_broadcast_mq`, `_futures_lock`, `_rpc_futures`, `_output_futures`, `_completed_outputs`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import secrets
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch

from vllm_omni_neuron import shared_memory

logger = logging.getLogger(__name__)

_PATCHED = "_vllm_omni_neuron_original"
OUR_LOGGERS = ("vllm_omni_neuron", "omni_neuron_runtime", "omni_neuron_parallel")


def share_vllm_log_handlers(*names: str) -> None:
    """Let our loggers, and those of `names`, write where vLLM's write: vLLM configures its own name only."""
    vllm = logging.getLogger("vllm")
    for name in (*OUR_LOGGERS, *names):
        logger_of_name = logging.getLogger(name)
        if logger_of_name is not vllm and not logger_of_name.handlers:
            logger_of_name.parent = vllm


def _replace(owner: Any, name: str, replacement: Any) -> None:
    """Put `replacement` in the place of `owner.name`, once per process."""
    original = owner.__dict__[name]
    if hasattr(_function_of(original), _PATCHED):
        return
    setattr(_function_of(replacement), _PATCHED, original)
    setattr(owner, name, replacement)


def _function_of(attribute: Any) -> Any:
    return attribute.__func__ if isinstance(attribute, staticmethod) else attribute


def apply_engine_patches() -> None:
    """Make the engine choose our executor, repeat its reason of failure and say whose model cannot be imported."""
    from vllm.v1.engine.exceptions import EngineDeadError
    from vllm_omni.diffusion import registry
    from vllm_omni.diffusion.executor.abstract import DiffusionExecutor
    from vllm_omni.diffusion.inline_stage_diffusion_client import InlineStageDiffusionClient

    get_class = DiffusionExecutor.get_class
    get_output = InlineStageDiffusionClient.get_diffusion_output_nowait
    load_process_func = registry._load_process_func

    @functools.wraps(get_class)
    def get_neuron_class(od_config: Any) -> type:
        from vllm_omni_neuron.executor import NeuronMultiprocExecutor, NeuronUniProcExecutor

        chosen: type = get_class(od_config)
        return {ours.__base__: ours for ours in (NeuronMultiprocExecutor, NeuronUniProcExecutor)}.get(chosen, chosen)

    @functools.wraps(get_output)
    def get_output_or_reason(self: Any) -> Any:
        try:
            return get_output(self)
        except EngineDeadError as error:
            reason = getattr(self._engine.executor, "failure_reason", None)
            if reason is None:
                raise
            raise _dead_engine(f"stage {self.stage_id}'s diffusion engine is dead: {reason}") from error

    @functools.wraps(load_process_func)
    def load_process_func_of_package(od_config: Any, func_name: str) -> Any:
        from vllm_omni_neuron.registry import registered_model

        model = registered_model(od_config.model_class_name)
        if model is not None:
            model.import_pipeline()
        return load_process_func(od_config, func_name)

    _replace(registry, "_load_process_func", load_process_func_of_package)
    _replace(DiffusionExecutor, "get_class", staticmethod(get_neuron_class))
    _replace(InlineStageDiffusionClient, "get_diffusion_output_nowait", get_output_or_reason)


def _dead_engine(message: str) -> Exception:
    """An `EngineDeadError` with `message`; its constructor takes none but vLLM's own."""
    from vllm.v1.engine.exceptions import EngineDeadError

    error: Exception = EngineDeadError()
    error.args = (message,)
    return error


def apply_worker_patches() -> None:
    """Make the result thread work without a stream, and fail instead of dying where `/dev/shm` is full."""
    from vllm_omni.diffusion import ipc
    from vllm_omni.diffusion.worker.diffusion_worker import WorkerProc

    array_to_shm = ipc._array_to_shm

    @functools.wraps(array_to_shm)
    def array_to_shm_with_room(array: Any) -> Any:
        problem = shared_memory.space().lacks(array.nbytes, "a result")
        if problem:
            raise RuntimeError(problem)
        return array_to_shm(array)

    _replace(ipc, "_array_to_shm", array_to_shm_with_room)
    _replace(WorkerProc, "_async_output_loop", pack_outputs_on_host)


def pack_outputs_on_host(worker_proc: Any) -> None:
    """`WorkerProc._async_output_loop` for results that are in the host's memory already, or may be copied there."""
    from vllm_omni.diffusion.data import AsyncDiffusionOutput, AsyncOutputKind
    from vllm_omni.diffusion.ipc import pack_diffusion_output_shm

    while (item := worker_proc._async_output_queue.get()) is not None:
        output, async_output_id, _event = item
        message = AsyncDiffusionOutput(kind=AsyncOutputKind.OUTPUT_READY, async_output_id=async_output_id)
        try:
            pack_diffusion_output_shm(output)
            message.output = output
        except Exception as error:
            logger.exception("packing output %s into shared memory failed", async_output_id)
            message.error = f"packing the result into shared memory failed: {error}"
        try:
            worker_proc._enqueue_result(message)
        finally:
            with worker_proc._async_output_done:
                worker_proc._async_output_pending = max(0, worker_proc._async_output_pending - 1)
                worker_proc._async_output_done.notify_all()


def name_shared_memory(prefix: str) -> None:
    """Let this process create its shared-memory segments as `/dev/shm/<prefix><random>`."""
    from multiprocessing import shared_memory

    shared_memory._make_filename = lambda: f"/{prefix}{secrets.token_hex(6)}"  # type: ignore[attr-defined]


@contextlib.contextmanager
def collective_timeout(seconds: float) -> Iterator[None]:
    """Process groups made meanwhile fail a collective after `seconds`."""
    from torch.distributed import distributed_c10d

    before = distributed_c10d.default_pg_timeout
    distributed_c10d.default_pg_timeout = timedelta(seconds=seconds)
    try:
        yield
    finally:
        distributed_c10d.default_pg_timeout = before


# The beginnings of what vLLM-Omni says of features that are not its own: none of it is so for a pipeline that has them.
_NOT_OURS = {
    "vllm_omni.diffusion.registry": (
        "vae_patch_parallel_size=%d is set but VAE patch parallelism is NOT enabled",
        "Sequence parallelism is enabled (sp_size=",
    ),
    "vllm_omni.diffusion.offloader": ("Current device: %s does not support CPU offloading",),
}


@contextlib.contextmanager
def quiet_about_own_parallelism(model_class_name: str) -> Iterator[None]:
    """Drop those warnings meanwhile, if the pipeline's class says `owns_parallelism = True`."""
    from vllm_omni.diffusion.registry import DiffusionModelRegistry

    pipeline = DiffusionModelRegistry._try_load_model_cls(model_class_name)
    if not getattr(pipeline, "owns_parallelism", False):
        yield
        return
    filters = {name: functools.partial(_says_none_of, beginnings) for name, beginnings in _NOT_OURS.items()}
    for name, keep in filters.items():
        logging.getLogger(name).addFilter(keep)
    try:
        yield
    finally:
        for name, keep in filters.items():
            logging.getLogger(name).removeFilter(keep)


def _says_none_of(beginnings: tuple[str, ...], record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(beginnings)


def restore_gelu() -> None:
    """Make `torch.nn.functional.gelu` the aten operator again."""
    torch.nn.functional.gelu = torch._C._nn.gelu


def forget_process_funcs(model_arch: str) -> None:
    """Forget the pre- and post-process hooks that vLLM-Omni itself has for `model_arch`."""
    from vllm_omni.diffusion import registry

    registry._DIFFUSION_PRE_PROCESS_FUNCS.pop(model_arch, None)
    registry._DIFFUSION_POST_PROCESS_FUNCS.pop(model_arch, None)


def set_final_output_type(model_arch: str, final_output_type: str) -> None:
    """Tell vLLM-Omni's endpoints what `model_arch` makes; what else they know of it stays."""
    from vllm_omni.diffusion import model_metadata

    # Not its getter: that imports vLLM-Omni's registry, which may be what is asking for the platform just now.
    table = model_metadata._DIFFUSION_MODEL_METADATA
    known = table.get(model_arch, model_metadata.DiffusionModelMetadata())
    table[model_arch] = dataclasses.replace(known, final_output_type=final_output_type)
