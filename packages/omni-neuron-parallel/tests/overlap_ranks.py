# SPDX-License-Identifier: Apache-2.0
"""What one ring attention does on a rank, in order, seen at torch's collectives. Importable by spawned processes."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from parallel_ranks import random

from omni_neuron_parallel import SequenceShard, context_attention, get_group
from omni_neuron_parallel.softmax_sums import HeadSums

Event = tuple[str, int]

OPS = torch.ops._c10d_functional


def ring_events(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> list[Event]:
    """(what, bytes received from other ranks) for every collective, wait and block of keys, in order."""
    group = get_group("cp")
    shard = SequenceShard(tokens, group.size, group.rank)
    q, k, v = (shard.split(random(1, tokens, heads, dim, seed=seed), 1).to(dtype) for seed in (1, 2, 3))
    events: list[Event] = []
    exchange, gather, wait, add = OPS.all_to_all_single, OPS.all_gather_into_tensor, OPS.wait_tensor, HeadSums.add

    def recorded_exchange(sent: torch.Tensor, rows: list[int], rows_sent: list[int], name: str) -> torch.Tensor:
        received = exchange(sent, rows, rows_sent, name)
        others = received.shape[0] - rows[group.rank]
        events.append(("start", others * received[0].nbytes))
        return received

    def recorded_gather(sent: torch.Tensor, *arguments: Any) -> torch.Tensor:
        gathered = gather(sent, *arguments)
        events.append(("gather", gathered.nbytes - sent.nbytes))
        return gathered

    def recorded_wait(tensor: torch.Tensor) -> torch.Tensor:
        events.append(("wait", 0))
        return wait(tensor)

    def recorded_add(self: HeadSums, *block: Any) -> None:
        events.append(("compute", 0))
        add(self, *block)

    with (
        patch.object(OPS, "all_to_all_single", recorded_exchange),
        patch.object(OPS, "all_gather_into_tensor", recorded_gather),
        patch.object(OPS, "wait_tensor", recorded_wait),
        patch.object(HeadSums, "add", recorded_add),
    ):
        context_attention(q, k, v, group=group, method="ring")
    return events
