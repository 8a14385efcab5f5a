# SPDX-License-Identifier: Apache-2.0
"""The worker: one rank's device and process groups. What runs on them is the model runner's."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker
from vllm_omni.lora.request import LoRARequest
from vllm_omni.lora.utils import stable_lora_int_id

import omni_neuron_runtime as runtime
from vllm_omni_neuron import compat, startup
from vllm_omni_neuron.rank_reports import reported
from vllm_omni_neuron.sleep import SleepingWeights

logger = logging.getLogger(__name__)

PARALLEL_GROUP = "omni_neuron.parallel"
OUR_PARALLEL_DISTRIBUTION = "omni-neuron-parallel"

# Every process that runs a worker imports this module by name, before vLLM-Omni starts the worker's result thread.
compat.apply_worker_patches()


def load_parallel_provider() -> Any:
    """The object that adopts the process groups: another distribution's where one is installed, else ours.

    Raises:
        RuntimeError: several other distributions offer one, or the one that does cannot be loaded.
    """
    from omni_neuron_parallel import ParallelProvider

    others = [
        provider
        for provider in runtime.discover_providers(PARALLEL_GROUP, unfiltered=(OUR_PARALLEL_DISTRIBUTION,)).usable()
        if provider.distribution != OUR_PARALLEL_DISTRIBUTION
    ]
    if not others:
        # By import, not by entry point: a VLLM_PLUGINS that names models only must not take the parallel layer away.
        return ParallelProvider()
    if len(others) > 1:
        raise RuntimeError(
            f"several distributions offer a parallel layer: {'; '.join(str(provider) for provider in others)}. "
            "Uninstall all but one, or drop the others with VLLM_PLUGINS"
        )
    logger.info("parallel layer: %s", others[0])
    return others[0].load()()


class NeuronDiffusionWorker(DiffusionWorker):
    """One rank on one NeuronCore, or on the CPU in CPU mode."""

    _parallel: Any = None
    _bound = False
    _cores_before: list[int] | None = None
    _asleep: SleepingWeights | None = None

    def init_device(self) -> None:
        """Bind the device, make vLLM-Omni's process groups, let the parallel layer adopt them, restore `F.gelu`.

        vLLM-Omni's own method makes the configuration with the parallel sizes, the groups and, last, the workspace
        manager, which depends on none of what follows here.

        Raises:
            NotImplementedError: sleep mode was asked for on a device.
        """
        if getattr(self.od_config, "enable_sleep_mode", False):
            _check_sleep("enable_sleep_mode=True")
        startup.report_phase(startup.DEVICE)
        try:
            if not runtime.is_cpu_mode():
                self._bind_core()
            self._init_groups()
        except BaseException:  # vLLM-Omni calls `shutdown` only for a worker that got past this method
            self._restore_visible_cores()
            raise
        compat.restore_gelu()

    def _bind_core(self) -> None:
        world = self.od_config.num_gpus
        cores = runtime.visible_cores() or list(range(world))
        self._bound, self._cores_before = True, runtime.env.get("NEURON_RT_VISIBLE_CORES")
        runtime.initialize_device_runtime(cores[self.rank], world)

    def _restore_visible_cores(self) -> None:
        """Give NEURON_RT_VISIBLE_CORES back: a single rank runs in the caller's process, which may start others."""
        if not self._bound:
            return
        self._bound = False
        if self._cores_before is not None:
            os.environ["NEURON_RT_VISIBLE_CORES"] = ",".join(str(core) for core in self._cores_before)
        elif runtime.env.is_set("NEURON_RT_VISIBLE_CORES"):
            del os.environ["NEURON_RT_VISIBLE_CORES"]

    def _init_groups(self) -> None:
        with compat.collective_timeout(float(runtime.env.get("OMNI_NEURON_COLLECTIVE_TIMEOUT_S"))):
            super().init_device()
            sizes = self.od_config.parallel_config
            self._parallel = load_parallel_provider()
            self._parallel.initialize_from_vllm_omni(
                tp=sizes.tensor_parallel_size,
                cp=sizes.sequence_parallel_size,
                cfg=sizes.cfg_parallel_size,
                vae_patch=sizes.vae_patch_parallel_size,
            )

    def load_model(self, load_format: str = "default", custom_pipeline_name: str | None = None, **kwargs: Any) -> None:
        """As vLLM-Omni's, after telling the engine that this phase begins."""
        startup.report_phase(startup.LOADING)
        super().load_model(load_format, custom_pipeline_name, **kwargs)

    def shutdown(self) -> None:
        """Forget the adopted groups, release what vLLM-Omni's worker holds, and give the environment back."""
        if self._parallel is not None:
            self._parallel.destroy()
            self._parallel = None
        if self._asleep is not None:
            self._asleep.discard()
            self._asleep = None
        super().shutdown()
        self._restore_visible_cores()

    # Tensor capture, through `collective_rpc`

    def enable_capture(self, prompt_hash: str = "default") -> None:
        """Write the captured tensors of the following requests under `prompt_hash`; see `vllm_omni_neuron.capture`."""
        self.model_runner.enable_capture(prompt_hash)

    def disable_capture(self) -> None:
        """Stop writing captured tensors."""
        self.model_runner.disable_capture()

    # Adapters: the pipeline's own manager, behind vLLM-Omni's methods

    def init_lora_manager(self) -> None:
        """Ask the pipeline for its manager of LoRA adapters, if it has one, and load the configured adapter.

        The layers here hold their parameters themselves, so vLLM-Omni's own manager finds none to wrap. A pipeline that
        supports adapters has a method `make_lora_manager()`, whose result has `DiffusionLoRAManager`'s methods:
        `set_active_adapter`, `add_adapter`, `remove_adapter`, `list_adapters` and `pin_adapter`.

        Raises:
            NotImplementedError: the configuration names an adapter, and the pipeline has no manager.
        """
        make = getattr(self.model_runner.pipeline, "make_lora_manager", None)
        paths = self.od_config.lora_path or []
        paths = [paths] if isinstance(paths, str) else paths
        if make is not None:
            self.lora_manager = make()
        elif paths:
            raise NotImplementedError(_no_lora(f"lora_path={self.od_config.lora_path!r}"))
        for path in paths:
            self.add_lora(LoRARequest(path, stable_lora_int_id(path), path))

    def add_lora(self, lora_request: Any) -> bool:
        """Load an adapter, without using it yet.

        Raises:
            NotImplementedError: the pipeline takes none.
        """
        self._refuse_lora([lora_request])
        return bool(super().add_lora(lora_request))

    def execute_model(self, req: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM-Omni's.

        Raises:
            NotImplementedError: the request names an adapter and the pipeline takes none; vLLM-Omni would ignore it.
            RuntimeError: the worker sleeps.
        """
        with self._checked([new_request.req for new_request in req] if isinstance(req, list) else [req]):
            return super().execute_model(req, *args, **kwargs)

    def execute_model_batch(self, scheduler_output: Any, od_config: Any) -> Any:
        """As vLLM-Omni's.

        Raises:
            NotImplementedError, RuntimeError: as `execute_model`.
        """
        with self._checked([new_request.req for new_request in scheduler_output.scheduled_new_reqs]):
            return super().execute_model_batch(scheduler_output, od_config)

    def execute_stepwise(self, scheduler_output: Any) -> Any:
        """As vLLM-Omni's.

        Raises:
            NotImplementedError, RuntimeError: as `execute_model`.
        """
        with self._checked([new_request.req for new_request in scheduler_output.scheduled_new_reqs]):
            return super().execute_stepwise(scheduler_output)

    @contextlib.contextmanager
    def _checked(self, requests: Sequence[Any]) -> Iterator[None]:
        """Refuse what cannot be served, and tell the engine how this rank comes out of the block."""
        names = ", ".join(str(request.request_id) for request in requests)
        with reported(f"request {names}" if names else "a step"):
            if self._asleep is not None:
                raise RuntimeError(
                    "this worker sleeps: its weights are not in memory; wake the engine up before a request"
                )
            self._refuse_lora([request.sampling_params.lora_request for request in requests])
            yield

    def _refuse_lora(self, lora_requests: Sequence[Any]) -> None:
        if self.lora_manager is None:
            for lora in lora_requests:
                if lora is not None:
                    raise NotImplementedError(_no_lora(f"adapter {lora.lora_name!r}"))

    # Sleep

    def sleep(self, level: int = 1) -> int:
        """Take the weights out of memory, until `wake_up`: into temporary files, since here memory is the host's.

        A merged adapter is taken out before. Asleep already, nothing happens.

        Args:
            level: 1; vLLM-Omni's level 2 drops the weights for good.

        Returns:
            The bytes that this rank has freed.

        Raises:
            NotImplementedError: on a device, or another level.
            RuntimeError: the folder for temporary files has no room; the worker is awake then.
        """
        _check_sleep(f"sleep(level={level})")
        if level != 1:
            raise NotImplementedError(
                f"sleep(level={level}): the valid level is 1; to drop the weights, end the engine"
            )
        if self._asleep is not None:
            return 0
        if self.lora_manager is not None:
            self.lora_manager.set_active_adapter(None)
        self._asleep = SleepingWeights(self.model_runner.pipeline)
        logger.info("asleep: %.1f MiB of weights are in %s", self._asleep.nbytes / 2**20, self._asleep.folder)
        return self._asleep.nbytes

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Have the weights back in memory, bit for bit.

        Args:
            tags: what to wake; only "weights" is asleep here. None for all.
        """
        if self._asleep is not None and (tags is None or "weights" in tags):
            self._asleep.wake()
            self._asleep = None
        return True

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        """No pool: vLLM-Omni's is CUDA's, and `sleep` here needs none."""
        return contextlib.nullcontext()


def _check_sleep(what: str) -> None:
    if not runtime.is_cpu_mode():
        raise NotImplementedError(
            f"{what}: not on a NeuronCore, whose runtime does not tell what memory is in use, so that nobody could say "
            "whether sleep has freed any; stop the engine and start it again instead"
        )


def _no_lora(what: str) -> str:
    return f"{what}: this pipeline takes no LoRA adapters; merge the adapter into the checkpoint and serve that"
