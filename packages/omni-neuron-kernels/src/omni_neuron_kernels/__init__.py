# SPDX-License-Identifier: Apache-2.0
"""NKI kernels for diffusion transformers, each with a torch reference and a dispatcher that says which one runs."""

from omni_neuron_kernels.__about__ import __version__
from omni_neuron_kernels.dispatch import ENTRY_POINT_GROUP, Choice, Implementation, explain
from omni_neuron_kernels.graph_ops import ring_refusal
from omni_neuron_kernels.ops import adaln_modulate, gated_mlp, mlp, output_projection, rms_norm
from omni_neuron_kernels.ops_attention import flash_attention, ring_attention
from omni_neuron_kernels.ops_convolution import causal_conv3d
from omni_neuron_kernels.ops_fp8 import (
    adaln_modulate_fp8,
    fp8_mlp,
    fp8_output_projection,
    fp8_qkv_projection,
    pack_fp8_weight,
    quantize_mx,
    row_quantize,
)
from omni_neuron_kernels.ops_projection import qkv_projection
from omni_neuron_kernels.reference_attention import RingAttention, RingGroup, log_sum_exp
from omni_neuron_kernels.reference_fp8 import NativeFp8Error, scale_rule
from omni_neuron_kernels.reference_projection import rotate_pairs
from omni_neuron_kernels.softmax_regimes import (
    KeyStatistics,
    bounded_softmax_is_safe,
    head_abs_max,
    head_norm_max,
    key_statistics,
    softmax_regimes,
)

__all__ = [
    "ENTRY_POINT_GROUP",
    "Choice",
    "Implementation",
    "KeyStatistics",
    "NativeFp8Error",
    "RingAttention",
    "RingGroup",
    "__version__",
    "adaln_modulate",
    "adaln_modulate_fp8",
    "bounded_softmax_is_safe",
    "causal_conv3d",
    "explain",
    "flash_attention",
    "fp8_mlp",
    "fp8_output_projection",
    "fp8_qkv_projection",
    "gated_mlp",
    "head_abs_max",
    "head_norm_max",
    "key_statistics",
    "log_sum_exp",
    "mlp",
    "output_projection",
    "pack_fp8_weight",
    "qkv_projection",
    "quantize_mx",
    "ring_attention",
    "ring_refusal",
    "rms_norm",
    "rotate_pairs",
    "row_quantize",
    "scale_rule",
    "softmax_regimes",
]
