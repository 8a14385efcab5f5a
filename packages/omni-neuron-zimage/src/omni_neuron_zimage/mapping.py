# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint keys (diffusers' names) each parameter of ours is made of, and the transformer made of them."""

from __future__ import annotations

from omni_neuron_zimage.config import ZImageConfig
from omni_neuron_zimage.transformer import ZImageTransformer2DModel
from vllm_omni_neuron.sdk import Mapping, ShardedComponent, numbered, with_biases

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
_MODULATED_BLOCK: Mapping = _BLOCK | with_biases({"modulation": "adaLN_modulation.0"})
_CAPTION: Mapping = {
    "caption_norm.weight": "cap_embedder.0.weight",
    "caption_pad": "cap_pad_token",
    "image_pad": "x_pad_token",
}


def transformer_mapping(config: ZImageConfig) -> Mapping:
    """Parameter of `ZImageTransformer2DModel` → key or keys in `transformer/`."""
    patch = f"{config.patch_size}-1"  # of an image and of a frame: diffusers keeps embeddings of several
    layers: Mapping = {
        "image_embedder": f"all_x_embedder.{patch}",
        "caption_embedder": "cap_embedder.1",
        "timestep_embedder.linear_1": "t_embedder.mlp.0",
        "timestep_embedder.linear_2": "t_embedder.mlp.2",
        "output.linear": f"all_final_layer.{patch}.linear",
        "output.modulation": f"all_final_layer.{patch}.adaLN_modulation.1",
    }
    mapping = _CAPTION | with_biases(layers)
    for stack, block, count in (
        ("noise_refiner.", _MODULATED_BLOCK, config.n_refiner_layers),
        ("context_refiner.", _BLOCK, config.n_refiner_layers),
        ("layers.", _MODULATED_BLOCK, config.n_layers),
    ):
        mapping |= numbered(block, stack, stack, count)
    return mapping


TRANSFORMER = ShardedComponent("transformer", ZImageConfig, ZImageTransformer2DModel, transformer_mapping)
