# SPDX-License-Identifier: Apache-2.0
"""The platform class for vLLM itself.

vLLM resolves it during `import vllm`, so this module imports nothing of vLLM but `vllm.platforms.interface`, and
nothing of vLLM-Omni.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import torch
from vllm.platforms.interface import Platform, PlatformEnum

import omni_neuron_runtime as runtime

# A process on a device runs one rank, which its worker binds to one core before the runtime starts. The runtime numbers
# the cores that a process sees from 0, so the index is 0 on every rank, and a core's own number is never an index.
DEVICE_INDEX = 0


def list_visible_devices() -> None:
    """Write the visible cores out in NEURON_VISIBLE_DEVICES, `0-3,7` as `0,1,2,3,7`.

    vLLM-Omni splits that variable at commas, and does not know NEURON_RT_VISIBLE_CORES, which counts where the former
    is unset.
    """
    cores = runtime.visible_cores()
    if cores is not None:
        os.environ["NEURON_VISIBLE_DEVICES"] = ",".join(str(core) for core in cores)


class NeuronPlatform(Platform):
    """NeuronCores, or this machine's CPU in CPU mode, as vLLM sees them.

    The class carries the documented names; an instance made in CPU mode calls its device "cpu", because vLLM and
    vLLM-Omni build `torch.device` and autocast contexts from an instance's `device_name` and `device_type`.
    """

    _enum = PlatformEnum.OOT
    device_name: str = "neuron"
    device_type: str = "neuron"
    dispatch_key: str = "PrivateUse1"
    device_control_env_var: str = "NEURON_VISIBLE_DEVICES"
    simple_compile_backend: str = "eager"
    dist_backend: str = "gloo"

    def __init__(self) -> None:
        list_visible_devices()
        self.dist_backend = runtime.get_dist_backend()
        if runtime.is_cpu_mode():
            self.device_name = "cpu"
            self.device_type = "cpu"
            self.dispatch_key = "CPU"

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """In order of preference."""
        return [torch.bfloat16, torch.float32, torch.float16]

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """`cpu`, or the Neuron target such as `trn2`."""
        return "cpu" if runtime.is_cpu_mode() else runtime.platform_target()

    @classmethod
    def get_device_uuid(cls, device_id: int = 0) -> str:
        """Name of one core on this machine."""
        return f"{cls.get_device_name()}-{device_id}"

    @classmethod
    def get_device_count(cls) -> int:
        """Cores that this process may use; never zero, because vLLM-Omni computes `rank % count`."""
        return max(1, runtime.device_count())

    @classmethod
    def device_count(cls) -> int:
        """The name under which vLLM looks for `get_device_count`."""
        return cls.get_device_count()

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes of one core's memory; in CPU mode of the machine's."""
        if runtime.is_cpu_mode():
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return runtime.hbm_bytes_per_core(runtime.platform_target())

    @classmethod
    def get_current_memory_usage(cls, device: torch.types.Device | None = None) -> float:
        """Bytes in use: this process's resident memory in CPU mode, unknown (0) on a device."""
        if not runtime.is_cpu_mode():
            return 0.0
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
        return float(resident_pages * os.sysconf("SC_PAGE_SIZE"))

    @classmethod
    def max_memory_allocated(cls, device: torch.types.Device | None = None) -> int:
        """Bytes at the peak: this process's resident memory in CPU mode, unknown (0) on a device."""
        if not runtime.is_cpu_mode():
            return 0
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    @classmethod
    def max_memory_reserved(cls, device: torch.types.Device | None = None) -> int:
        """As `max_memory_allocated`: there is no caching allocator to tell apart."""
        return cls.max_memory_allocated(device)

    @classmethod
    def memory_allocated(cls, device: torch.types.Device | None = None) -> int:
        """As `get_current_memory_usage`, in whole bytes."""
        return int(cls.get_current_memory_usage(device))

    @classmethod
    def reset_peak_memory_stats(cls, device: torch.types.Device | None = None) -> None:
        """The kernel keeps a process's peak for good, so there is nothing to reset."""

    @classmethod
    def empty_cache(cls) -> None:
        """There is no caching allocator."""

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """Ranks own their cores through NEURON_RT_VISIBLE_CORES, set before the runtime starts, not per call."""

    @classmethod
    def is_initialized(cls) -> bool:
        """Whether the device is registered with torch in this process; the CPU always is."""
        return runtime.is_cpu_mode() or hasattr(torch, "neuron")

    @classmethod
    def current_device(cls) -> int:
        """Torch's index of this process's device; see `DEVICE_INDEX`."""
        return DEVICE_INDEX

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """Pinned memory needs an accelerator that torch knows."""
        return False

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Seed torch's generator; noise is drawn on the CPU."""
        torch.manual_seed(seed)

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Gloo on the CPU; torch.distributed through the platform's backend elsewhere."""
        if runtime.is_cpu_mode():
            return "vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator"
        return "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"

    @classmethod
    def import_kernels(cls) -> None:
        """vLLM's own kernels are CUDA's; there is nothing to import."""

    @classmethod
    def import_ir_kernels(cls) -> None:
        """The native implementations are the only ones that run here."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Nothing to change: diffusion does not use vLLM's own workers."""

    @classmethod
    def use_custom_op_collectives(cls) -> bool:
        """Collectives stay plain torch.distributed calls."""
        return False
