# SPDX-License-Identifier: Apache-2.0
"""The one module that knows vLLM-Omni: take over the groups its worker has built, or build them anew on a mesh."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from omni_neuron_parallel.groups import AxisGroup, install_groups, make_group
from omni_neuron_parallel.topology import Axis, MeshAxis, Topology


def adopt_vllm_omni_groups(topology: Topology) -> None:
    """Install vLLM-Omni's TP, SP and CFG groups as this process's groups. Called after its own initialisation.

    Where ranks are laid on a physical mesh, its groups are built anew first. It has no group of the ranks that share
    the VAE's tiles: that one is ours. Collective over the world.

    Raises:
        RuntimeError: vLLM-Omni laid a group out otherwise than `topology` does.
    """
    if topology.placement is not None:
        rebuild_vllm_omni_groups(topology)
    rank = dist.get_rank()
    groups: dict[Axis, AxisGroup] = {}
    for axis, coordinator in _coordinators().items():
        expected = topology.group_of(axis, rank)
        ranks = tuple(coordinator.ranks)
        if ranks != expected:
            raise RuntimeError(
                f"vLLM-Omni's {axis} group of rank {rank} is {list(ranks)}, {topology} makes it {list(expected)}"
            )
        process_group = coordinator.device_group if len(ranks) > 1 else None
        groups[axis] = AxisGroup(axis, ranks, ranks.index(rank), process_group)
    groups["vae_patch"] = make_group("vae_patch", topology.groups("vae_patch"))
    install_groups(topology, groups)


def _coordinators() -> dict[MeshAxis, Any]:
    from vllm.distributed.parallel_state import get_tp_group
    from vllm_omni.diffusion.distributed.parallel_state import get_cfg_group, get_sp_group

    return {"tp": get_tp_group(), "cp": get_sp_group(), "cfg": get_cfg_group()}


def rebuild_vllm_omni_groups(topology: Topology) -> None:
    """Replace vLLM-Omni's SP and CFG groups and vLLM's TP group by those of `topology`. Collective over the world.

    The other groups (data, pipeline) hold one rank each and stay. The degrees within the SP group stay as configured.

    Raises:
        RuntimeError: expert parallelism is on, whose groups follow the order of the ranks.
    """
    from vllm.distributed import parallel_state as vllm_state
    from vllm_omni.diffusion.distributed import parallel_state as omni_state

    if vllm_state._EP is not None:
        raise RuntimeError(
            f"expert parallelism has no groups on the physical mesh of {topology}: VLLM_NEURON_SWITCH_CC=1 lays the "
            f"ranks out in order"
        )
    world = omni_state.get_world_group()
    tp, cp, cfg = ([list(ranks) for ranks in topology.groups(axis)] for axis in ("tp", "cp", "cfg"))
    old = _coordinators()
    backend = dist.get_backend(world.device_group)
    degrees = {
        "sp_ulysses_degree": old["cp"].ulysses_world_size,
        "sp_ring_degree": old["cp"].ring_world_size,
        "sp_allgather_degree": old["cp"].allgather_world_size,
    }
    for coordinator in old.values():
        coordinator.destroy()
    omni_state._CFG = omni_state.init_model_parallel_group(cfg, world.local_rank, backend, "classifier_free_guidance")
    ulysses, ring, allgather = omni_state.set_seq_parallel_pg(
        **degrees, rank=world.rank_in_group, world_size=world.world_size, sp_group_ranks=cp
    )
    omni_state._SP = omni_state.init_model_parallel_group(
        cp, world.local_rank, backend, "sequence", ulysses_group=ulysses, ring_group=ring, allgather_group=allgather
    )
    vllm_state._TP = omni_state.init_model_parallel_group(tp, world.local_rank, backend, "tensor")
    for coordinator in _coordinators().values():
        _gather_in_group_order(coordinator)


def _gather_in_group_order(coordinator: Any) -> None:
    """Let a coordinator whose ranks are not ascending gather host tensors in the order of its ranks, not of c10d's."""
    ascending = sorted(coordinator.ranks)
    if coordinator.ranks == ascending:
        return
    stock, places = coordinator.all_gather, [ascending.index(rank) for rank in coordinator.ranks]

    def all_gather(
        input_: torch.Tensor, dim: int = 0, separate_tensors: bool = False, group: dist.ProcessGroup | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        if input_.device.type != "cpu" or group not in (None, coordinator.device_group, coordinator.cpu_group):
            return stock(input_, dim, separate_tensors, group)
        parts = stock(input_, 0, True, group)
        ordered = [parts[place] for place in places]
        return ordered if separate_tensors else torch.cat(ordered, dim)

    coordinator.all_gather = all_gather
