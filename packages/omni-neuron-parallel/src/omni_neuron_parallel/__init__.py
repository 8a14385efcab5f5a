# SPDX-License-Identifier: Apache-2.0
"""Parallel layers for diffusion models on Neuron, on plain torch.distributed."""

from omni_neuron_parallel.__about__ import __version__
from omni_neuron_parallel.agreement import RankDisagreementError, check_rank_agreement, tensor_digest
from omni_neuron_parallel.context_attention import ContextAttentionStats, context_attention
from omni_neuron_parallel.groups import (
    AxisGroup,
    destroy_parallel,
    get_group,
    get_topology,
    get_world_group,
    initialize_parallel,
    install_groups,
    register_replica_groups,
)
from omni_neuron_parallel.launch import RankError, RankPool, run_on_ranks
from omni_neuron_parallel.layers import (
    ColumnParallelLinear,
    DistributedRMSNorm,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    rms_norm_across_heads,
    shard_size,
)
from omni_neuron_parallel.provider import ParallelProvider
from omni_neuron_parallel.sequence import SequenceShard
from omni_neuron_parallel.softmax_bound import bounded_softmax_is_safe
from omni_neuron_parallel.topology import AXES, Axis, Topology, valid_tensor_parallel_sizes

__all__ = [
    "AXES",
    "Axis",
    "AxisGroup",
    "ColumnParallelLinear",
    "ContextAttentionStats",
    "DistributedRMSNorm",
    "ParallelProvider",
    "QKVParallelLinear",
    "RankDisagreementError",
    "RankError",
    "RankPool",
    "RowParallelLinear",
    "SequenceShard",
    "Topology",
    "VocabParallelEmbedding",
    "__version__",
    "bounded_softmax_is_safe",
    "check_rank_agreement",
    "context_attention",
    "destroy_parallel",
    "get_group",
    "get_topology",
    "get_world_group",
    "initialize_parallel",
    "install_groups",
    "register_replica_groups",
    "rms_norm_across_heads",
    "run_on_ranks",
    "shard_size",
    "tensor_digest",
    "valid_tensor_parallel_sizes",
]
