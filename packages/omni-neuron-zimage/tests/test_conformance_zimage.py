# SPDX-License-Identifier: Apache-2.0
"""The conformance kit on Z-Image; the reference is diffusers' pipeline."""

from __future__ import annotations

from pathlib import Path

import torch

from omni_neuron_testkit.conformance import KitRequest, ModelConformance, Published, ReferenceRun, diffusers_reference
from omni_neuron_zimage.config import ZImageConfig
from omni_neuron_zimage.mapping import transformer_mapping
from omni_neuron_zimage.tiny import make_tiny_checkpoint
from omni_neuron_zimage.transformer import ZImageTransformer2DModel


class TestZImage(ModelConformance):
    spec = "omni_neuron_zimage.spec:SPEC"
    pipeline = "omni_neuron_zimage.pipeline:NeuronZImagePipeline"
    request = KitRequest(more={"max_sequence_length": 64})
    graphs = (3, 2)
    real_size = (1024, 1024, 1)
    tp_sizes = (1, 2, 3)

    @staticmethod
    def checkpoint(folder: Path) -> Path:
        """With a scheduler that shifts its steps by the image's size."""
        return make_tiny_checkpoint(folder)

    @staticmethod
    def reference(folder: Path, request: KitRequest, dtype: torch.dtype) -> ReferenceRun:
        """The latents after each step."""
        from diffusers import ZImagePipeline

        return diffusers_reference(ZImagePipeline, folder, request, dtype)

    @staticmethod
    def published() -> dict[str, Published]:
        """The transformer of Z-Image and Z-Image-Turbo; its keys and shapes are those of diffusers' class."""
        from diffusers import ZImageTransformer2DModel as Reference

        config = ZImageConfig()
        with torch.device("meta"):
            module, reference = ZImageTransformer2DModel(config), Reference()
        shapes = {key: tuple(value.shape) for key, value in reference.state_dict().items()}
        return {"transformer": Published(module, transformer_mapping(config), shapes)}
