# SPDX-License-Identifier: Apache-2.0
"""The conformance kit on Z-Image; the reference is diffusers' pipeline."""

from __future__ import annotations

from pathlib import Path

from omni_neuron_testkit.conformance import KitRequest, ModelConformance, Published
from omni_neuron_zimage.mapping import TRANSFORMER
from omni_neuron_zimage.tiny import make_tiny_checkpoint


class TestZImage(ModelConformance):
    spec = "omni_neuron_zimage.spec:SPEC"
    pipeline = "omni_neuron_zimage.pipeline:NeuronZImagePipeline"
    reference_pipeline = "ZImagePipeline"
    request = KitRequest(more={"max_sequence_length": 64})
    graphs = (3, 2)
    real_size = (1024, 1024, 1)
    tp_sizes = (1, 2, 3)

    @staticmethod
    def checkpoint(folder: Path) -> Path:
        """With a scheduler that shifts its steps by the image's size."""
        return make_tiny_checkpoint(folder)

    @staticmethod
    def published() -> dict[str, Published]:
        """The transformer of Z-Image and Z-Image-Turbo; its keys and shapes are those of diffusers' class."""
        from diffusers import ZImageTransformer2DModel

        return {"transformer": Published.of(TRANSFORMER, ZImageTransformer2DModel)}
