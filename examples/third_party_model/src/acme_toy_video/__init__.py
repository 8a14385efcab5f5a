# SPDX-License-Identifier: Apache-2.0
"""Acme toy video for vLLM-Omni on Neuron."""

from acme_toy_video.__about__ import __version__

__all__ = ["__version__"]
