# SPDX-License-Identifier: Apache-2.0
"""What `nki.isa` holds: the instructions, their enumerations and the error of a broken rule."""

from omni_neuron_nkisim.constants import (
    dge_mode,
    dma_engine,
    engine,
    matmul_perf_mode,
    nc_version,
    oob_mode,
    reduce_cmd,
)
from omni_neuron_nkisim.errors import NkiValidationError
from omni_neuron_nkisim.isa.activations import activation, activation_reduce, exponential
from omni_neuron_nkisim.isa.control import (
    core_barrier,
    get_nc_version,
    register_alloc,
    register_load,
    register_move,
    register_store,
    sendrecv,
)
from omni_neuron_nkisim.isa.dma import dma_compute, dma_copy, dma_transpose
from omni_neuron_nkisim.isa.elementwise import (
    memset,
    nc_stream_shuffle,
    reciprocal,
    scalar_tensor_tensor,
    tensor_copy,
    tensor_copy_predicated,
    tensor_scalar,
    tensor_tensor,
    tensor_tensor_scan,
)
from omni_neuron_nkisim.isa.matrix import nc_matmul, nc_matmul_mx, nc_transpose
from omni_neuron_nkisim.isa.mx import quantize_mx
from omni_neuron_nkisim.isa.reductions import bn_aggr, bn_stats, tensor_reduce, tensor_scalar_reduce
from omni_neuron_nkisim.isa.select import affine_select, iota, range_select, select_reduce
from omni_neuron_nkisim.registers import VirtualRegister

__all__ = [
    "NkiValidationError",
    "VirtualRegister",
    "activation",
    "activation_reduce",
    "affine_select",
    "bn_aggr",
    "bn_stats",
    "core_barrier",
    "dge_mode",
    "dma_compute",
    "dma_copy",
    "dma_engine",
    "dma_transpose",
    "engine",
    "exponential",
    "get_nc_version",
    "iota",
    "matmul_perf_mode",
    "memset",
    "nc_matmul",
    "nc_matmul_mx",
    "nc_stream_shuffle",
    "nc_transpose",
    "nc_version",
    "oob_mode",
    "quantize_mx",
    "range_select",
    "reciprocal",
    "reduce_cmd",
    "register_alloc",
    "register_load",
    "register_move",
    "register_store",
    "scalar_tensor_tensor",
    "select_reduce",
    "sendrecv",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_scalar_reduce",
    "tensor_tensor",
    "tensor_tensor_scan",
]
