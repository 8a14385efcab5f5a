# SPDX-License-Identifier: Apache-2.0
"""The model runner: loads, places, observes and compiles a pipeline's components. The base class runs requests."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from vllm_omni.diffusion.worker.diffusion_model_runner import DiffusionModelRunner
from vllm_omni.platforms import current_omni_platform

import omni_neuron_runtime as runtime
from vllm_omni_neuron import compat, startup
from vllm_omni_neuron.capture import TensorCapture
from vllm_omni_neuron.compilation import KINDS, component_kinds, shape_of, warmup_requests
from vllm_omni_neuron.sdk.spec import ModelSpec
from vllm_omni_neuron.settings import model_settings

logger = logging.getLogger(__name__)


def declared_components(pipeline: nn.Module, *attributes: str) -> dict[str, nn.Module]:
    """The components that `pipeline` declares in the named class attributes, by name, without those this rank lacks.

    A component may be None, as a second expert or a VAE that lives on one rank only.

    Raises:
        AttributeError: a declared component is no attribute of the pipeline.
    """
    components: dict[str, nn.Module] = {}
    for attribute in attributes or KINDS:
        for name in getattr(pipeline, attribute, ()):
            if not hasattr(pipeline, name):
                raise AttributeError(
                    f"{type(pipeline).__name__}.{attribute} declares {name!r}, but the pipeline has no such attribute "
                    "after loading; set it to None where this rank has none"
                )
            component = getattr(pipeline, name)
            if component is not None:
                components[name] = component
    return components


def place(pipeline: nn.Module, device: torch.device) -> None:
    """Move a pipeline to `device`, without the components that its `ModelSpec` leaves on the host."""
    spec = getattr(pipeline, "spec", None)
    hosted = [component.name for component in spec.components if component.host] if isinstance(spec, ModelSpec) else []
    if not hosted:
        pipeline.to(device)
        return
    for name, child in pipeline.named_children():
        if name not in hosted:
            child.to(device)


class NeuronDiffusionModelRunner(DiffusionModelRunner):
    """Runs any pipeline that declares its components; no component's name is known here."""

    capture: TensorCapture | None = None

    def load_model(
        self,
        memory_pool_context_fn: Callable[[str], AbstractContextManager[Any]] | None = None,
        load_format: str = "default",
        custom_pipeline_name: str | None = None,
    ) -> None:
        """Load to the CPU, move to the device, hook for capture, compile, then observe `predict_noise`.

        In this order: a hook that is registered after compilation is not in the graph, and `predict_noise` must stay
        outside of it.
        """
        if load_format == "dummy":
            return
        device: torch.device = self.device  # type: ignore[has-type]
        self.device = torch.device("cpu")
        try:
            with compat.quiet_about_own_parallelism(self.od_config.model_class_name):
                super().load_model(memory_pool_context_fn, load_format, custom_pipeline_name)
        finally:
            self.device = device
        pipeline: Any = self.pipeline
        if device.type != "cpu":
            place(pipeline, device)
        settings = model_settings(self.od_config).get("tensor_capture")
        if settings:
            self.capture = TensorCapture(settings, declared_components(pipeline, "_dit_modules"))
        compiled = self._compile_components()
        if self.capture is not None:
            self.capture.observe(pipeline)
        if compiled:
            self._warm_up()

    def _compile_components(self) -> bool:
        """Compile each declared component with the platform's backend, if it has one and eager mode is not enforced.

        A pipeline may define `compile(backend=…)` itself and then compiles its components as it sees fit; so may a
        component, being an `nn.Module`. Nothing is compiled yet when this returns: a graph is, when it is first called.

        Returns:
            Whether there is something to compile.
        """
        backend = current_omni_platform.get_compile_backend()
        if backend is None or self.od_config.enforce_eager:
            return False
        pipeline: Any = self.pipeline
        if type(pipeline).compile is not nn.Module.compile:
            logger.info("%s compiles its components with backend %r", type(pipeline).__name__, backend)
            pipeline.compile(backend=backend)
            return True
        components, kinds = declared_components(pipeline), component_kinds(pipeline)
        if not components:
            logger.warning(
                "%s declares no components in %s: nothing is compiled",
                type(pipeline).__name__,
                ", ".join(KINDS),
            )
        for name, component in components.items():
            logger.info("%s is compiled with backend %r at its first call", name, backend)
            arguments = runtime.component_compiler_args(kinds[name])
            options = runtime.compile_options(name, arguments)
            component.compile(backend=backend, fullgraph=True, dynamic=False, options=options)
        return bool(components)

    def _warm_up(self) -> None:
        """Compile for the shapes in the setting `warmup_shapes`, by generating a few steps of each.

        Each shape has the time that its components' graphs may take to compile, besides the time of the start-up.
        """
        shapes = model_settings(self.od_config).get("warmup_shapes") or []
        components = max(1, len(component_kinds(self.pipeline)))
        graph_s = runtime.env.get("OMNI_NEURON_COMPILE_TIMEOUT_S")
        limit = f"OMNI_NEURON_COMPILE_TIMEOUT_S={graph_s} for each of {components} components"
        for request in warmup_requests(shapes, self.pipeline):
            shape = shape_of([request])
            logger.info("warming up %s", shape)
            startup.report_phase(f"compiling for {shape} ({limit})", limit_s=float(graph_s * components))
            self._execute_request_list(
                [request],
                od_config=self.od_config,
                allow_single_output=True,
                require_request_batch_support=False,
                record_name="warm_up",
            )
        startup.report_phase(startup.LOADING)

    def _execute_request_list(self, reqs: Any, **options: Any) -> Any:
        """As the base class; what is compiled meanwhile is named with the requests' shape, and its errors are plain."""
        with runtime.compiling_for(shape_of(reqs)), runtime.compile_errors(type(self.pipeline).__name__):
            return super()._execute_request_list(reqs, **options)

    def _set_default_generator_device(self, sampling_params: Any) -> None:
        """Draw a seeded request's noise on the CPU unless it names a device: the same noise on every platform."""
        if sampling_params.generator is None and sampling_params.generator_device is None:
            sampling_params.generator_device = "cpu"

    def _initialize_generator(self, sampling_params: Any) -> None:
        """As the base class, which keeps a caller's generator; a seed alone gives a CPU generator."""
        self._set_default_generator_device(sampling_params)
        super()._initialize_generator(sampling_params)

    def enable_capture(self, prompt_hash: str = "default") -> None:
        """Write the captured tensors of the following requests under `prompt_hash`, from step 0.

        Raises:
            RuntimeError: the engine was not configured for capture.
        """
        if self.capture is None:
            raise RuntimeError(
                'tensor capture is not configured: start the engine with additional_config={"tensor_capture": '
                '{"modules": ["blocks.0-3.attn1"], "capture_dir": "…"}}'
            )
        self.capture.enable(prompt_hash)

    def disable_capture(self) -> None:
        """Stop writing captured tensors."""
        if self.capture is not None:
            self.capture.disable()
