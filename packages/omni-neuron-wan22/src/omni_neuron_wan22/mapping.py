# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint keys (diffusers' and transformers' names) each parameter of ours is made of.

Written out rather than derived, so that a reader can check it, and complete in both directions: a test compares it with
diffusers' own state dict for the real A14B configuration.
"""

from __future__ import annotations

from itertools import pairwise

from omni_neuron_wan22.config import UMT5Config, VaeConfig, WanConfig

Mapping = dict[str, str | list[str]]

# ours: theirs, inside one DiT block; the lists are concatenated in this order.
_DIT_BLOCK: Mapping = {
    "attn1.qkv.weight": ["attn1.to_q.weight", "attn1.to_k.weight", "attn1.to_v.weight"],
    "attn1.qkv.bias": ["attn1.to_q.bias", "attn1.to_k.bias", "attn1.to_v.bias"],
    "attn1.norm_q.weight": "attn1.norm_q.weight",
    "attn1.norm_k.weight": "attn1.norm_k.weight",
    "attn1.o.weight": "attn1.to_out.0.weight",
    "attn1.o.bias": "attn1.to_out.0.bias",
    "attn2.q.weight": "attn2.to_q.weight",
    "attn2.q.bias": "attn2.to_q.bias",
    "attn2.k.weight": "attn2.to_k.weight",
    "attn2.k.bias": "attn2.to_k.bias",
    "attn2.v.weight": "attn2.to_v.weight",
    "attn2.v.bias": "attn2.to_v.bias",
    "attn2.norm_q.weight": "attn2.norm_q.weight",
    "attn2.norm_k.weight": "attn2.norm_k.weight",
    "attn2.o.weight": "attn2.to_out.0.weight",
    "attn2.o.bias": "attn2.to_out.0.bias",
    "ffn.up.weight": "ffn.net.0.proj.weight",
    "ffn.up.bias": "ffn.net.0.proj.bias",
    "ffn.down.weight": "ffn.net.2.weight",
    "ffn.down.bias": "ffn.net.2.bias",
    "scale_shift_table": "scale_shift_table",
}
_DIT_CROSS_NORM: Mapping = {"norm2.weight": "norm2.weight", "norm2.bias": "norm2.bias"}
_DIT_SHARED = (
    "patch_embedding.weight",
    "patch_embedding.bias",
    "condition_embedder.time_embedder.linear_1.weight",
    "condition_embedder.time_embedder.linear_1.bias",
    "condition_embedder.time_embedder.linear_2.weight",
    "condition_embedder.time_embedder.linear_2.bias",
    "condition_embedder.time_proj.weight",
    "condition_embedder.time_proj.bias",
    "condition_embedder.text_embedder.linear_1.weight",
    "condition_embedder.text_embedder.linear_1.bias",
    "condition_embedder.text_embedder.linear_2.weight",
    "condition_embedder.text_embedder.linear_2.bias",
    "proj_out.weight",
    "proj_out.bias",
    "scale_shift_table",
)

_UMT5_BLOCK: Mapping = {
    "attention_norm.weight": "layer.0.layer_norm.weight",
    "attention.q.weight": "layer.0.SelfAttention.q.weight",
    "attention.k.weight": "layer.0.SelfAttention.k.weight",
    "attention.v.weight": "layer.0.SelfAttention.v.weight",
    "attention.o.weight": "layer.0.SelfAttention.o.weight",
    "attention.relative_attention_bias.weight": "layer.0.SelfAttention.relative_attention_bias.weight",
    "ffn_norm.weight": "layer.1.layer_norm.weight",
    "ffn.wi_0.weight": "layer.1.DenseReluDense.wi_0.weight",
    "ffn.wi_1.weight": "layer.1.DenseReluDense.wi_1.weight",
    "ffn.wo.weight": "layer.1.DenseReluDense.wo.weight",
}

# Keys that a text-to-video checkpoint holds and that nothing here needs.
UNUSED_TEXT_ENCODER_KEYS = ("encoder.embed_tokens.weight",)  # the same tensor as shared.weight
UNUSED_VAE_PREFIXES = ("encoder.", "quant_conv.")


def _prefixed(mapping: Mapping, ours: str, theirs: str) -> Mapping:
    return {
        ours + name: theirs + keys if isinstance(keys, str) else [theirs + key for key in keys]
        for name, keys in mapping.items()
    }


def transformer_mapping(config: WanConfig) -> Mapping:
    """Parameter of `WanTransformer3DModel` → key or keys in `transformer/` and `transformer_2/`."""
    mapping: Mapping = {name: name for name in _DIT_SHARED}
    block = _DIT_BLOCK | (_DIT_CROSS_NORM if config.cross_attn_norm else {})
    for index in range(config.num_layers):
        mapping |= _prefixed(block, f"blocks.{index}.", f"blocks.{index}.")
    return mapping


def text_encoder_mapping(config: UMT5Config) -> Mapping:
    """Parameter of `NeuronTextEncoderWrapper` → key in `text_encoder/`."""
    mapping: Mapping = {
        "embedding.weight": "shared.weight",
        "final_norm.weight": "encoder.final_layer_norm.weight",
    }
    for index in range(config.num_layers):
        mapping |= _prefixed(_UMT5_BLOCK, f"blocks.{index}.", f"encoder.block.{index}.")
    return mapping


def vae_mapping(config: VaeConfig) -> Mapping:
    """Parameter of `NeuronAutoencoderKLWan` → key in `vae/`; the decoder keeps diffusers' names."""
    names = ["post_quant_conv", "decoder.conv_in", "decoder.conv_out"]
    norms = ["decoder.norm_out", "decoder.mid_block.attentions.0.norm"]
    names += ["decoder.mid_block.attentions.0.to_qkv", "decoder.mid_block.attentions.0.proj"]
    resnets = [f"decoder.mid_block.resnets.{index}" for index in range(2)]
    shortcuts = []
    dims, temporal = config.decoder_dims, tuple(reversed(config.temperal_downsample))
    for block, (in_channels, out_channels) in enumerate(pairwise(dims)):
        prefix = f"decoder.up_blocks.{block}"
        resnets += [f"{prefix}.resnets.{index}" for index in range(config.num_res_blocks + 1)]
        if (in_channels if block == 0 else in_channels // 2) != out_channels:
            shortcuts.append(f"{prefix}.resnets.0.conv_shortcut")
        if block < len(dims) - 2:
            names.append(f"{prefix}.upsamplers.0.resample.1")
            if temporal[block]:
                names.append(f"{prefix}.upsamplers.0.time_conv")
    for resnet in resnets:
        names += [f"{resnet}.conv1", f"{resnet}.conv2"]
        norms += [f"{resnet}.norm1", f"{resnet}.norm2"]
    layers = [f"{name}.{kind}" for name in [*names, *shortcuts] for kind in ("weight", "bias")]
    return {name: name for name in [*layers, *(f"{norm}.gamma" for norm in norms)]}
