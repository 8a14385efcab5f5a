# SPDX-License-Identifier: Apache-2.0
"""The conformance kit on HunyuanVideo-1.5; the reference is diffusers' pipeline."""

from __future__ import annotations

from pathlib import Path

from omni_neuron_hunyuan_video15.checkpoint import TRANSFORMER
from omni_neuron_hunyuan_video15.tiny import make_tiny_checkpoint
from omni_neuron_testkit.conformance import KitRequest, ModelConformance, Published


class TestHunyuanVideo15(ModelConformance):
    spec = "omni_neuron_hunyuan_video15.spec:SPEC"
    pipeline = "omni_neuron_hunyuan_video15.pipeline:NeuronHunyuanVideo15Pipeline"
    reference_pipeline = "HunyuanVideo15Pipeline"
    # The tiny tokenizer makes a token of each character; diffusers pads to 1000, which must not matter.
    request = KitRequest(prompt='A sign that says "OPEN".', num_frames=9, more={"max_sequence_length": 600})
    real_size = (720, 1280, 121)
    tp_sizes = (1, 2, 16)

    @staticmethod
    def checkpoint(folder: Path) -> Path:
        return make_tiny_checkpoint(folder)

    @staticmethod
    def published() -> dict[str, Published]:
        """The DiT of the text-to-video checkpoints; its keys and shapes are those of diffusers' class."""
        from diffusers import HunyuanVideo15Transformer3DModel

        return {"transformer": Published.of(TRANSFORMER, HunyuanVideo15Transformer3DModel)}
