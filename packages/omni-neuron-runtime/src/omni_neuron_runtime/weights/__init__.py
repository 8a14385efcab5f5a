# SPDX-License-Identifier: Apache-2.0
"""Safetensors checkpoints, read shard by shard: a rank reads its own slices and nothing else."""

from __future__ import annotations

from omni_neuron_runtime.weights.checkpoint import LoadResult, LoadStats, SafetensorsCheckpoint
from omni_neuron_runtime.weights.files import CheckpointError
from omni_neuron_runtime.weights.loaders import (
    SafetensorsWeightLoader,
    TensorSlice,
    fused_qkv_weight_loader,
    get_weight_loader,
    scaled_bias_loader,
    set_weight_loader,
    sharding_weight_loader,
)

__all__ = [
    "CheckpointError",
    "LoadResult",
    "LoadStats",
    "SafetensorsCheckpoint",
    "SafetensorsWeightLoader",
    "TensorSlice",
    "fused_qkv_weight_loader",
    "get_weight_loader",
    "scaled_bias_loader",
    "set_weight_loader",
    "sharding_weight_loader",
]
