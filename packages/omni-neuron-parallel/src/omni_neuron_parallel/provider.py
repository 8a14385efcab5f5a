# SPDX-License-Identifier: Apache-2.0
"""What the entry-point group `omni_neuron.parallel` names: the provider that a worker asks for its groups."""

from __future__ import annotations

from omni_neuron_parallel.groups import destroy_parallel
from omni_neuron_parallel.meshes import place_on_fabric
from omni_neuron_parallel.topology import Topology


class ParallelProvider:
    """Parallel groups on plain `torch.distributed`.

    A provider of another distribution offers the same two methods under the same entry-point group.
    """

    def initialize_from_vllm_omni(self, *, tp: int, cp: int, cfg: int, vae_patch: int = 1) -> Topology:
        """Adopt the groups that vLLM-Omni's worker has built; sizes as in its parallel configuration.

        On a trn2, layouts that lie on its physical mesh get new groups there.

        Raises:
            ValueError: `vae_patch` does not divide the world, or groups cannot be routed from the engine's cores.
        """
        from omni_neuron_parallel.vllm_omni_adapter import adopt_vllm_omni_groups

        topology = place_on_fabric(Topology(tp=tp, cp=cp, cfg=cfg, vae_patch=vae_patch))
        adopt_vllm_omni_groups(topology)
        return topology

    def destroy(self) -> None:
        """Forget the groups, before vLLM-Omni destroys the process groups under them."""
        destroy_parallel()
