# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint keys (diffusers' and transformers' names) each parameter of ours is made of.

Written out rather than derived, so that a reader can check it, and complete in both directions: a test compares it with
diffusers' own state dict for the real A14B configuration.
"""

from __future__ import annotations

from itertools import pairwise

from omni_neuron_wan22.config import UMT5Config, VaeConfig, WanConfig
from vllm_omni_neuron.sdk import Mapping, prefixed

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
# Of a DiT that takes an image embedding.
_DIT_IMAGE_ATTENTION: Mapping = {
    "attn2.image_k.weight": "attn2.add_k_proj.weight",
    "attn2.image_k.bias": "attn2.add_k_proj.bias",
    "attn2.image_v.weight": "attn2.add_v_proj.weight",
    "attn2.image_v.bias": "attn2.add_v_proj.bias",
    "attn2.norm_image_k.weight": "attn2.norm_added_k.weight",
}
_IMAGE_EMBEDDER: Mapping = {
    "norm1.weight": "norm1.weight",
    "norm1.bias": "norm1.bias",
    "linear_1.weight": "ff.net.0.proj.weight",
    "linear_1.bias": "ff.net.0.proj.bias",
    "linear_2.weight": "ff.net.2.weight",
    "linear_2.bias": "ff.net.2.bias",
    "norm2.weight": "norm2.weight",
    "norm2.bias": "norm2.bias",
}
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

# Keys that a checkpoint holds and that nothing here needs; the VAE's only where nothing is encoded.
UNUSED_TEXT_ENCODER_KEYS = ("encoder.embed_tokens.weight",)  # the same tensor as shared.weight
UNUSED_VAE_PREFIXES = ("encoder.", "quant_conv.")


def transformer_mapping(config: WanConfig) -> Mapping:
    """Parameter of `WanTransformer3DModel` → key or keys in `transformer/` and `transformer_2/`."""
    mapping: Mapping = {name: name for name in _DIT_SHARED}
    block = _DIT_BLOCK | (_DIT_CROSS_NORM if config.cross_attn_norm else {})
    if config.image_dim is not None:
        block = block | _DIT_IMAGE_ATTENTION
        embedder = _IMAGE_EMBEDDER | ({} if config.pos_embed_seq_len is None else {"pos_embed": "pos_embed"})
        prefix = "condition_embedder.image_embedder."
        mapping |= prefixed(embedder, prefix, prefix)
    for index in range(config.num_layers):
        mapping |= prefixed(block, f"blocks.{index}.", f"blocks.{index}.")
    return mapping


def unused_transformer_keys(config: WanConfig) -> tuple[str, ...]:
    """What some checkpoints hold and no computation reads: a norm of queries that attend to the image."""
    return tuple(f"blocks.{index}.attn2.norm_added_q.weight" for index in range(config.num_layers))


def text_encoder_mapping(config: UMT5Config) -> Mapping:
    """Parameter of `NeuronTextEncoderWrapper` → key in `text_encoder/`."""
    mapping: Mapping = {
        "embedding.weight": "shared.weight",
        "final_norm.weight": "encoder.final_layer_norm.weight",
    }
    for index in range(config.num_layers):
        mapping |= prefixed(_UMT5_BLOCK, f"blocks.{index}.", f"encoder.block.{index}.")
    return mapping


def vae_mapping(config: VaeConfig, *, encoder: bool = False) -> Mapping:
    """Parameter of `NeuronAutoencoderKLWan` → key in `vae/`.

    Names are diffusers', except of the convolutions that it has between the halves, which are part of one here.

    Args:
        config: VAE 2.1 or 2.2.
        encoder: with the encoder's.
    """
    layers = {"decoder.post_quant_conv": "post_quant_conv"} | {name: name for name in _vae_decoder_layers(config)}
    if encoder:
        layers |= {"encoder.quant_conv": "quant_conv"} | {name: name for name in _vae_encoder_layers(config)}
    mapping: Mapping = {}
    for ours, theirs in layers.items():
        norm = ours.rpartition(".")[2].startswith("norm")
        mapping |= {f"{ours}.{kind}": f"{theirs}.{kind}" for kind in (("gamma",) if norm else ("weight", "bias"))}
    return mapping


def _vae_residuals(prefixes: list[str], in_channels: int, out_channels: int) -> list[str]:
    layers = ("norm1", "conv1", "norm2", "conv2")
    shortcut = [f"{prefixes[0]}.conv_shortcut"] if in_channels != out_channels else []
    return [*shortcut, *(f"{prefix}.{layer}" for prefix in prefixes for layer in layers)]


def _vae_middle(prefix: str) -> list[str]:
    attention = [f"{prefix}.attentions.0.{layer}" for layer in ("norm", "to_qkv", "proj")]
    return [*attention, *_vae_residuals([f"{prefix}.resnets.{index}" for index in range(2)], 1, 1)]


def _vae_resample(prefix: str, temporal: bool) -> list[str]:
    return [f"{prefix}.resample.1"] + ([f"{prefix}.time_conv"] if temporal else [])


def _vae_decoder_layers(config: VaeConfig) -> list[str]:
    names = ["decoder.conv_in", "decoder.norm_out", "decoder.conv_out", *_vae_middle("decoder.mid_block")]
    dims, temporal = config.decoder_dims, tuple(reversed(config.temperal_downsample))
    upsampler = "upsampler" if config.is_residual else "upsamplers.0"
    entering = dims[0]
    for block, channels in enumerate(dims[1:]):
        prefix = f"decoder.up_blocks.{block}"
        places = [f"{prefix}.resnets.{index}" for index in range(config.num_res_blocks + 1)]
        names += _vae_residuals(places, entering, channels)
        if block < len(temporal):
            names += _vae_resample(f"{prefix}.{upsampler}", temporal[block])
        entering = channels if config.is_residual else channels // 2
    return names


def _vae_encoder_layers(config: VaeConfig) -> list[str]:
    names = ["encoder.conv_in", "encoder.norm_out", "encoder.conv_out", *_vae_middle("encoder.mid_block")]
    temporal, count = config.temperal_downsample, config.num_res_blocks
    for block, (entering, channels) in enumerate(pairwise(config.encoder_dims)):
        if config.is_residual:
            prefix = f"encoder.down_blocks.{block}"
            places, downsampler = [f"{prefix}.resnets.{index}" for index in range(count)], f"{prefix}.downsampler"
        else:
            # VAE 2.1 numbers residual blocks and resamplings in one list.
            first = block * (count + 1)
            *places, downsampler = [f"encoder.down_blocks.{first + index}" for index in range(count + 1)]
        names += _vae_residuals(places, entering, channels)
        if block < len(temporal):
            names += _vae_resample(downsampler, temporal[block])
    return names
