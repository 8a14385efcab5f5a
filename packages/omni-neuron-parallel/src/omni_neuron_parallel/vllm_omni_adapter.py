# SPDX-License-Identifier: Apache-2.0
"""The one module that knows vLLM-Omni: take over the groups its worker has built."""

from __future__ import annotations

import torch.distributed as dist

from omni_neuron_parallel.groups import AxisGroup, install_groups
from omni_neuron_parallel.topology import Axis, Topology


def adopt_vllm_omni_groups(topology: Topology) -> None:
    """Install vLLM-Omni's TP, SP and CFG groups as this process's groups. Called after its own initialisation.

    Raises:
        RuntimeError: vLLM-Omni laid a group out otherwise than `topology` does.
    """
    from vllm.distributed.parallel_state import get_tp_group
    from vllm_omni.diffusion.distributed.parallel_state import get_cfg_group, get_sp_group

    rank = dist.get_rank()
    coordinators = {"tp": get_tp_group(), "cp": get_sp_group(), "cfg": get_cfg_group()}
    groups: dict[Axis, AxisGroup] = {}
    for axis, coordinator in coordinators.items():
        expected = topology.group_of(axis, rank)  # type: ignore[arg-type]
        ranks = tuple(coordinator.ranks)
        if ranks != expected:
            raise RuntimeError(
                f"vLLM-Omni's {axis} group of rank {rank} is {list(ranks)}, {topology} makes it {list(expected)}"
            )
        process_group = coordinator.device_group if len(ranks) > 1 else None
        groups[axis] = AxisGroup(axis, ranks, ranks.index(rank), process_group)  # type: ignore[index,arg-type]
    install_groups(topology, groups)
