# SPDX-License-Identifier: Apache-2.0
"""What the model is made of and what it supports. Imports nothing but the SDK."""

from __future__ import annotations

from vllm_omni_neuron.sdk import ComponentSpec, ModelSpec

SPEC = ModelSpec(
    architecture="AcmeToyVideoPipeline",
    title="Acme toy video",
    output="video",
    components=(
        ComponentSpec("text_encoder", "text_encoder", axes=("tp",)),
        ComponentSpec("transformer", "transformer", axes=("tp", "sp", "cp", "cfg")),
        ComponentSpec("vae", "vae", reason="the decoder is a few convolutions"),
    ),
    # Attention has four heads, and guidance two branches.
    axes={"tp": 4, "sp": None, "cp": None, "cfg": 2},
    features={
        "compile": True,
        "cpu_offload": True,
        "vae_tiling": "the decoder is too small to need tiles",
        "image_input": "the model is made from text alone",
        "last_image_input": "the model is made from text alone",
        "lora": "no adapter of this model exists",
        "cache_dit": "a step is too small to be worth caching",
        "fp8": "there is no checkpoint in FP8",
        "tensor_capture": True,
        "sleep": True,
        "warmup_shapes": True,
        "context_ring": True,
    },
)
