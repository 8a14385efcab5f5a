# SPDX-License-Identifier: Apache-2.0
"""NKI kernels for diffusion transformers, each with a torch reference and a dispatcher that says which one runs."""

from omni_neuron_kernels.__about__ import __version__
from omni_neuron_kernels.dispatch import ENTRY_POINT_GROUP, Choice, Implementation, explain
from omni_neuron_kernels.ops import adaln_modulate, flash_attention, gated_mlp, mlp, output_projection, rms_norm
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
from omni_neuron_kernels.reference_fp8 import NativeFp8Error, scale_rule
from omni_neuron_kernels.softmax_regimes import bounded_heads

__all__ = [
    "ENTRY_POINT_GROUP",
    "Choice",
    "Implementation",
    "NativeFp8Error",
    "__version__",
    "adaln_modulate",
    "adaln_modulate_fp8",
    "bounded_heads",
    "causal_conv3d",
    "explain",
    "flash_attention",
    "fp8_mlp",
    "fp8_output_projection",
    "fp8_qkv_projection",
    "gated_mlp",
    "mlp",
    "output_projection",
    "pack_fp8_weight",
    "qkv_projection",
    "quantize_mx",
    "rms_norm",
    "row_quantize",
    "scale_rule",
]
