# SPDX-License-Identifier: Apache-2.0
"""Which way to a device this process takes: decided in one place, and told to Neuron's own packages."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Literal

from omni_neuron_runtime import env

Route = Literal["cpu", "native", "xla"]

# These run on the CPU and are this package's own, registered by entry point.
OWN_BACKENDS = ("neuron_stablehlo", "neuron_check")
NATIVE_BACKEND = "neuron_native"
XLA_BACKEND = "vllm_neuron"


def installed(module: str) -> bool:
    """Whether a package is there to be imported; imports nothing."""
    # Not find_spec alone: it raises for a module that is loaded without a spec.
    return module in sys.modules or importlib.util.find_spec(module) is not None


def device_route() -> Route:
    """How this process computes: on the CPU, through Lite's native backend, or through vllm_neuron's XLA route.

    VLLM_NEURON_BACKEND chooses; unset it is the native route, unless vllm_neuron alone is installed. Imports nothing.

    Raises:
        EnvironmentVariableError: VLLM_NEURON_BACKEND holds an unknown value.
    """
    chosen = env.get("VLLM_NEURON_BACKEND")
    if env.get("VLLM_NEURON_CPU_MODE"):
        return "cpu"
    if chosen is None and not installed("libtorch_neuronx_lite") and installed("vllm_neuron"):
        return "xla"
    return "xla" if chosen == XLA_BACKEND else "native"


def export_route() -> None:
    """Write the native route into the environment in vllm_neuron's words, before one of Neuron's packages is imported.

    vllm_neuron takes the XLA route unless VLLM_NEURON_BACKEND is `neuron_native`, and needs
    VLLM_NEURON_LIBTORCH_NEURONX_LITE=1 beside it; unset and `neuron` mean the native route to us, and not to it.
    Nothing is written in CPU mode, on the XLA route, and where one of our backends is named, an error to come.

    Raises:
        EnvironmentVariableError: VLLM_NEURON_LIBTORCH_NEURONX_LITE=0 contradicts the native route.
    """
    if device_route() != "native" or env.get("VLLM_NEURON_BACKEND") in OWN_BACKENDS:
        return
    if not env.get("VLLM_NEURON_LIBTORCH_NEURONX_LITE"):
        raise env.EnvironmentVariableError(
            f"VLLM_NEURON_LIBTORCH_NEURONX_LITE=0 rules out the native backend, which is libtorch_neuronx_lite's: "
            f"valid is 1 or unset, or 0 with VLLM_NEURON_BACKEND={XLA_BACKEND}"
        )
    os.environ["VLLM_NEURON_BACKEND"] = NATIVE_BACKEND
    os.environ["VLLM_NEURON_LIBTORCH_NEURONX_LITE"] = "1"
