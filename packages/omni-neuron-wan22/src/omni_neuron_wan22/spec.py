# SPDX-License-Identifier: Apache-2.0
"""What Wan2.2's two architectures are made of and what they support. Imports nothing but the SDK."""

from __future__ import annotations

from vllm_omni_neuron.sdk import ComponentSpec, Feature, ModelSpec, SpecAxis

_AXES: dict[SpecAxis, int | None] = {"tp": None, "sp": None, "cp": None, "cfg": 2, "vae_patch": None}
_COMPONENTS = (
    ComponentSpec("text_encoder", "text_encoder", axes=("tp",)),
    ComponentSpec("transformer", "transformer", axes=("tp", "sp", "cp", "cfg")),
    ComponentSpec("transformer_2", "transformer", axes=("tp", "sp", "cp", "cfg"), optional=True),
    ComponentSpec("vae", "vae", axes=("vae_patch",)),
)
_CLIP = ComponentSpec(
    "image_encoder",
    "image_encoder",
    reason="Wan2.1's CLIP runs once a request, on the host of the output rank, in float32",
    optional=True,
    host=True,
)
# As AWS's profile of Wan2.2 has them; a compiler or a device saw neither here. docs/environment.md says what they are.
_ENVIRONMENT = {
    "NEURON_RT_DBG_CC_DMA_PACKET_SIZE": "2048",
    "NEURON_RT_DBG_INTRA_RDH_CHANNEL_BUFFER_SIZE": "167772160",
    "VLLM_NEURON_COMPILATION_TIMEOUT": "1800",
}
_PLANNING, _LOWERING = "omni_neuron_wan22.planning", "omni_neuron_wan22.lowering"

T2V = ModelSpec(
    architecture="WanPipeline",
    title="Wan2.2 T2V-A14B, TI2V-5B",
    output="video",
    components=_COMPONENTS,
    axes=_AXES,
    features={
        "compile": True,
        "cpu_offload": True,
        "vae_tiling": True,
        "image_input": True,  # TI2V-5B; a T2V checkpoint refuses it
        "last_image_input": "T2V-A14B takes no image, TI2V-5B a first one only",
        "lora": True,
        "cache_dit": True,
        "fp8": True,
        "tensor_capture": True,
        "sleep": True,
        "warmup_shapes": True,
        "context_ring": True,
    },
    plans={
        "wan22-t2v-a14b": f"{_PLANNING}:t2v_a14b",
        "wan22-ti2v-5b": f"{_PLANNING}:ti2v_5b",
        "": f"{_PLANNING}:from_checkpoint",
    },
    lowers={
        "wan22-t2v-a14b": f"{_LOWERING}:t2v_a14b",
        "wan22-ti2v-5b": f"{_LOWERING}:ti2v_5b",
        "": f"{_LOWERING}:from_checkpoint",
    },
    environment=_ENVIRONMENT,
)

_I2V_FEATURES: dict[Feature, bool | str] = {**T2V.features, "last_image_input": True}

I2V = ModelSpec(
    architecture="WanImageToVideoPipeline",
    title="Wan2.2 I2V-A14B, TI2V-5B with an image, Wan2.1 I2V",
    output="video",
    components=(_CLIP, *_COMPONENTS),
    axes=_AXES,
    features=_I2V_FEATURES,
    plans={"wan22-i2v-a14b": f"{_PLANNING}:i2v_a14b", "": f"{_PLANNING}:from_checkpoint"},
    lowers={"wan22-i2v-a14b": f"{_LOWERING}:i2v_a14b", "": f"{_LOWERING}:from_checkpoint"},
    environment=_ENVIRONMENT,
)
