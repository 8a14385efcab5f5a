# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo-1.5 for vLLM-Omni on Neuron. Submodules are imported by name; the pipeline needs vLLM."""

from omni_neuron_hunyuan_video15.__about__ import __version__

__all__ = ["__version__"]
