# SPDX-License-Identifier: Apache-2.0
"""A tensor that one rank made, for all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from omni_neuron_parallel.collectives import collective_errors
from omni_neuron_parallel.groups import get_world_group


def broadcast_from_first(tensor: torch.Tensor | None) -> torch.Tensor:
    """Global rank 0's tensor on every rank, bit for bit. Collective over the world; in a world of one it is returned.

    Args:
        tensor: on the host, on rank 0; not looked at elsewhere. The other ranks need not know its shape.

    Returns:
        The tensor, contiguous and on the host.

    Raises:
        CollectiveError: a rank died or did not take part.
        ValueError: rank 0 has no tensor, or it is not on the host.
    """
    world = get_world_group()
    first = world is None or dist.get_rank() == 0
    if first and (tensor is None or tensor.device.type != "cpu"):
        raise ValueError(f"rank 0 broadcasts a host tensor, not {'None' if tensor is None else tensor.device}")
    if world is None:
        assert tensor is not None
        return tensor.contiguous()
    header: list[Any] = [(tensor.shape, tensor.dtype) if first and tensor is not None else None]
    with collective_errors("world", range(dist.get_world_size(world)), dist.get_rank(), "broadcast"):
        dist.broadcast_object_list(header, src=0, group=world)
        shape, dtype = header[0]
        sent = tensor.contiguous() if first and tensor is not None else torch.empty(shape, dtype=dtype)
        dist.broadcast(sent, src=0, group=world)
    return sent
