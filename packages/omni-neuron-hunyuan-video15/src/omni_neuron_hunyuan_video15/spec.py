# SPDX-License-Identifier: Apache-2.0
"""What HunyuanVideo-1.5 is made of and what it supports. Imports nothing but the SDK."""

from __future__ import annotations

from vllm_omni_neuron.sdk import ComponentSpec, ModelSpec

_PACKAGE = "omni_neuron_hunyuan_video15"


def _text_encoder(name: str, model: str) -> ComponentSpec:
    reason = (
        f"{model} runs unsharded, once a branch and request, on the host of the output rank, which sends the others "
        "what it returns"
    )
    return ComponentSpec(name, "text_encoder", reason=reason, optional=True, host=True)


SPEC = ModelSpec(
    architecture="HunyuanVideo15Pipeline",
    title="HunyuanVideo-1.5 text-to-video",
    output="video",
    components=(
        _text_encoder("text_encoder", "Qwen2.5-VL's text part"),
        _text_encoder("text_encoder_2", "ByT5"),
        ComponentSpec("transformer", "transformer", axes=("tp", "sp", "cp", "cfg")),
        ComponentSpec("vae", "vae", axes=("vae_patch",), optional=True),
    ),
    axes={"tp": None, "sp": None, "cp": None, "cfg": 2, "vae_patch": None},
    features={
        "compile": True,
        "cpu_offload": True,
        "vae_tiling": True,
        "image_input": "this is the text-to-video pipeline; image-to-video has another architecture and checkpoint",
        "last_image_input": "the model has no last frame",
        "lora": "adapters cannot be merged in this version",
        "cache_dit": "no rule for the two token streams in this version",
        "fp8": "the published weights are bfloat16; no FP8 checkpoint is read in this version",
        "tensor_capture": True,
        "sleep": True,
        "warmup_shapes": True,
        "context_ring": True,
    },
    plans={"hunyuan-video15-t2v": f"{_PACKAGE}.planning:t2v", "": f"{_PACKAGE}.planning:from_checkpoint"},
    lowers={"hunyuan-video15-t2v": f"{_PACKAGE}.lowering:t2v", "": f"{_PACKAGE}.lowering:from_checkpoint"},
)
