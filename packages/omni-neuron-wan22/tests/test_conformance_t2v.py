# SPDX-License-Identifier: Apache-2.0
"""The conformance kit on Wan2.2 T2V, with diffusers' `WanPipeline` as reference."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
import wan22_published
from diffusers import WanPipeline

from omni_neuron_testkit.conformance import (
    STANDARD_LAYOUTS,
    KitRequest,
    Layout,
    ModelConformance,
    Published,
    ReferenceRun,
    diffusers_reference,
)
from omni_neuron_wan22 import NeuronFlowUniPCMultistepScheduler, TinyWan, make_tiny_checkpoint
from omni_neuron_wan22.published import T2V_A14B


class TestWanT2V(ModelConformance):
    spec = "omni_neuron_wan22.spec:T2V"
    pipeline = "omni_neuron_wan22.pipeline:NeuronWanPipeline"
    # Both experts take several of the 20 steps. 3 latent frames of 4×5 tokens.
    request = KitRequest(
        prompt="A red circle, moving right.",
        negative_prompt="blurry &amp; dark",
        width=80,
        num_frames=9,
        num_inference_steps=20,
        more={"guidance_scale_2": 3.0, "max_sequence_length": 64},
    )
    layouts = (*STANDARD_LAYOUTS, Layout(tp=4))
    vae_request = KitRequest(height=32, width=320, num_frames=5)
    published_name = "wan22-t2v-a14b"
    tp_sizes = (2, 4, 5, 8)
    # Text encoder; each expert's projection of the text and forward; the decoder's first chunk and later ones. Height
    # and width are in the experts' and the decoder's graphs, frames in the experts', the text's length in all but the
    # decoder's.
    graphs = (7, 4)
    other_size: ClassVar[dict[str, int]] = {"height": 48}
    other_graphs = (({"num_frames": 13}, 2), ({"max_sequence_length": 24}, 5))
    same_graphs = (
        {"guidance_scale_2": 1.0},
        {"boundary_ratio": 0.5},
        {"extra_args": {"flow_shift": 12.0}},
        {"extra_args": {"sample_solver": "euler"}},
        {"num_outputs_per_prompt": 2},
    )

    @staticmethod
    def checkpoint(folder: Path) -> Path:
        """Sharded into several files with an index, as A14B."""
        return make_tiny_checkpoint(folder, TinyWan(vae_base_dim=8, max_shard_size="500KB"))

    @staticmethod
    def reference(folder: Path, request: KitRequest, dtype: torch.dtype) -> ReferenceRun:
        # Our scheduler: diffusers' own UniPC has other timesteps.
        scheduler = NeuronFlowUniPCMultistepScheduler(shift=5.0)
        return diffusers_reference(WanPipeline, folder, request, dtype, scheduler=scheduler)

    @staticmethod
    def published() -> dict[str, Published]:
        return wan22_published.published(T2V_A14B)
