# SPDX-License-Identifier: Apache-2.0
"""What one rank made, for all of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_unflatten

from omni_neuron_parallel.collectives import collective_errors
from omni_neuron_parallel.groups import get_world_group


class _Announced(NamedTuple):
    """Stands for a tensor that follows."""

    shape: torch.Size
    dtype: torch.dtype


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
    if tensor is None and _is_first():
        raise ValueError("rank 0 broadcasts a host tensor, not None")
    return broadcast_nested_from_first(tensor)


def broadcast_nested_from_first(value: Any) -> Any:
    """Global rank 0's tensors in tuples, lists and dicts, however nested, on every rank. Collective over the world.

    Args:
        value: on rank 0 tensors on the host, and whatever can be pickled, such as None; not looked at elsewhere. The
            other ranks need to know nothing of it.

    Returns:
        The same structure, its tensors contiguous and bit for bit; in a world of one `value` itself, made contiguous.

    Raises:
        CollectiveError: a rank died or did not take part.
        ValueError: a tensor that is not on the host.
    """
    world, first = get_world_group(), _is_first()
    leaves, structure = tree_flatten(value) if first else ([], None)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu":
            raise ValueError(f"rank 0 broadcasts a host tensor, not {leaf.device}")
    leaves = [leaf.contiguous() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    if world is None:
        assert structure is not None
        return tree_unflatten(leaves, structure)
    announced = [_Announced(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    header: list[Any] = [(announced, structure)]
    with collective_errors("world", range(dist.get_world_size(world)), dist.get_rank(), "broadcast"):
        dist.broadcast_object_list(header, src=0, group=world)
        announced, structure = header[0]
        if not first:
            leaves = [
                torch.empty(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, _Announced) else leaf
                for leaf in announced
            ]
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                dist.broadcast(leaf, src=0, group=world)
    return tree_unflatten(leaves, structure)


def _is_first() -> bool:
    return get_world_group() is None or dist.get_rank() == 0
