# SPDX-License-Identifier: Apache-2.0
"""Wan2.2 for vLLM-Omni on Neuron. Names are imported when they are asked for: the pipeline needs vLLM-Omni."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from omni_neuron_wan22.__about__ import __version__

if TYPE_CHECKING:
    from omni_neuron_parallel import DistributedRMSNorm
    from omni_neuron_wan22.checkpoint import WanCheckpoint, load_text_encoder, load_transformer, load_vae
    from omni_neuron_wan22.config import UMT5Config, VaeConfig, WanConfig, WanConfigError
    from omni_neuron_wan22.fp8_settings import Fp8Settings
    from omni_neuron_wan22.mapping import text_encoder_mapping, transformer_mapping, vae_mapping
    from omni_neuron_wan22.pipeline import NeuronWanPipeline
    from omni_neuron_wan22.pipeline_i2v import NeuronWanI2VPipeline
    from omni_neuron_wan22.request import GenerationRequest, RequestError
    from omni_neuron_wan22.scheduler import FlowEulerScheduler, NeuronFlowUniPCMultistepScheduler, make_scheduler
    from omni_neuron_wan22.text_encoder import NeuronTextEncoderWrapper
    from omni_neuron_wan22.tiny import TinyWan, make_tiny_checkpoint
    from omni_neuron_wan22.tiny_fp8 import make_scaled_fp8_checkpoint
    from omni_neuron_wan22.transformer import (
        WanCrossAttention,
        WanFeedForward,
        WanSelfAttention,
        WanTransformer3DModel,
    )
    from omni_neuron_wan22.vae import NeuronAutoencoderKLWan
    from vllm_omni_neuron.sdk import VaeTiling

_HOMES = {
    "omni_neuron_parallel": ["DistributedRMSNorm"],
    "omni_neuron_wan22.checkpoint": ["WanCheckpoint", "load_text_encoder", "load_transformer", "load_vae"],
    "omni_neuron_wan22.config": ["UMT5Config", "VaeConfig", "WanConfig", "WanConfigError"],
    "omni_neuron_wan22.fp8_settings": ["Fp8Settings"],
    "omni_neuron_wan22.mapping": ["text_encoder_mapping", "transformer_mapping", "vae_mapping"],
    "omni_neuron_wan22.pipeline": ["NeuronWanPipeline"],
    "omni_neuron_wan22.pipeline_i2v": ["NeuronWanI2VPipeline"],
    "omni_neuron_wan22.request": ["GenerationRequest", "RequestError"],
    "omni_neuron_wan22.scheduler": ["FlowEulerScheduler", "NeuronFlowUniPCMultistepScheduler", "make_scheduler"],
    "omni_neuron_wan22.text_encoder": ["NeuronTextEncoderWrapper"],
    "omni_neuron_wan22.tiny": ["TinyWan", "make_tiny_checkpoint"],
    "omni_neuron_wan22.tiny_fp8": ["make_scaled_fp8_checkpoint"],
    "omni_neuron_wan22.transformer": [
        "WanCrossAttention",
        "WanFeedForward",
        "WanSelfAttention",
        "WanTransformer3DModel",
    ],
    "omni_neuron_wan22.vae": ["NeuronAutoencoderKLWan"],
    "vllm_omni_neuron.sdk": ["VaeTiling"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "DistributedRMSNorm",
    "FlowEulerScheduler",
    "Fp8Settings",
    "GenerationRequest",
    "NeuronAutoencoderKLWan",
    "NeuronFlowUniPCMultistepScheduler",
    "NeuronTextEncoderWrapper",
    "NeuronWanI2VPipeline",
    "NeuronWanPipeline",
    "RequestError",
    "TinyWan",
    "UMT5Config",
    "VaeConfig",
    "VaeTiling",
    "WanCheckpoint",
    "WanConfig",
    "WanConfigError",
    "WanCrossAttention",
    "WanFeedForward",
    "WanSelfAttention",
    "WanTransformer3DModel",
    "__version__",
    "load_text_encoder",
    "load_transformer",
    "load_vae",
    "make_scaled_fp8_checkpoint",
    "make_scheduler",
    "make_tiny_checkpoint",
    "text_encoder_mapping",
    "transformer_mapping",
    "vae_mapping",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)
