# SPDX-License-Identifier: Apache-2.0
"""What Z-Image is made of and what it supports. Imports nothing but the SDK."""

from __future__ import annotations

from vllm_omni_neuron.sdk import ComponentSpec, ModelSpec

SPEC = ModelSpec(
    architecture="ZImagePipeline",
    title="Z-Image, Z-Image-Turbo",
    output="image",
    components=(
        ComponentSpec(
            "text_encoder",
            "text_encoder",
            reason="Qwen3 runs unsharded, once a branch and request, on the host of the output rank, which sends its "
            "hidden states to the others",
            optional=True,
            host=True,
        ),
        ComponentSpec("transformer", "transformer", axes=("tp", "sp", "cp", "cfg")),
        ComponentSpec("vae", "vae", axes=("vae_patch",), optional=True),
    ),
    axes={"tp": None, "sp": None, "cp": None, "cfg": 2, "vae_patch": None},
    features={
        "compile": True,
        "cpu_offload": True,
        "vae_tiling": True,
        "image_input": "the Omni and edit variants, which take images, are other models",
        "last_image_input": "it makes images, not videos",
        "lora": "this package loads no adapters",
        "cache_dit": "no rule for reusing this transformer's blocks has been measured",
        "fp8": "this package loads no FP8 checkpoints",
        "tensor_capture": True,
        "sleep": True,
        "warmup_shapes": True,
        "context_ring": True,
    },
    plans={"z-image": "omni_neuron_zimage.planning:z_image", "": "omni_neuron_zimage.planning:from_checkpoint"},
    lowers={"z-image": "omni_neuron_zimage.lowering:z_image", "": "omni_neuron_zimage.lowering:from_checkpoint"},
)
