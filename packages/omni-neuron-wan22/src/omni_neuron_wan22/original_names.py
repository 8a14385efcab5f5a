# SPDX-License-Identifier: Apache-2.0
"""The original Wan code's names of the DiT's tensors, which ComfyUI's checkpoints keep."""

from __future__ import annotations

from omni_neuron_wan22.config import WanConfig, WanConfigError
from omni_neuron_wan22.mapping import transformer_mapping

# diffusers' layer: the original one, inside a block.
_BLOCK_LINEARS = {
    "attn1.to_q": "self_attn.q",
    "attn1.to_k": "self_attn.k",
    "attn1.to_v": "self_attn.v",
    "attn1.to_out.0": "self_attn.o",
    "attn2.to_q": "cross_attn.q",
    "attn2.to_k": "cross_attn.k",
    "attn2.to_v": "cross_attn.v",
    "attn2.to_out.0": "cross_attn.o",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
}
_BLOCK_NORMS = {
    "attn1.norm_q": "self_attn.norm_q",
    "attn1.norm_k": "self_attn.norm_k",
    "attn2.norm_q": "cross_attn.norm_q",
    "attn2.norm_k": "cross_attn.norm_k",
    "norm2": "norm3",
}
_SHARED_LINEARS = {
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "proj_out": "head.head",
}


def original_wan_names(config: WanConfig) -> dict[str, str]:
    """Each key of diffusers' DiT → its key in the original Wan code's checkpoints.

    Raises:
        WanConfigError: the DiT has parts without a known name there (image embeddings, which no Wan2.2 model has).
    """
    layers = _SHARED_LINEARS | {"patch_embedding": "patch_embedding"}
    names = {"scale_shift_table": "head.modulation"}
    block = _BLOCK_LINEARS | _BLOCK_NORMS
    for index in range(config.num_layers):
        layers |= {f"blocks.{index}.{ours}": f"blocks.{index}.{theirs}" for ours, theirs in block.items()}
        names[f"blocks.{index}.scale_shift_table"] = f"blocks.{index}.modulation"
    for ours, theirs in layers.items():
        names |= {f"{ours}.{kind}": f"{theirs}.{kind}" for kind in ("weight", "bias")}
    mapped = transformer_mapping(config).values()
    wanted = {key for keys in mapped for key in ([keys] if isinstance(keys, str) else keys)}
    if wanted - names.keys():
        raise WanConfigError(f"no original Wan name is known of {', '.join(sorted(wanted - names.keys())[:8])}")
    return {ours: theirs for ours, theirs in names.items() if ours in wanted}


def linear_weights(config: WanConfig) -> list[str]:
    """diffusers' keys of the weights of the DiT's linear layers: ten a block, and those of embeddings and output."""
    blocks = range(config.num_layers)
    layers = [*_SHARED_LINEARS, *(f"blocks.{i}.{name}" for i in blocks for name in _BLOCK_LINEARS)]
    return [f"{layer}.weight" for layer in layers]
