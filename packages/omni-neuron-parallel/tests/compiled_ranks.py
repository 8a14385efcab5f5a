# SPDX-License-Identifier: Apache-2.0
"""What test_compiled_collectives.py runs on each rank."""

from __future__ import annotations

from pathlib import Path

import torch

from omni_neuron_parallel import SequenceShard, Topology, destroy_parallel, get_group, group_place, initialize_parallel
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
