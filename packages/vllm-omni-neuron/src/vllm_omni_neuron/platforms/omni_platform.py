# SPDX-License-Identifier: Apache-2.0
"""The platform class for vLLM-Omni."""

from __future__ import annotations

import torch
from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

import omni_neuron_runtime as runtime
from vllm_omni_neuron.platforms.vllm_platform import DEVICE_INDEX, NeuronPlatform
from vllm_omni_neuron.registry import declare_output_types

# What `--diffusion-attention-backend` may name here; all of them are torch's scaled_dot_product_attention.
ATTENTION_BACKENDS = ("TORCH_SDPA",)


class NeuronOmniPlatform(NeuronPlatform, OmniPlatform):
    """NeuronCores, or this machine's CPU in CPU mode, as vLLM-Omni's diffusion engine sees them."""

    _omni_enum = OmniPlatformEnum.OOT

    def __init__(self) -> None:
        super().__init__()
        # vLLM-Omni asks for a model's output type after it resolves its platform and before it loads plugins.
        declare_output_types()

    @classmethod
    def get_diffusion_worker_cls(cls) -> str:
        """Path of the worker class."""
        return "vllm_omni_neuron.worker.NeuronDiffusionWorker"

    @classmethod
    def get_diffusion_model_runner_cls(cls) -> str:
        """Path of the model runner class."""
        return "vllm_omni_neuron.model_runner.NeuronDiffusionModelRunner"

    @classmethod
    def get_omni_ar_worker_cls(cls) -> str:
        """Refused: this plugin runs diffusion stages only."""
        raise NotImplementedError(
            "vllm-omni-neuron runs diffusion stages only; autoregressive stages are not supported"
        )

    @classmethod
    def get_omni_generation_worker_cls(cls) -> str:
        """Refused: this plugin runs diffusion stages only."""
        raise NotImplementedError("vllm-omni-neuron runs diffusion stages only; generation stages are not supported")

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        """Path of the attention backend, for models that use vLLM-Omni's attention layer.

        Raises:
            ValueError: a backend that this platform cannot run was selected.
        """
        if selected_backend is not None and selected_backend.upper() not in ATTENTION_BACKENDS:
            known = selected_backend.upper() in DiffusionAttentionBackendEnum.__members__
            problem = "does not run on Neuron" if known else "is unknown"
            choices = " or ".join(ATTENTION_BACKENDS)
            raise ValueError(f"diffusion attention backend {selected_backend!r} {problem}; choose {choices}, or none")
        return "vllm_omni_neuron.attention.NeuronSDPABackend"

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        """Inductor is never used: compilation goes through `get_compile_backend`."""
        return False

    @classmethod
    def get_compile_backend(cls) -> str | None:
        """Name of the `torch.compile` backend; None in CPU mode, where nothing is compiled."""
        return runtime.get_compile_backend()

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        """The folder that vLLM-Omni would look in; its own, as we ship none."""
        return "vllm_omni/model_executor/stage_configs"

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        """`cpu` in CPU mode, else this process's one core, whatever its rank; see `DEVICE_INDEX`."""
        return torch.device("cpu") if runtime.is_cpu_mode() else torch.device("neuron", DEVICE_INDEX)

    @classmethod
    def get_device_version(cls) -> str | None:
        """The Neuron target, such as `trn2`; None in CPU mode."""
        return None if runtime.is_cpu_mode() else runtime.platform_target()

    @classmethod
    def synchronize(cls) -> None:
        """Wait for queued device work, where torch's Neuron module can; the CPU has none."""
        if not runtime.is_cpu_mode():
            runtime.synchronize()

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        """Bytes not in use; a core's whole memory on a device, whose runtime does not tell."""
        total = cls.get_device_total_memory()
        return total - int(cls.get_current_memory_usage(device))

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        """Free and total bytes."""
        return cls.get_free_memory(device), cls.get_device_total_memory()

    @classmethod
    def memory_reserved(cls, device: torch.device | int | None = None) -> int:
        """Bytes that this process holds."""
        return cls.memory_allocated()

    @classmethod
    def supports_cpu_offload(cls) -> bool:
        """No: vLLM-Omni's offloaders stream through CUDA. A configuration that asks for it gets their warning."""
        return False

    @classmethod
    def supports_float64(cls) -> bool:
        """Neuron has no float64."""
        return runtime.is_cpu_mode()
