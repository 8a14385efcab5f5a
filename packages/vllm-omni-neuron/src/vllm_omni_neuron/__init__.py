# SPDX-License-Identifier: Apache-2.0
"""The Neuron platform plugin for vLLM-Omni.

vLLM and vLLM-Omni call the three plugin functions below, found by entry point. Importing this package imports neither
of them: vLLM asks for its platform while it is itself being imported. Everything else is loaded on first use.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from vllm_omni_neuron.__about__ import __version__

if TYPE_CHECKING:
    from vllm_omni_neuron.attention import NeuronSDPABackend, NeuronSDPAImpl
    from vllm_omni_neuron.capture import read_step_meta, read_step_tensors
    from vllm_omni_neuron.compilation import warmup_requests
    from vllm_omni_neuron.executor import NeuronMultiprocExecutor, WorkerDiedError, WorkerStartupError
    from vllm_omni_neuron.model_runner import NeuronDiffusionModelRunner
    from vllm_omni_neuron.offload import weights_on_host
    from vllm_omni_neuron.platforms.omni_platform import NeuronOmniPlatform
    from vllm_omni_neuron.platforms.vllm_platform import NeuronPlatform
    from vllm_omni_neuron.registry import RegisteredModel, discover_models
    from vllm_omni_neuron.settings import model_settings
    from vllm_omni_neuron.worker import NeuronDiffusionWorker

__all__ = [
    "NeuronDiffusionModelRunner",
    "NeuronDiffusionWorker",
    "NeuronMultiprocExecutor",
    "NeuronOmniPlatform",
    "NeuronPlatform",
    "NeuronSDPABackend",
    "NeuronSDPAImpl",
    "RegisteredModel",
    "WorkerDiedError",
    "WorkerStartupError",
    "__version__",
    "discover_models",
    "model_settings",
    "neuron_omni_platform_plugin",
    "neuron_platform_plugin",
    "read_step_meta",
    "read_step_tensors",
    "register_neuron_pipelines",
    "warmup_requests",
    "weights_on_host",
]

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)

VLLM_PLATFORM = "vllm_omni_neuron.platforms.vllm_platform.NeuronPlatform"
OMNI_PLATFORM = "vllm_omni_neuron.platforms.omni_platform.NeuronOmniPlatform"

_LAZY = {
    "NeuronDiffusionModelRunner": "model_runner",
    "NeuronDiffusionWorker": "worker",
    "NeuronMultiprocExecutor": "executor",
    "NeuronOmniPlatform": "platforms.omni_platform",
    "NeuronPlatform": "platforms.vllm_platform",
    "NeuronSDPABackend": "attention",
    "NeuronSDPAImpl": "attention",
    "RegisteredModel": "registry",
    "WorkerDiedError": "executor",
    "WorkerStartupError": "executor",
    "discover_models": "registry",
    "model_settings": "settings",
    "read_step_meta": "capture",
    "read_step_tensors": "capture",
    "warmup_requests": "compilation",
    "weights_on_host": "offload",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)


def _loud(plugin: Callable[P, R]) -> Callable[P, R]:
    """Log a failure of `plugin` before it is raised: vLLM and vLLM-Omni swallow a plugin's exception at DEBUG level."""

    @functools.wraps(plugin)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return plugin(*args, **kwargs)
        except Exception:
            logger.exception("vllm-omni-neuron %s: %s failed; Neuron is not available", __version__, plugin.__name__)
            raise

    return wrapped


@_loud
def neuron_omni_platform_plugin() -> str | None:
    """Entry point of `vllm_omni.platform_plugins`: the platform class's path, or None where Neuron is not in play."""
    import omni_neuron_runtime as runtime

    return OMNI_PLATFORM if runtime.is_active() else None


@_loud
def neuron_platform_plugin() -> str | None:
    """Entry point of `vllm.platform_plugins`: the class's path, or None where not in play or `vllm_neuron` answers."""
    import omni_neuron_runtime as runtime

    if not runtime.is_active():
        return None
    runtime.export_route()  # vllm_neuron, which may be imported next, reads it
    # vLLM depends on a library of CUDA kernels that, when imported, builds its launcher in two more Python processes:
    # for every worker again where there is no CUDA to build it with.
    os.environ.setdefault("HUMMING_DISABLE_PARALLEL_BUILD", "1")
    theirs = _platform_entry_point_of_vllm_neuron()
    if theirs is None:
        return VLLM_PLATFORM
    if theirs.name != "neuron":
        return None
    # vLLM keeps one plugin per name, so theirs is never asked while ours carries the same name: ask it ourselves.
    answer: str | None = theirs.load()()
    return answer


def _platform_entry_point_of_vllm_neuron() -> Any:
    from importlib.metadata import entry_points

    for entry_point in entry_points(group="vllm.platform_plugins"):
        if entry_point.module.partition(".")[0] == "vllm_neuron":
            return entry_point
    return None


@_loud
def register_neuron_pipelines() -> None:
    """Entry point of `vllm_omni.general_plugins`: register every model package's pipelines, in every process.

    Does nothing where Neuron is not in play, so that stock vLLM-Omni keeps its own pipelines.
    """
    import omni_neuron_runtime as runtime

    if not runtime.is_active():
        return
    from vllm_omni_neuron.compat import apply_engine_patches, share_vllm_log_handlers
    from vllm_omni_neuron.platforms.vllm_platform import list_visible_devices
    from vllm_omni_neuron.registry import register_models

    list_visible_devices()
    share_vllm_log_handlers()
    apply_engine_patches()
    # A model package's warnings then look like vLLM's, with level and rank.
    used = [model.module for model in register_models() if model.status == "registered"]
    share_vllm_log_handlers(*(module.partition(".")[0] for module in used))
