# SPDX-License-Identifier: Apache-2.0
"""Z-Image for vLLM-Omni on Neuron. Names are imported when they are asked for: the pipeline needs vLLM-Omni."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from omni_neuron_zimage.__about__ import __version__

if TYPE_CHECKING:
    from omni_neuron_zimage.config import ZImageConfig
    from omni_neuron_zimage.mapping import transformer_mapping
    from omni_neuron_zimage.pipeline import NeuronZImagePipeline
    from omni_neuron_zimage.tiny import TinyZImage, make_tiny_checkpoint
    from omni_neuron_zimage.transformer import Caption, ZImageTransformer2DModel

_HOMES = {
    "config": ["ZImageConfig"],
    "mapping": ["transformer_mapping"],
    "pipeline": ["NeuronZImagePipeline"],
    "tiny": ["TinyZImage", "make_tiny_checkpoint"],
    "transformer": ["Caption", "ZImageTransformer2DModel"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Caption",
    "NeuronZImagePipeline",
    "TinyZImage",
    "ZImageConfig",
    "ZImageTransformer2DModel",
    "__version__",
    "make_tiny_checkpoint",
    "transformer_mapping",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
