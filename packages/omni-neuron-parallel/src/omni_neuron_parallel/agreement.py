# SPDX-License-Identifier: Apache-2.0
"""Do all ranks hold the same tensor? Checked, because a difference is silent until the video is wrong."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from omni_neuron_parallel.collectives import collective_errors
from omni_neuron_parallel.groups import get_world_group


class RankDisagreementError(RuntimeError):
    """Ranks hold different values of a tensor that must be the same everywhere."""


def tensor_digest(tensor: torch.Tensor) -> str:
    """A hexadecimal SHA-256 over shape, dtype and every bit of `tensor`."""
    values = tensor.detach().cpu().contiguous()
    header = f"{tuple(values.shape)} {values.dtype}".encode()
    return hashlib.sha256(header + values.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def check_rank_agreement(tensor: torch.Tensor, what: str) -> None:
    """Compare `tensor` bit for bit over all ranks. Collective over the world; nothing to do in a world of one.

    Raises:
        CollectiveError: a rank died or did not take part.
        RankDisagreementError: on every rank, naming `what` and which ranks hold which digest.
    """
    world = get_world_group()
    if world is None:
        return
    digests: list[str] = [""] * dist.get_world_size(world)
    with collective_errors("world", range(len(digests)), dist.get_rank(), f"comparison of {what}"):
        dist.all_gather_object(digests, tensor_digest(tensor), group=world)
    if len(set(digests)) > 1:
        holders = {digest: [rank for rank, other in enumerate(digests) if other == digest] for digest in digests}
        listing = "; ".join(f"ranks {ranks}: {digest[:12]}" for digest, ranks in holders.items())
        raise RankDisagreementError(f"{what} differs between ranks: {listing}")
