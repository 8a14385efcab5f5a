# SPDX-License-Identifier: Apache-2.0
"""Context attention on real ranks (importable by spawned processes) and on emulated ones, threads of this process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from parallel_ranks import random

from omni_neuron_parallel import AxisGroup, ContextAttentionStats, SequenceShard, context_attention, get_group
from omni_neuron_parallel.groups import get_partition

DEADLINE = 60.0


@dataclass(frozen=True)
class Exchange:
    size: int
    barrier: threading.Barrier
    slots: dict[int, torch.Tensor] = field(default_factory=dict)
    links: dict[int, queue.Queue[torch.Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class EmulatedGroup(AxisGroup):
    """The two collectives that context attention needs, among threads."""

    exchange: Any = None

    def __post_init__(self) -> None:
        pass

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        self.exchange.slots[self.rank] = tensor
        self.exchange.barrier.wait()
        joined = torch.cat([self.exchange.slots[rank] for rank in self.ranks], dim)
        self.exchange.barrier.wait()
        return joined

    def start_rotate(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        self.exchange.links[(self.rank + 1) % self.size].put(tensor)
        return lambda: self.exchange.links[self.rank].get(timeout=DEADLINE)


def run_emulated(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(group, *arguments)` on every one of `size` emulated ranks; the results in rank order."""
    exchange = Exchange(size, threading.Barrier(size, timeout=DEADLINE))
    exchange.links.update({rank: queue.Queue() for rank in range(size)})
    groups = [EmulatedGroup("cp", tuple(range(size)), rank, exchange=exchange) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda group: function(group, *arguments), groups))


def split_attention(
    group: AxisGroup, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, ContextAttentionStats]:
    """Whole tensors in, whole output and lse out; pads hold garbage. `options` go to `context_attention`, `key_mask`
    of them for the whole sequence."""
    stats = ContextAttentionStats()
    queries = SequenceShard(q.shape[1], group.size, group.rank)
    keys = SequenceShard(k.shape[1], group.size, group.rank)
    local_k, local_v = keys.split(k, 1), keys.split(v, 1)
    for local in (local_k, local_v):
        local[:, keys.valid_length :] = torch.nan
    if "key_mask" in options:
        # Pads count as valid here: `kv_length` is what keeps them out.
        key_mask = keys.split(options["key_mask"], 1)
        key_mask[:, keys.valid_length :] = True
        options = {**options, "key_mask": key_mask}
    output, lse = context_attention(
        queries.split(q, 1),
        local_k,
        local_v,
        group=group,
        return_lse=True,
        stats=stats,
        **{"kv_length": k.shape[1], **options},
    )
    return queries.gather(output, 1, group), queries.gather(lse, 2, group), stats


def refusal(*arguments: Any) -> str:
    """Why `split_attention` raises a ValueError; empty where it does not."""
    try:
        split_attention(*arguments)
    except ValueError as error:
        return str(error)
    return ""


def on_real_ranks(*arguments: Any) -> Any:
    return split_attention(get_group("cp"), *arguments)


def rotated_ranks() -> list[int]:
    """Who was in this rank's place before 1, 2, … rotations, in a group whose order is not that of the ranks."""
    group = get_group("cp")
    place = len(group.ranks) - 1 - group.rank
    reversed_group = AxisGroup("cp", group.ranks[::-1], place, group.process_group)
    block, seen = torch.tensor([group.ranks[group.rank]]), []
    for _ in range(group.size):
        block = reversed_group.start_rotate(block)()
        seen.append(int(block))
    return seen


def partition_of(axis: str) -> tuple[tuple[int, ...], ...]:
    return get_partition(get_group(axis))


def gathered_shard(length: int) -> list[torch.Tensor]:
    group = get_group("cp")
    shard = SequenceShard(length, group.size, group.rank)
    whole = random(2, length, 3, seed=0)
    return [shard.gather(shard.split(whole, 1), 1, group), shard.gather(shard.split(whole.mT, -1), -1, group).mT]


def cross_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Queries of this rank over whole keys: a group of one, which has nothing to communicate with."""
    group = get_group("cp")
    shard = SequenceShard(q.shape[1], group.size, group.rank)
    return shard.gather(context_attention(shard.split(q, 1), k, v, group=AxisGroup("cp")), 1, group)
