# SPDX-License-Identifier: Apache-2.0
"""Which NeuronCores there are, or that the CPU stands in for them."""

from __future__ import annotations

import glob

from omni_neuron_runtime import env, seam
from omni_neuron_runtime.core_ranges import parse_core_ranges

__all__ = [
    "CORES_OF_A_LOGICAL_CORE",
    "CPU_MODE_DEVICE_COUNT",
    "check_logical_cores",
    "device_count",
    "has_neuron_device",
    "hbm_bytes_per_core",
    "is_active",
    "is_cpu_mode",
    "parse_core_ranges",
    "platform_target",
    "visible_cores",
]

DEVICE_GLOB = "/dev/neuron*"

# In CPU mode a "core" is a process, so any parallel size can be tried and no number is the true one. 64 is the largest
# node that is documented (trn2.48xlarge at two physical cores a logical one). It must not be 0: callers divide by it.
CPU_MODE_DEVICE_COUNT = 64

# Physical NeuronCores of a logical one, NEURON_LOGICAL_NC_CONFIG: what kernels are launched on, and one rank's share.
CORES_OF_A_LOGICAL_CORE = 2
_TARGETS_WITH_LOGICAL_CORES = ("trn2", "trn3")

# GiB of device memory that one rank owns. Chip totals are 32 (two cores) and 96 and 144 (eight physical cores, used in
# pairs, hence four ranks); the figures of the chips are the vendor's, the division is ours.
_HBM_GIB_PER_CORE = {"inf2": 16, "trn1": 16, "trn2": 24, "trn3": 36}


def is_cpu_mode() -> bool:
    """Whether VLLM_NEURON_CPU_MODE=1; it wins over a device that is present."""
    return bool(env.get("VLLM_NEURON_CPU_MODE"))


def has_neuron_device() -> bool:
    """Whether this machine has a Neuron device node (`/dev/neuron*`)."""
    return bool(glob.glob(DEVICE_GLOB))  # noqa: PTH207 (pathlib's glob needs a relative pattern)


def is_active() -> bool:
    """Whether there is anything to run on: a device, or CPU mode."""
    return is_cpu_mode() or has_neuron_device()


def visible_cores() -> list[int] | None:
    """The cores this engine is limited to, in the order given; None where nothing limits it.

    NEURON_VISIBLE_DEVICES counts first, then NEURON_RT_VISIBLE_CORES.

    Raises:
        EnvironmentVariableError: the variable is not a list of cores.
    """
    cores: list[int] | None = env.get("NEURON_VISIBLE_DEVICES")
    return env.get("NEURON_RT_VISIBLE_CORES") if cores is None else cores


def device_count() -> int:
    """How many ranks this machine can hold: the visible cores, else all; 0 where the plugin is not active.

    In CPU mode without visible cores it is `CPU_MODE_DEVICE_COUNT`.

    Raises:
        NeuronPackageError: there is a device, no visible cores are named, and Lite is not there to count them.
    """
    if not is_active():
        return 0
    cores = visible_cores()
    if cores is not None:
        return len(cores)
    return CPU_MODE_DEVICE_COUNT if is_cpu_mode() else seam.device_count()


def platform_target() -> str:
    """The chip generation: "inf2", "trn1", "trn2", "trn3"; "cpu" in CPU mode.

    NEURON_PLATFORM_TARGET_OVERRIDE counts first, in CPU mode too.

    Raises:
        EnvironmentVariableError: the override names no known chip.
        NeuronPackageError: not in CPU mode, no override, and Lite is not there or cannot tell.
    """
    override: str | None = env.get("NEURON_PLATFORM_TARGET_OVERRIDE")
    if override is not None:
        return override
    return "cpu" if is_cpu_mode() else seam.platform_target()


def check_logical_cores() -> None:
    """Refuse logical cores of another size than `CORES_OF_A_LOGICAL_CORE`, on the chips that have them.

    The chip is asked for only where the variable holds another value.

    Raises:
        EnvironmentVariableError: NEURON_LOGICAL_NC_CONFIG is not 2 on a trn2 or trn3.
        NeuronPackageError: it is not 2, and Lite is not there or cannot tell the chip.
    """
    size = env.get("NEURON_LOGICAL_NC_CONFIG")
    if size == CORES_OF_A_LOGICAL_CORE or is_cpu_mode():
        return
    target = platform_target()
    if target in _TARGETS_WITH_LOGICAL_CORES:
        raise env.EnvironmentVariableError(
            f"NEURON_LOGICAL_NC_CONFIG={size} is not supported on {target}: valid is {CORES_OF_A_LOGICAL_CORE}, for "
            f"which kernels, the memory of a rank and the physical mesh are made"
        )


def hbm_bytes_per_core(target: str) -> int:
    """Bytes of device memory that one rank owns on `target`; Lite's own table counts first where it is installed.

    Raises:
        ValueError: `target` is in neither table.
    """
    gigabytes = {**_HBM_GIB_PER_CORE, **seam.hbm_gigabytes()}
    if target not in gigabytes:
        raise ValueError(
            f"no device memory is recorded for platform target {target!r}; known: {', '.join(sorted(gigabytes))}"
        )
    return int(gigabytes[target] * 2**30)
