# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint keys (diffusers' names) each parameter of the DiT is made of.

Written out rather than derived, so that a reader can check it, and complete in both directions: a test compares it with
diffusers' own state dict for the published configuration.
"""

from __future__ import annotations

from omni_neuron_hunyuan_video15.config import HunyuanVideo15Config
from vllm_omni_neuron.sdk import Mapping, numbered, prefixed, with_biases

# ours: theirs, for layers that have a weight and a bias; the lists are concatenated in this order.
_BLOCK: Mapping = {
    "modulation": "norm1.linear",
    "text_modulation": "norm1_context.linear",
    "attn.video.qkv": ["attn.to_q", "attn.to_k", "attn.to_v"],
    "attn.text.qkv": ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"],
    "attn.o.video": "attn.to_out.0",
    "attn.o.text": "attn.to_add_out",
    "ffn.video": "ff.net.0.proj",
    "ffn.down.video": "ff.net.2",
    "ffn.text": "ff_context.net.0.proj",
    "ffn.down.text": "ff_context.net.2",
}
_BLOCK_GAINS: Mapping = {
    "attn.video.norm_q.weight": "attn.norm_q.weight",
    "attn.video.norm_k.weight": "attn.norm_k.weight",
    "attn.text.norm_q.weight": "attn.norm_added_q.weight",
    "attn.text.norm_k.weight": "attn.norm_added_k.weight",
}
_REFINER_BLOCK: Mapping = {
    "norm1": "norm1",
    "qkv": ["attn.to_q", "attn.to_k", "attn.to_v"],
    "o": "attn.to_out.0",
    "norm2": "norm2",
    "up": "ff.net.0.proj",
    "down": "ff.net.2",
    "gates": "norm_out.linear",
}
_LAYERS: Mapping = {
    "latent_embedding": "x_embedder.proj",
    "token_refiner.proj_in": "context_embedder.proj_in",
    "modulation_out": "norm_out.linear",
    "proj_out": "proj_out",
}
_EMBEDDER: Mapping = {"linear_1": "linear_1", "linear_2": "linear_2"}
_GLYPHS: Mapping = {"norm": "norm", "linear_3": "linear_3", **_EMBEDDER}

# Of image-to-video: text-to-video masks an image's tokens.
UNUSED_TRANSFORMER_KEYS = ("image_embedder.",)


def transformer_mapping(config: HunyuanVideo15Config) -> Mapping:
    """Parameter of `HunyuanVideo15Transformer` → key or keys in `transformer/`."""
    refiner, blocks = config.num_refiner_layers, ("blocks.", "transformer_blocks.", config.num_layers)
    layers = {
        **_LAYERS,
        **prefixed(_EMBEDDER, "time_embedder.", "time_embed.timestep_embedder."),
        **prefixed(_EMBEDDER, "token_refiner.time_embedder.", "context_embedder.time_text_embed.timestep_embedder."),
        **prefixed(_EMBEDDER, "token_refiner.text_embedder.", "context_embedder.time_text_embed.text_embedder."),
        **prefixed(_GLYPHS, "glyph_projection.", "context_embedder_2."),
        **numbered(_REFINER_BLOCK, "token_refiner.blocks.", "context_embedder.token_refiner.refiner_blocks.", refiner),
        **numbered(_BLOCK, *blocks),
    }
    gains = numbered(_BLOCK_GAINS, *blocks)
    return {"token_kinds.weight": "cond_type_embed.weight", **gains, **with_biases(layers)}
