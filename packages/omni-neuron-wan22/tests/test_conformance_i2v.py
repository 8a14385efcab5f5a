# SPDX-License-Identifier: Apache-2.0
"""The conformance kit on Wan2.2 I2V, with diffusers' `WanImageToVideoPipeline` and a first and a last frame."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
import wan22_published
from diffusers import WanImageToVideoPipeline, WanTransformer3DModel
from image_reference import make_image

from omni_neuron_testkit.conformance import (
    KitRequest,
    ModelConformance,
    Published,
    ReferenceRun,
    diffusers_reference,
)
from omni_neuron_wan22 import NeuronFlowUniPCMultistepScheduler, TinyWan, make_tiny_checkpoint
from omni_neuron_wan22.published import I2V_A14B

DIT = partial(WanTransformer3DModel, in_channels=36)


class TestWanI2V(ModelConformance):
    spec = "omni_neuron_wan22.spec:I2V"
    pipeline = "omni_neuron_wan22.pipeline_i2v:NeuronWanI2VPipeline"
    request = KitRequest(
        num_frames=9,
        images={"image": make_image(0), "last_image": make_image(1)},
        more={"guidance_scale_2": 3.0, "max_sequence_length": 64},
    )
    published_name = "wan22-i2v-a14b"
    tp_sizes = (4, 8)
    # Those of T2V and the encoder's first chunk and later ones. T2V has other heights; frames are in the experts' only.
    graphs = (9, 2)
    other_size: ClassVar[dict[str, int]] = {"num_frames": 13}

    @staticmethod
    def checkpoint(folder: Path) -> Path:
        return make_tiny_checkpoint(folder, TinyWan(task="i2v", vae_base_dim=8))

    @staticmethod
    def reference(folder: Path, request: KitRequest, dtype: torch.dtype) -> ReferenceRun:
        scheduler = NeuronFlowUniPCMultistepScheduler(shift=5.0)
        return diffusers_reference(WanImageToVideoPipeline, folder, request, dtype, scheduler=scheduler)

    @staticmethod
    def published() -> dict[str, Published]:
        return wan22_published.published(I2V_A14B, DIT, encoder=True)
