# SPDX-License-Identifier: Apache-2.0
"""Parallel layers for diffusion models on Neuron, on plain torch.distributed."""

from omni_neuron_kernels import bounded_softmax_is_safe
from omni_neuron_parallel.__about__ import __version__
from omni_neuron_parallel.agreement import RankDisagreementError, check_rank_agreement, tensor_digest
from omni_neuron_parallel.broadcast import broadcast_from_first, broadcast_nested_from_first
from omni_neuron_parallel.cfg import (
    NeuronCFGParallelMixin,
    check_cfg_parallel_size,
    gather_branches,
    warn_of_idle_cfg_ranks,
)
from omni_neuron_parallel.collectives import CollectiveError, collective_permute, collective_step
from omni_neuron_parallel.context_attention import ContextAttentionStats, ContextMethod, context_attention
from omni_neuron_parallel.embeddings import RotaryTables, sinusoidal_embedding
from omni_neuron_parallel.groups import (
    AxisGroup,
    destroy_parallel,
    get_group,
    get_topology,
    get_world_group,
    initialize_parallel,
    install_groups,
    register_group,
    register_replica_groups,
)
from omni_neuron_parallel.launch import RankError, RankPool, run_on_ranks
from omni_neuron_parallel.layers import (
    ColumnParallelLinear,
    DistributedRMSNorm,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    group_place,
    rms_norm_across_heads,
    shard_size,
)
from omni_neuron_parallel.meshes import (
    TRN2_ROWS,
    has_physical_mesh,
    mesh_is_in_force,
    place_on_fabric,
    place_on_mesh,
    routes_on_trn2,
    unroutable_groups,
)
from omni_neuron_parallel.patch_parallel import run_tiles
from omni_neuron_parallel.provider import ParallelProvider
from omni_neuron_parallel.sequence import SequenceParallel, SequenceShard
from omni_neuron_parallel.split_tokens import SplitTokens
from omni_neuron_parallel.tiles import TilePlan, assign_tiles, stitch_tiles
from omni_neuron_parallel.topology import (
    AXES,
    MESH_AXES,
    Axis,
    MeshAxis,
    Partition,
    Topology,
    expand_to_partition,
    valid_tensor_parallel_sizes,
)

__all__ = [
    "AXES",
    "MESH_AXES",
    "TRN2_ROWS",
    "Axis",
    "AxisGroup",
    "CollectiveError",
    "ColumnParallelLinear",
    "ContextAttentionStats",
    "ContextMethod",
    "DistributedRMSNorm",
    "MeshAxis",
    "NeuronCFGParallelMixin",
    "ParallelProvider",
    "Partition",
    "QKVParallelLinear",
    "RMSNorm",
    "RankDisagreementError",
    "RankError",
    "RankPool",
    "RotaryTables",
    "RowParallelLinear",
    "SequenceParallel",
    "SequenceShard",
    "SplitTokens",
    "TilePlan",
    "Topology",
    "VocabParallelEmbedding",
    "__version__",
    "assign_tiles",
    "bounded_softmax_is_safe",
    "broadcast_from_first",
    "broadcast_nested_from_first",
    "check_cfg_parallel_size",
    "check_rank_agreement",
    "collective_permute",
    "collective_step",
    "context_attention",
    "destroy_parallel",
    "expand_to_partition",
    "gather_branches",
    "get_group",
    "get_topology",
    "get_world_group",
    "group_place",
    "has_physical_mesh",
    "initialize_parallel",
    "install_groups",
    "mesh_is_in_force",
    "place_on_fabric",
    "place_on_mesh",
    "register_group",
    "register_replica_groups",
    "rms_norm_across_heads",
    "routes_on_trn2",
    "run_on_ranks",
    "run_tiles",
    "shard_size",
    "sinusoidal_embedding",
    "stitch_tiles",
    "tensor_digest",
    "unroutable_groups",
    "valid_tensor_parallel_sizes",
    "warn_of_idle_cfg_ranks",
]
