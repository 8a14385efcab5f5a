# SPDX-License-Identifier: Apache-2.0
"""Which `torch.compile` backend this process uses."""

from __future__ import annotations

import logging

from omni_neuron_runtime import env, seam
from omni_neuron_runtime.compile.kernel_ops import define_for_lite

logger = logging.getLogger(__name__)

# These run on the CPU and are this package's own, registered by entry point.
OWN_BACKENDS = ("neuron_stablehlo", "neuron_check")
_NATIVE_NAMES = ("neuron_native", "neuron")
_XLA_NAME = "vllm_neuron"


def get_compile_backend() -> str | None:
    """Name of the `torch.compile` backend; None in CPU mode unless VLLM_NEURON_BACKEND names one that runs there.

    On a device `neuron_native` and its alias `neuron` are Lite's native backend, which unset means too where Lite is
    installed; `vllm_neuron` is the deprecated XLA route. See docs/compilation.md.

    Raises:
        EnvironmentVariableError: VLLM_NEURON_BACKEND holds an unknown value.
        NeuronPackageError: the package that the backend needs cannot be used, or the backend runs in CPU mode only.
    """
    chosen = env.get("VLLM_NEURON_BACKEND")
    if env.get("VLLM_NEURON_CPU_MODE"):
        return chosen if chosen in OWN_BACKENDS else None
    if chosen in OWN_BACKENDS:
        raise seam.NeuronPackageError(
            f"VLLM_NEURON_BACKEND={chosen} computes on the CPU, and this process runs on a device; set "
            f"VLLM_NEURON_CPU_MODE=1 with it, or take neuron_native"
        )
    if chosen == _XLA_NAME:
        logger.warning(
            "VLLM_NEURON_BACKEND=vllm_neuron is the deprecated XLA route: take neuron_native. Where no level is given "
            "it compiles with --optimization-level=1 and the native route with 2; these packages always give one"
        )
        return seam.vllm_neuron_backend()
    packages = seam.neuron_packages()
    if chosen is None and packages["libtorch_neuronx_lite"] is None and packages["vllm_neuron"] is not None:
        return seam.vllm_neuron_backend()
    backend = seam.register_lite_backend()
    define_for_lite()
    return backend
