# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni's groups as our groups, on every rank. Importable by spawned processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from omni_neuron_parallel import ParallelProvider, Topology, get_group, get_topology
from omni_neuron_parallel.vllm_omni_adapter import adopt_vllm_omni_groups

OMNI_SIZES = {
    "tp": {"tensor_parallel_size": 2},
    "cp": {"sequence_parallel_size": 2, "ring_degree": 2},
    "cfg": {"cfg_parallel_size": 2},
}


def adopted(axis: str, placement: tuple[int, ...] | None) -> dict[str, Any]:
    """The group of `axis` in a world of two: what vLLM-Omni's coordinator and our group say and gather."""
    from vllm.distributed import parallel_state as vllm_state
    from vllm_omni.diffusion.distributed import parallel_state

    rank = dist.get_rank()
    parallel_state.init_distributed_environment(world_size=2, rank=rank, local_rank=rank, backend="gloo")
    parallel_state.initialize_model_parallel(**OMNI_SIZES[axis], backend="gloo")
    provider = ParallelProvider()
    sizes = {**dict.fromkeys(OMNI_SIZES, 1), axis: 2}
    if placement is None:
        provider.initialize_from_vllm_omni(**sizes, vae_patch=2)
    else:  # what the provider does on a trn2
        adopt_vllm_omni_groups(Topology(**sizes, vae_patch=2, placement=placement))
    coordinator = {
        "tp": vllm_state.get_tp_group,
        "cp": parallel_state.get_sp_group,
        "cfg": parallel_state.get_cfg_group,
    }[axis]()
    group, own = get_group(axis), torch.tensor([[float(rank)]])
    seen = {
        "ranks": (list(coordinator.ranks), list(group.ranks)),
        "place": (coordinator.rank_in_group, group.rank, get_topology().coordinates(rank)[axis]),  # type: ignore[index]
        "shared": coordinator.device_group is group.process_group,
        "separate": [part.tolist() for part in coordinator.all_gather(own, separate_tensors=True)],
        "joined": coordinator.all_gather(own, dim=1).tolist(),
        "ours": group.all_gather(own, dim=1).tolist(),
        "degrees": (parallel_state.get_ring_parallel_world_size(), parallel_state.get_ulysses_parallel_world_size()),
        "others": [get_group(name).size for name in ("tp", "cp", "cfg") if name != axis],
        "decode": get_group("vae_patch").ranks,
    }
    provider.destroy()
    parallel_state.destroy_model_parallel()
    return seen
