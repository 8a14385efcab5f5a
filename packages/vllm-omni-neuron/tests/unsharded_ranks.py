# SPDX-License-Identifier: Apache-2.0
"""What test_sdk_unsharded.py runs on each rank. Importable by spawned processes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from omni_neuron_parallel import Topology, destroy_parallel, initialize_parallel
from vllm_omni_neuron.sdk import on_output_rank


class Encoded(NamedTuple):
    ids: torch.Tensor
    nothing: None


def made() -> dict[str, Any]:
    """Tensors of several dtypes and shapes, one of them not contiguous, between other values."""
    assert not dist.is_initialized() or dist.get_rank() == 0
    values = torch.arange(6).reshape(2, 3)
    return {"ids": Encoded(values.mT, None), "states": [values.bfloat16() / 7, values[:0] > 0], "length": 6}


def broadcast(device: str) -> Any:
    initialize_parallel(Topology(tp=2))
    value = on_output_rank(made, device)
    destroy_parallel()
    return value


def failing() -> str:
    def fail() -> None:
        raise ValueError("no such prompt")

    initialize_parallel(Topology(tp=2))
    try:
        on_output_rank(fail)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        destroy_parallel()
    return ""
