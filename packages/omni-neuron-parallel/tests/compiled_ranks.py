# SPDX-License-Identifier: Apache-2.0
"""What test_compiled_collectives.py runs on each rank."""

from __future__ import annotations

from pathlib import Path

import torch
from parallel_ranks import random

from omni_neuron_parallel import (
    AxisGroup,
    SequenceShard,
    Topology,
    context_attention,
    destroy_parallel,
    get_group,
    group_place,
    initialize_parallel,
)
from omni_neuron_runtime import COUNTERS, ArtifactCache, compile_options


def collectives_agree(topology: Topology, backend: str, cache: str) -> dict[str, object]:
    """Run collectives of every axis compiled and eagerly; the largest difference, the counters and the keys."""
    initialize_parallel(topology)
    torch._dynamo.reset()
    COUNTERS.reset()
    groups = [get_group(axis) for axis in ("tp", "cp", "cfg") if topology.size(axis) > 1]
    rank = torch.distributed.get_rank()
    places = [group_place(group) for group in groups]

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for group, place in zip(groups, places, strict=True):
            shard = SequenceShard(7, group.size, group.rank)
            results += [
                group.all_reduce(x),
                group.all_gather(x, 1),
                group.reduce_scatter(x, 0),
                group.start_rotate(x)() + 1,
                shard.gather(shard.split(x[:7], 0, place), 0, group),
            ]
        return results

    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(rank))
    compiled = torch.compile(
        function, backend=backend, fullgraph=True, dynamic=False, options=compile_options("collectives", (), cache)
    )
    with torch.inference_mode():
        pairs = list(zip(compiled(x), function(x), strict=True))
    difference = max(float((got - wanted).abs().max()) for got, wanted in pairs)
    keys = [entry["key"] for entry in ArtifactCache(Path(cache)).entries()]
    destroy_parallel()
    return {"difference": difference, "keys": keys, **COUNTERS.as_dict()}


def masked_attention_agrees(method: str) -> dict[str, object]:
    """Masked context attention compiled and eagerly, over one and two ranks; the largest difference and the counters.

    Two masks a graph: of no joint key in one batch element, and of all.
    """
    initialize_parallel(Topology(cp=2))
    torch._dynamo.reset()
    COUNTERS.reset()
    q, k, v, joint = (random(2, 6, 2, 8, seed=seed + torch.distributed.get_rank()) for seed in (0, 10, 20, 30))
    key_mask = torch.tensor([[True, False, True, True, True, False], [False, True, True, True, True, True]])
    joint_masks = [torch.tensor([[False] * 6, [True] * 5 + [False]]), torch.ones(2, 6, dtype=torch.bool)]
    difference = 0.0
    for group in (AxisGroup("cp"), get_group("cp")):

        def function(joint_mask: torch.Tensor, group: AxisGroup = group) -> torch.Tensor:
            masks = {"key_mask": key_mask, "joint_mask": joint_mask}
            return context_attention(q, k, v, group=group, method=method, joint_kv=(joint, joint), **masks)  # type: ignore[call-overload]

        compiled = torch.compile(
            function, backend="neuron_check", fullgraph=True, dynamic=False, options=compile_options("attention", ())
        )
        with torch.inference_mode():
            for mask in joint_masks:
                difference = max(difference, float((compiled(mask) - function(mask)).abs().max()))
    destroy_parallel()
    return {"difference": difference, **COUNTERS.as_dict()}
