# SPDX-License-Identifier: Apache-2.0
"""What the launches of NKI kernels share: modules of kernels, sizes, vectors, checks of dtypes."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from omni_neuron_runtime import CORES_OF_A_LOGICAL_CORE, check_logical_cores

CORES = CORES_OF_A_LOGICAL_CORE  # the grid of every launch
DTYPES = (torch.float32, torch.bfloat16)
# What lies on chip at once, per partition, of trn2's 224 KiB; the rest is for tiles in flight.
SBUF_BYTES = 192 * 1024


def kernels_of(module: str) -> Any:
    """A module of `nki_kernels`. They import `nki`, so this is for when a kernel is about to run.

    Raises:
        EnvironmentVariableError: NEURON_LOGICAL_NC_CONFIG says that a logical core is not `CORES` cores.
    """
    check_logical_cores()
    return importlib.import_module(f"omni_neuron_kernels.nki_kernels.{module}")


def vector_row(vector: torch.Tensor) -> torch.Tensor:
    """A vector as kernels take it: float32 `[1, F]`, contiguous."""
    return vector.float().reshape(1, -1).contiguous()


def dtype_limit(**tensors: torch.Tensor) -> str | None:
    """Why these dtypes are not for a kernel: it takes float32 or bfloat16, the same for all."""
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    if len(set(dtypes.values())) > 1 or not set(dtypes.values()) <= set(DTYPES):
        given = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        return f"{given}: one of torch.float32 and torch.bfloat16 for all"
    return None
