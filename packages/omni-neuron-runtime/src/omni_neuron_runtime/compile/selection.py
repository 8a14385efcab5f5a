# SPDX-License-Identifier: Apache-2.0
"""Which `torch.compile` backend this process uses."""

from __future__ import annotations

import logging

from omni_neuron_runtime import env, seam
from omni_neuron_runtime.compile.kernel_ops import define_for_lite, define_for_torch
from omni_neuron_runtime.routes import NATIVE_BACKEND, OWN_BACKENDS, XLA_BACKEND, device_route

logger = logging.getLogger(__name__)

_NO_FALLBACK = "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION"


def compile_backend_name() -> str | None:
    """What compiles: None, one of ours, `neuron_native` or `vllm_neuron`. Imports and registers nothing.

    For checks in a process that must not touch the device; `get_compile_backend` makes the backend ready, and may call
    it otherwise.

    Raises:
        EnvironmentVariableError: VLLM_NEURON_BACKEND holds an unknown value.
        NeuronPackageError: it names one that runs in CPU mode only, and this is a device.
    """
    chosen, route = env.get("VLLM_NEURON_BACKEND"), device_route()
    if route == "cpu":
        return chosen if chosen in OWN_BACKENDS else None
    if chosen in OWN_BACKENDS:
        raise seam.NeuronPackageError(
            f"VLLM_NEURON_BACKEND={chosen} computes on the CPU, and this process runs on a device; set "
            f"VLLM_NEURON_CPU_MODE=1 with it, or take {NATIVE_BACKEND}"
        )
    return NATIVE_BACKEND if route == "native" else XLA_BACKEND


def get_compile_backend() -> str | None:
    """Name of the `torch.compile` backend; None in CPU mode unless VLLM_NEURON_BACKEND names one that runs there.

    On a device `neuron_native` and its alias `neuron` are Lite's native backend, which unset means too where Lite is
    installed; `vllm_neuron` is the deprecated XLA route. See docs/compilation.md.

    Raises:
        EnvironmentVariableError: VLLM_NEURON_BACKEND holds an unknown value.
        NeuronPackageError: the package that the backend needs cannot be used, or the backend runs in CPU mode only.
    """
    name = compile_backend_name()
    if name == NATIVE_BACKEND:
        backend = seam.register_lite_backend()
        if env.is_set(_NO_FALLBACK) and env.get(_NO_FALLBACK) != "1":
            logger.warning(
                "%s=%s: a graph that does not compile is run op by op instead, and nobody is told; set 1",
                _NO_FALLBACK,
                env.get(_NO_FALLBACK),
            )
        define_for_lite()
        return backend
    if name != XLA_BACKEND:
        return name
    if env.is_set("VLLM_NEURON_BACKEND"):
        logger.warning(
            "VLLM_NEURON_BACKEND=vllm_neuron is the deprecated XLA route: take neuron_native. Where no level is given "
            "it compiles with --optimization-level=1 and the native route with 2; these packages always give one"
        )
    backend = seam.vllm_neuron_backend()
    define_for_torch()
    return backend
