# SPDX-License-Identifier: Apache-2.0
"""The worker: one rank's device and process groups. What runs on them is the model runner's."""

from __future__ import annotations

import logging
from typing import Any

from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker

import omni_neuron_runtime as runtime
from vllm_omni_neuron import compat, startup

logger = logging.getLogger(__name__)

PARALLEL_GROUP = "omni_neuron.parallel"

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
        for provider in runtime.discover_providers(PARALLEL_GROUP).usable()
        if provider.distribution != "omni-neuron-parallel"
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
        world = self.od_config.num_gpus
        if not runtime.is_cpu_mode():
            cores = runtime.visible_cores() or list(range(world))
            runtime.initialize_device_runtime(cores[self.rank], world)
        with compat.collective_timeout(float(runtime.env.get("OMNI_NEURON_COLLECTIVE_TIMEOUT_S"))):
            super().init_device()
            sizes = self.od_config.parallel_config
            self._parallel = load_parallel_provider()
            self._parallel.initialize_from_vllm_omni(
                tp=sizes.tensor_parallel_size, cp=sizes.sequence_parallel_size, cfg=sizes.cfg_parallel_size
            )
        compat.restore_gelu()

    def load_model(self, load_format: str = "default", custom_pipeline_name: str | None = None, **kwargs: Any) -> None:
        """As vLLM-Omni's, after telling the engine that this phase begins."""
        startup.report_phase(startup.LOADING)
        super().load_model(load_format, custom_pipeline_name, **kwargs)

    def shutdown(self) -> None:
        """Forget the adopted groups, then release what vLLM-Omni's worker holds."""
        if self._parallel is not None:
            self._parallel.destroy()
            self._parallel = None
        super().shutdown()

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
        requests = [new_request.req for new_request in req] if isinstance(req, list) else [req]
        for request in requests:
            lora = request.sampling_params.lora_request
            if lora is not None:
                raise NotImplementedError(_no_lora(f"the request's adapter {lora.lora_name!r}"))
        return super().execute_model(req, *args, **kwargs)

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


def _no_lora(what: str) -> str:
    return f"{what}: LoRA is not supported on Neuron; merge the adapter into the checkpoint and serve that"


def _no_sleep(what: str) -> str:
    return f"{what}: sleep mode is not supported on Neuron; stop the engine and start it again instead"
