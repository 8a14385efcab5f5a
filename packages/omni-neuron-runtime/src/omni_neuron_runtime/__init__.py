# SPDX-License-Identifier: Apache-2.0
"""Devices, environment variables, entry-point providers and safetensors weights of Neuron for vLLM-Omni.

The only package of the family that touches Neuron's own ones, in one module, and works without them.
"""

from omni_neuron_runtime import env
from omni_neuron_runtime.__about__ import __version__
from omni_neuron_runtime.compile.artifacts import Artifact, ArtifactCache
from omni_neuron_runtime.compile.counters import COUNTERS, CompileCounters
from omni_neuron_runtime.compile.errors import CompileError, compile_errors
from omni_neuron_runtime.compile.kernel_ops import KernelOp, register_kernel_op
from omni_neuron_runtime.compile.options import Component, compile_options, component_compiler_args
from omni_neuron_runtime.compile.paper import LoweredGraph, declared_world, lower_on_paper
from omni_neuron_runtime.compile.pjrt import execute_on_all_ranks
from omni_neuron_runtime.compile.progress import compiling_for
from omni_neuron_runtime.compile.replica_groups import partition_of
from omni_neuron_runtime.compile.selection import compile_backend_name, get_compile_backend
from omni_neuron_runtime.devices import (
    CORES_OF_A_LOGICAL_CORE,
    CPU_MODE_DEVICE_COUNT,
    check_logical_cores,
    device_count,
    has_neuron_device,
    hbm_bytes_per_core,
    is_active,
    is_cpu_mode,
    parse_core_ranges,
    platform_target,
    visible_cores,
)
from omni_neuron_runtime.env import EnvironmentVariableError, EnvVar
from omni_neuron_runtime.processes import environment_defaults, fork_server, openmp_threads
from omni_neuron_runtime.providers import (
    Provider,
    ProviderError,
    ProviderSet,
    discover_providers,
    distribution_precedence,
)
from omni_neuron_runtime.routes import OWN_BACKENDS, export_route
from omni_neuron_runtime.seam import (
    NeuronPackageError,
    autoload_problem,
    get_dist_backend,
    initialize_device_runtime,
    neuron_packages,
    register_process_group_replica_groups,
    synchronize,
)
from omni_neuron_runtime.weights import (
    CheckpointError,
    LoadResult,
    LoadStats,
    SafetensorsCheckpoint,
    SafetensorsWeightLoader,
    TensorSlice,
    fused_qkv_weight_loader,
    get_weight_loader,
    scaled_bias_loader,
    set_weight_loader,
    sharding_weight_loader,
)

__all__ = [
    "CORES_OF_A_LOGICAL_CORE",
    "COUNTERS",
    "CPU_MODE_DEVICE_COUNT",
    "OWN_BACKENDS",
    "Artifact",
    "ArtifactCache",
    "CheckpointError",
    "CompileCounters",
    "CompileError",
    "Component",
    "EnvVar",
    "EnvironmentVariableError",
    "KernelOp",
    "LoadResult",
    "LoadStats",
    "LoweredGraph",
    "NeuronPackageError",
    "Provider",
    "ProviderError",
    "ProviderSet",
    "SafetensorsCheckpoint",
    "SafetensorsWeightLoader",
    "TensorSlice",
    "__version__",
    "autoload_problem",
    "check_logical_cores",
    "compile_backend_name",
    "compile_errors",
    "compile_options",
    "compiling_for",
    "component_compiler_args",
    "declared_world",
    "device_count",
    "discover_providers",
    "distribution_precedence",
    "env",
    "environment_defaults",
    "execute_on_all_ranks",
    "export_route",
    "fork_server",
    "fused_qkv_weight_loader",
    "get_compile_backend",
    "get_dist_backend",
    "get_weight_loader",
    "has_neuron_device",
    "hbm_bytes_per_core",
    "initialize_device_runtime",
    "is_active",
    "is_cpu_mode",
    "lower_on_paper",
    "neuron_packages",
    "openmp_threads",
    "parse_core_ranges",
    "partition_of",
    "platform_target",
    "register_kernel_op",
    "register_process_group_replica_groups",
    "scaled_bias_loader",
    "set_weight_loader",
    "sharding_weight_loader",
    "synchronize",
    "visible_cores",
]
