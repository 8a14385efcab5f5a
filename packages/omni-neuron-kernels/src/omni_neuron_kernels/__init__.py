# SPDX-License-Identifier: Apache-2.0
"""NKI kernels for diffusion transformers, each with a torch reference and a dispatcher that says which one runs."""

from omni_neuron_kernels.__about__ import __version__
from omni_neuron_kernels.dispatch import ENTRY_POINT_GROUP, Choice, Implementation, explain
from omni_neuron_kernels.ops import adaln_modulate, flash_attention, gated_mlp, mlp, output_projection, rms_norm
from omni_neuron_kernels.ops_convolution import causal_conv3d
from omni_neuron_kernels.softmax_regimes import bounded_heads

__all__ = [
    "ENTRY_POINT_GROUP",
    "Choice",
    "Implementation",
    "__version__",
    "adaln_modulate",
    "bounded_heads",
    "causal_conv3d",
    "explain",
    "flash_attention",
    "gated_mlp",
    "mlp",
    "output_projection",
    "rms_norm",
]
