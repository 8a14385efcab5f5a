# SPDX-License-Identifier: Apache-2.0
"""The worker: one rank's device and process groups. What runs on them is the model runner's."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker

import omni_neuron_runtime as runtime
from vllm_omni_neuron import compat, startup

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

    def init_device(self) -> None:
        """Bind the device, make vLLM-Omni's process groups, let the parallel layer adopt them, restore `F.gelu`.

        vLLM-Omni's own method makes the configuration with the parallel sizes, the groups and, last, the workspace
        manager, which depends on none of what follows here.

        Raises:
            NotImplementedError: sleep mode was asked for.
        """
        if getattr(self.od_config, "enable_sleep_mode", False):
            raise NotImplementedError(_no_sleep("enable_sleep_mode=True"))
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
        super().shutdown()
        self._restore_visible_cores()

    # Tensor capture, through `collective_rpc`

    def enable_capture(self, prompt_hash: str = "default") -> None:
        """Write the captured tensors of the following requests under `prompt_hash`; see `vllm_omni_neuron.capture`."""
        self.model_runner.enable_capture(prompt_hash)

    def disable_capture(self) -> None:
        """Stop writing captured tensors."""
        self.model_runner.disable_capture()

    # What this platform does not do

    def init_lora_manager(self) -> None:
        """No manager: layers here are raw parameters, which vLLM-Omni's adapters cannot wrap.

        Raises:
            NotImplementedError: the configuration names an adapter.
        """
        if self.od_config.lora_path:
            raise NotImplementedError(_no_lora(f"lora_path={self.od_config.lora_path!r}"))

    def add_lora(self, lora_request: Any) -> bool:
        """Refused.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(_no_lora(f"add_lora({getattr(lora_request, 'lora_name', lora_request)!r})"))

    def execute_model(self, req: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM-Omni's.

        Raises:
            NotImplementedError: the request names a LoRA adapter, which vLLM-Omni would ignore in silence.
        """
        _refuse_lora([new_request.req for new_request in req] if isinstance(req, list) else [req])
        return super().execute_model(req, *args, **kwargs)

    def execute_model_batch(self, scheduler_output: Any, od_config: Any) -> Any:
        """As vLLM-Omni's.

        Raises:
            NotImplementedError: as `execute_model`.
        """
        _refuse_lora(new_request.req for new_request in scheduler_output.scheduled_new_reqs)
        return super().execute_model_batch(scheduler_output, od_config)

    def execute_stepwise(self, scheduler_output: Any) -> Any:
        """As vLLM-Omni's.

        Raises:
            NotImplementedError: as `execute_model`.
        """
        _refuse_lora(new_request.req for new_request in scheduler_output.scheduled_new_reqs)
        return super().execute_stepwise(scheduler_output)

    def sleep(self, level: int = 1) -> int:
        """Refused.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(_no_sleep(f"sleep(level={level})"))

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Refused.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(_no_sleep("wake_up()"))


def _refuse_lora(requests: Iterable[Any]) -> None:
    for request in requests:
        lora = request.sampling_params.lora_request
        if lora is not None:
            raise NotImplementedError(_no_lora(f"the request's adapter {lora.lora_name!r}"))


def _no_lora(what: str) -> str:
    return f"{what}: LoRA is not supported on Neuron; merge the adapter into the checkpoint and serve that"


def _no_sleep(what: str) -> str:
    return f"{what}: sleep mode is not supported on Neuron; stop the engine and start it again instead"
