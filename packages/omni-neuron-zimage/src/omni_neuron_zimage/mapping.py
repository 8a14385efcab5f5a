# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint keys (diffusers' names) each parameter of ours is made of."""

from __future__ import annotations

from omni_neuron_zimage.config import ZImageConfig
from vllm_omni_neuron.sdk import Mapping, prefixed

_BLOCK: Mapping = {
    "attention.qkv.weight": ["attention.to_q.weight", "attention.to_k.weight", "attention.to_v.weight"],
    "attention.norm_q.weight": "attention.norm_q.weight",
    "attention.norm_k.weight": "attention.norm_k.weight",
    "attention.out.weight": "attention.to_out.0.weight",
    "attention_norm1.weight": "attention_norm1.weight",
    "attention_norm2.weight": "attention_norm2.weight",
    "feed_forward.gate.weight": "feed_forward.w1.weight",
    "feed_forward.up.weight": "feed_forward.w3.weight",
    "feed_forward.down.weight": "feed_forward.w2.weight",
    "ffn_norm1.weight": "ffn_norm1.weight",
    "ffn_norm2.weight": "ffn_norm2.weight",
}
_MODULATION: Mapping = {
    "modulation.weight": "adaLN_modulation.0.weight",
    "modulation.bias": "adaLN_modulation.0.bias",
}
_TIMESTEP: Mapping = {
    "linear_1.weight": "mlp.0.weight",
    "linear_1.bias": "mlp.0.bias",
    "linear_2.weight": "mlp.2.weight",
    "linear_2.bias": "mlp.2.bias",
}
_CAPTION: Mapping = {
    "caption_norm.weight": "cap_embedder.0.weight",
    "caption_embedder.weight": "cap_embedder.1.weight",
    "caption_embedder.bias": "cap_embedder.1.bias",
    "caption_pad": "cap_pad_token",
    "image_pad": "x_pad_token",
}
_OUTPUT: Mapping = {
    "linear.weight": "linear.weight",
    "linear.bias": "linear.bias",
    "modulation.weight": "adaLN_modulation.1.weight",
    "modulation.bias": "adaLN_modulation.1.bias",
}


def transformer_mapping(config: ZImageConfig) -> Mapping:
    """Parameter of `ZImageTransformer2DModel` → key or keys in `transformer/`."""
    patch = f"{config.patch_size}-1"  # of an image and of a frame: diffusers keeps embeddings of several
    mapping: Mapping = {
        "image_embedder.weight": f"all_x_embedder.{patch}.weight",
        "image_embedder.bias": f"all_x_embedder.{patch}.bias",
        **_CAPTION,
        **prefixed(_TIMESTEP, "timestep_embedder.", "t_embedder."),
        **prefixed(_OUTPUT, "output.", f"all_final_layer.{patch}."),
    }
    modulated = _BLOCK | _MODULATION
    stacks = [
        ("noise_refiner", modulated, config.n_refiner_layers),
        ("context_refiner", _BLOCK, config.n_refiner_layers),
        ("layers", modulated, config.n_layers),
    ]
    for stack, block, count in stacks:
        for index in range(count):
            mapping |= prefixed(block, f"{stack}.{index}.", f"{stack}.{index}.")
    return mapping
