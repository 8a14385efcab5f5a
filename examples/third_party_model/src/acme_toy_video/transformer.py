# SPDX-License-Identifier: Apache-2.0
"""The DiT, written for one rank: TP is in the layers' names, CP in `context_attention`.

The tokens S of a video are split over CP. With sequence parallelism a rank's tokens S_cp = ceil(S / cp) are further
split over TP between two row-parallel layers: S_tp = ceil(S_cp / tp), or S_cp without it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from omni_neuron_parallel import (
    AxisGroup,
    ColumnParallelLinear,
    ContextMethod,
    DistributedRMSNorm,
    QKVParallelLinear,
    RowParallelLinear,
    SequenceParallel,
    SplitTokens,
    context_attention,
    sinusoidal_embedding,
)
from torch import nn
from vllm_omni_neuron.sdk import Mapping, ShardedComponent, numbered, with_biases

from .config import TransformerConfig


class TextKeysValues(NamedTuple):
    """The text as every block's attention sees it; good for all steps of a request.

    Attributes:
        blocks: one (key, value) pair `[B, L, N / tp, D]` a block.
        mask: bool `[B, L]`, True where there is text.
    """

    blocks: list[tuple[torch.Tensor, torch.Tensor]]
    mask: torch.Tensor


def modulate(hidden: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """LayerNorm over features, without parameters, then x · (1 + scale) + shift; float32 inside."""
    normalised = F.layer_norm(hidden.float(), hidden.shape[-1:], eps=1e-6)
    return (normalised * (1 + scale.float()) + shift.float()).to(hidden.dtype)


class JointAttention(nn.Module):
    """Every token attends to all tokens and to the text, in one softmax; heads are split over TP."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        group: AxisGroup,
        context_group: AxisGroup,
        sequence_parallel: bool,
        context_method: ContextMethod,
    ):
        super().__init__()
        self.head_dim, self.context_group = config.head_dim, context_group
        self.context_method: ContextMethod = context_method
        hidden, head_dim = config.hidden, config.head_dim
        self.qkv = QKVParallelLinear(hidden, config.num_heads, head_dim, group=group)
        self.norm_q = DistributedRMSNorm(hidden, config.eps, group=group)
        self.norm_k = DistributedRMSNorm(hidden, config.eps, group=group)
        self.text_k = ColumnParallelLinear(config.text_width, hidden, multiple_of=head_dim, group=group)
        self.text_v = ColumnParallelLinear(config.text_width, hidden, multiple_of=head_dim, group=group)
        self.out = RowParallelLinear(
            hidden, hidden, multiple_of=head_dim, group=group, sequence_parallel=sequence_parallel
        )

    def project_text(self, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[B, L, N / tp, D]` of the encoded text `[B, L, text_width]`."""
        return self._heads(self.norm_k(self.text_k(text))), self._heads(self.text_v(text))

    def forward(
        self,
        hidden: torch.Tensor,
        text: tuple[torch.Tensor, torch.Tensor],
        text_mask: torch.Tensor,
        num_tokens: int,
    ) -> torch.Tensor:
        """`[B, S_cp, hidden]` to `[B, S_tp, hidden]`; `num_tokens` is S, and what follows them is padding."""
        query, key, value = self.qkv(hidden)
        attended = context_attention(
            self._heads(self.norm_q(query)),
            self._heads(self.norm_k(key)),
            self._heads(value),
            group=self.context_group,
            kv_length=num_tokens,
            method=self.context_method,
            joint_kv=text,
            joint_mask=text_mask,
        )
        return self.out(attended.flatten(2))

    def _heads(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unflatten(2, (-1, self.head_dim))


class Block(nn.Module):
    """Attention and a feed-forward layer, both modulated by the timestep."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        group: AxisGroup,
        context_group: AxisGroup,
        sequence_parallel: bool,
        context_method: ContextMethod,
    ):
        super().__init__()
        hidden = config.hidden
        self.modulation = nn.Linear(hidden, 6 * hidden)
        self.attention = JointAttention(
            config,
            group=group,
            context_group=context_group,
            sequence_parallel=sequence_parallel,
            context_method=context_method,
        )
        self.up = ColumnParallelLinear(hidden, config.inner, group=group)
        self.down = RowParallelLinear(config.inner, hidden, group=group, sequence_parallel=sequence_parallel)

    def forward(
        self,
        hidden: torch.Tensor,
        time: torch.Tensor,
        text: tuple[torch.Tensor, torch.Tensor],
        text_mask: torch.Tensor,
        sequence: SequenceParallel,
        num_tokens: int,
    ) -> torch.Tensor:
        """`[B, S_tp, hidden]` to the same; `time` is the embedded timestep `[B, hidden]`."""
        shift, scale, gate, inner_shift, inner_scale, inner_gate = self.modulation(time).unsqueeze(1).chunk(6, dim=-1)
        tokens = sequence.gather(modulate(hidden, shift, scale))
        hidden = hidden + gate * self.attention(tokens, text, text_mask, num_tokens)
        tokens = sequence.gather(modulate(hidden, inner_shift, inner_scale))
        return hidden + inner_gate * self.down(F.gelu(self.up(tokens)))


class Transformer(SplitTokens):
    """The DiT on one rank of a TP and a CP group.

    Args:
        config: sizes.
        group: the TP group; this process's by default.
        context_group: the CP group; this process's by default.
        sequence_parallel: split tokens over TP between row-parallel layers.
        context_method: how attention meets the keys of other CP ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        group: AxisGroup | None = None,
        context_group: AxisGroup | None = None,
        sequence_parallel: bool = False,
        context_method: ContextMethod = "auto",
    ):
        super().__init__(group, context_group, sequence_parallel=sequence_parallel)
        self.config = config
        pixels = config.channels * config.patch**2
        self.patch_in = nn.Linear(pixels, config.hidden)
        self.time_in = nn.Linear(config.hidden, config.hidden)
        self.blocks = nn.ModuleList(
            Block(
                config,
                group=self.group,
                context_group=self.context_group,
                sequence_parallel=sequence_parallel,
                context_method=context_method,
            )
            for _ in range(config.num_layers)
        )
        self.modulation_out = nn.Linear(config.hidden, 2 * config.hidden)
        self.patch_out = nn.Linear(config.hidden, pixels)

    def project_text(self, text: torch.Tensor, mask: torch.Tensor) -> TextKeysValues:
        """Every block's keys and values of the encoded text `[B, L, text_width]`; `mask` bool `[B, L]`."""
        return TextKeysValues([block.attention.project_text(text) for block in self._blocks()], mask)

    def forward(self, latents: torch.Tensor, timestep: torch.Tensor, text: TextKeysValues) -> torch.Tensor:
        """The predicted velocity `[B, C, T, h, w]`, the same on every TP and CP rank.

        Args:
            latents: noisy ones `[B, C, T, h, w]`; `patch` divides h and w.
            timestep: `[B]`, 0 to 1000.
            text: what `project_text` returned.
        """
        patches = self._patchify(latents)
        num_tokens, dtype = patches.shape[1], self.patch_in.weight.dtype
        (context, sequence), (place, sequence_place) = self.shards_of(num_tokens), self.places()
        positions = sinusoidal_embedding(torch.arange(num_tokens, device=latents.device), self.config.hidden)
        hidden = self.patch_in(patches.to(dtype)) + positions.to(dtype)
        hidden = sequence.split(context.split(hidden, 1, place), 1, sequence_place)
        time = F.silu(self.time_in(sinusoidal_embedding(timestep, self.config.hidden).to(dtype)))
        for block, key_value in zip(self._blocks(), text.blocks, strict=True):
            hidden = block(hidden, time, key_value, text.mask, sequence, num_tokens)
        shift, scale = self.modulation_out(time).unsqueeze(1).chunk(2, dim=-1)
        predicted = self.patch_out(modulate(hidden, shift, scale))
        return self._unpatchify(context.gather(sequence.gather(predicted), 1, self.context_group), latents.shape)

    def _blocks(self) -> list[Block]:
        return list(self.blocks)  # type: ignore[arg-type]

    def _patchify(self, latents: torch.Tensor) -> torch.Tensor:
        size = self.config.patch
        batch, channels, frames, height, width = latents.shape
        patches = latents.reshape(batch, channels, frames, height // size, size, width // size, size)
        return patches.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)

    def _unpatchify(self, tokens: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        size = self.config.patch
        batch, channels, frames, height, width = shape
        patches = tokens.reshape(batch, frames, height // size, width // size, channels, size, size)
        return patches.permute(0, 4, 1, 2, 5, 3, 6).reshape(shape)


_BLOCK: Mapping = {
    "modulation": "modulation",
    "attention.qkv": ["attention.to_q", "attention.to_k", "attention.to_v"],
    "attention.text_k": "attention.text_k",
    "attention.text_v": "attention.text_v",
    "attention.out": "attention.out",
    "up": "up",
    "down": "down",
}
_GAINS: Mapping = {
    "attention.norm_q.weight": "attention.norm_q.weight",
    "attention.norm_k.weight": "attention.norm_k.weight",
}


def transformer_mapping(config: TransformerConfig) -> Mapping:
    """Parameter → key or keys in `transformer/`, where query, key and value are matrices of their own."""
    layers: Mapping = {layer: layer for layer in ("patch_in", "time_in", "modulation_out", "patch_out")}
    stack = ("blocks.", "blocks.", config.num_layers)
    return with_biases(layers | numbered(_BLOCK, *stack)) | numbered(_GAINS, *stack)


TRANSFORMER = ShardedComponent("transformer", TransformerConfig, Transformer, transformer_mapping)
