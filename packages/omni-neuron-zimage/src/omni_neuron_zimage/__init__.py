# SPDX-License-Identifier: Apache-2.0
"""Z-Image for vLLM-Omni on Neuron: `config`, `mapping`, `transformer`, `pipeline`, `planning` and `tiny`."""

from omni_neuron_zimage.__about__ import __version__

__all__ = ["__version__"]
