# SPDX-License-Identifier: Apache-2.0
"""The HunyuanVideo-1.5 DiT, written for one rank; TP is in the layers' names, CP in `context_attention`.

Two streams of tokens, video and text, have weights of their own and meet in one attention. The tokens S of the video
are split over CP, the L of the text are whole on every rank; with sequence parallelism a rank's video tokens are
further split over TP between two row-parallel layers. Below, S_cp = ceil(S / cp) and S_tp = ceil(S_cp / tp), or S_cp
without it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from omni_neuron_hunyuan_video15.config import MAX_POSITIONS, HunyuanVideo15Config
from omni_neuron_hunyuan_video15.embeddings import GlyphProjection, LatentEmbedding, TimeEmbedding, TokenRefiner
from omni_neuron_kernels import adaln_modulate, mlp, output_projection, rotate_pairs
from omni_neuron_parallel import (
    AxisGroup,
    ColumnParallelLinear,
    ContextMethod,
    QKVParallelLinear,
    RMSNorm,
    RotaryTables,
    RowParallelLinear,
    SequenceParallel,
    SplitTokens,
    context_attention,
)
from vllm_omni_neuron.sdk import check_tensor_parallel

EPSILON = 1e-6


class TransformerOutput(NamedTuple):
    """What `forward` returns; `[0]` and `.sample` are the same."""

    sample: torch.Tensor


class Projections(nn.Module):
    """Queries, keys and values of one stream: heads split over TP, the first two normalised."""

    def __init__(self, config: HunyuanVideo15Config, group: AxisGroup):
        super().__init__()
        self.head_dim = config.attention_head_dim
        self.qkv = QKVParallelLinear(config.hidden_size, config.num_attention_heads, self.head_dim, group=group)
        # Each head by itself, with one gain for all.
        self.norm_q = RMSNorm(self.head_dim, EPSILON)
        self.norm_k = RMSNorm(self.head_dim, EPSILON)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`[B, S, hidden]` to three `[B, S, N / tp, D]`."""
        query, key, value = (part.unflatten(2, (-1, self.head_dim)) for part in self.qkv(hidden))
        return self.norm_q(query), self.norm_k(key), value


class Outputs(nn.Module):
    """A row-parallel layer for each stream. Both sums over TP are one collective: its cost is mostly fixed per call.

    With sequence parallelism the video's sum is scattered, which takes a collective of its own.
    """

    def __init__(self, in_features: int, out_features: int, group: AxisGroup, sequence_parallel: bool):
        super().__init__()
        self.group = group
        self.video = RowParallelLinear(in_features, out_features, group=group, sequence_parallel=sequence_parallel)
        self.text = RowParallelLinear(in_features, out_features, group=group)

    def sum_over_ranks(self, video: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layers' outputs `[B, S_tp, …]` and `[B, L, …]` from this rank's `x Wᵀ + b / tp`."""
        if self.video.sequence_parallel:
            return self.video.sum_over_ranks(video), self.text.sum_over_ranks(text)
        summed = self.group.all_reduce(torch.cat([video, text], dim=1))
        return summed[:, : video.shape[1]], summed[:, video.shape[1] :]


class JointAttention(nn.Module):
    """Attention of both streams' tokens on both streams' tokens; only the video's have positions."""

    def __init__(
        self,
        config: HunyuanVideo15Config,
        group: AxisGroup,
        context_group: AxisGroup,
        sequence_parallel: bool,
        context_method: ContextMethod,
    ):
        super().__init__()
        self.context_group = context_group
        # A ring of one rank would be plain attention in a slower way.
        self.context_method: ContextMethod = context_method if context_group.size > 1 else "auto"
        self.video = Projections(config, group)
        self.text = Projections(config, group)
        self.o = Outputs(config.hidden_size, config.hidden_size, group, sequence_parallel)

    def forward(
        self,
        video: torch.Tensor,
        text: torch.Tensor,
        text_mask: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        video_length: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`[B, S_cp, hidden]` and `[B, L, hidden]` to `[B, S_tp, hidden]` and `[B, L, hidden]`.

        Args:
            video: this CP rank's tokens.
            text: all tokens; every CP rank computes the same of them.
            text_mask: bool `[B, L]`, false for padding, which nobody attends to.
            rotary: the tables of `RotaryTables` for this CP rank's tokens.
            video_length: S; what follows is padding.
        """
        query, key, value = self.video(video)
        text_query, text_key, text_value = self.text(text)
        attended = context_attention(
            torch.cat([rotate_pairs(query, *rotary), text_query], dim=1),
            rotate_pairs(key, *rotary),
            value,
            group=self.context_group,
            kv_length=video_length,
            method=self.context_method,
            joint_kv=(text_key, text_value),
            joint_mask=text_mask,
        ).flatten(2)
        return self.o.sum_over_ranks(
            _project(attended[:, : video.shape[1]], self.o.video), _project(attended[:, video.shape[1] :], self.o.text)
        )


class FeedForward(nn.Module):
    """Two linear layers with a tanh-approximated GELU between, for each stream, the inner features split over TP."""

    def __init__(self, config: HunyuanVideo15Config, group: AxisGroup, sequence_parallel: bool):
        super().__init__()
        self.video = ColumnParallelLinear(config.hidden_size, config.ffn_dim, group=group)
        self.text = ColumnParallelLinear(config.hidden_size, config.ffn_dim, group=group)
        self.down = Outputs(config.ffn_dim, config.hidden_size, group, sequence_parallel)

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[B, S_cp, hidden]` and `[B, L, hidden]` to `[B, S_tp, hidden]` and `[B, L, hidden]`."""
        return self.down.sum_over_ranks(
            _feed_forward(video, self.video, self.down.video), _feed_forward(text, self.text, self.down.text)
        )


def _project(hidden: torch.Tensor, layer: RowParallelLinear) -> torch.Tensor:
    assert layer.bias is not None
    return output_projection(hidden, layer.weight.t(), layer.bias)


def _feed_forward(hidden: torch.Tensor, up: ColumnParallelLinear, down: RowParallelLinear) -> torch.Tensor:
    assert up.bias is not None and down.bias is not None
    return mlp(hidden, up.weight.t(), up.bias, down.weight.t(), down.bias)


class TransformerBlock(nn.Module):
    """Joint attention and feed-forwards, modulated by the timestep."""

    def __init__(
        self,
        config: HunyuanVideo15Config,
        group: AxisGroup,
        context_group: AxisGroup,
        sequence_parallel: bool,
        context_method: ContextMethod,
    ):
        super().__init__()
        self.sequence_group = group if sequence_parallel else AxisGroup("tp")
        # A third of the model's weights, for one row: split over TP, and gathered for all blocks at once.
        self.modulation = ColumnParallelLinear(config.hidden_size, 6 * config.hidden_size, group=group)
        self.text_modulation = ColumnParallelLinear(config.hidden_size, 6 * config.hidden_size, group=group)
        self.attn = JointAttention(config, group, context_group, sequence_parallel, context_method)
        self.ffn = FeedForward(config, group, sequence_parallel)

    def forward(
        self,
        video: torch.Tensor,
        text: torch.Tensor,
        modulation: tuple[torch.Tensor, torch.Tensor],
        text_mask: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        video_length: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One block, `[B, S_tp, hidden]` and `[B, L, hidden]` to the same.

        Args:
            video: this rank's tokens.
            text: all tokens.
            modulation: `[B, 6 · hidden]` for the video and for the text.
            text_mask, rotary, video_length: as `JointAttention` takes them.
        """
        sequence = SequenceParallel(rotary[0].shape[0], self.sequence_group)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation[0].chunk(6, dim=1)
        text_shift, text_scale, text_gate, text_mlp_shift, text_mlp_scale, text_mlp_gate = modulation[1].chunk(6, dim=1)

        normalised, _ = adaln_modulate(video, scale, shift, epsilon=EPSILON)
        text_normalised, _ = adaln_modulate(text, text_scale, text_shift, epsilon=EPSILON)
        branch, text_branch = self.attn(sequence.gather(normalised), text_normalised, text_mask, rotary, video_length)
        normalised, video = adaln_modulate(video, mlp_scale, mlp_shift, branch=branch, gate=gate, epsilon=EPSILON)
        text_normalised, text = adaln_modulate(
            text, text_mlp_scale, text_mlp_shift, branch=text_branch, gate=text_gate, epsilon=EPSILON
        )
        branch, text_branch = self.ffn(sequence.gather(normalised), text_normalised)
        return video + mlp_gate.unsqueeze(1) * branch, text + text_mlp_gate.unsqueeze(1) * text_branch


class HunyuanVideo15Transformer(SplitTokens):
    """The text-to-video DiT on one rank of a TP and a CP group.

    Every rank embeds all latents and keeps its tokens; S need not be divisible by anything. The projected tokens, few
    channels wide, are gathered once, at the end.

    An image's tokens, which the model was trained with as well, are left out: for text-to-video all of them are masked,
    so that nothing attends to them.

    Parameters are empty until they are loaded; construct it under `torch.device("meta")` to spend no memory before
    that.

    Args:
        config: sizes.
        group: the TP group; this process's by default.
        context_group: the CP group; this process's by default.
        sequence_parallel: split the video's tokens over TP between row-parallel layers (`SequenceParallel`).
        context_method: how attention meets the keys of other CP ranks; see `context_attention`.

    Raises:
        ModelConfigError: TP does not divide the heads.
    """

    def __init__(
        self,
        config: HunyuanVideo15Config,
        *,
        group: AxisGroup | None = None,
        context_group: AxisGroup | None = None,
        sequence_parallel: bool = False,
        context_method: ContextMethod = "auto",
    ):
        super().__init__(group, context_group, sequence_parallel=sequence_parallel)
        self.config, group = config, self.group
        check_tensor_parallel(group.size, config.num_attention_heads)
        dim = config.hidden_size
        self.rope = RotaryTables(config.rope_axes_dim, [MAX_POSITIONS] * 3, theta=config.rope_theta)
        self.latent_embedding = LatentEmbedding(config)
        self.time_embedder = TimeEmbedding(dim)
        self.token_refiner = TokenRefiner(config, group)
        self.glyph_projection = GlyphProjection(config)
        self.token_kinds = nn.Embedding(3, dim)  # of the refiner, of the glyphs, and of an image
        self.blocks = nn.ModuleList(
            TransformerBlock(config, group, self.context_group, sequence_parallel, context_method)
            for _ in range(config.num_layers)
        )
        self.modulation_out = nn.Linear(dim, 2 * dim)
        self.proj_out = nn.Linear(dim, config.out_channels)
        self.requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations and parameters."""
        return self.proj_out.weight.dtype

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_attention_mask: torch.Tensor,
        encoder_hidden_states_2: torch.Tensor,
        encoder_attention_mask_2: torch.Tensor,
        *,
        return_dict: bool = True,
        attention_kwargs: dict[str, Any] | None = None,
    ) -> TransformerOutput:
        """Predict the velocity (noise − clean latents).

        Args:
            hidden_states: noisy latents, the condition's latents and a mask `[B, in_channels, T, H, W]`.
            timestep: `[B]`, 0 to 1000.
            encoder_hidden_states: the language model's text `[B, L_1, text_embed_dim]`.
            encoder_attention_mask: `[B, L_1]`, 1 or true where it is text, at least once.
            encoder_hidden_states_2: ByT5's text `[B, L_2, text_embed_2_dim]`.
            encoder_attention_mask_2: `[B, L_2]`; may be all 0.
            return_dict: there for diffusers' signature; the result serves either way.
            attention_kwargs: accepted for diffusers' signature; must be empty.

        Returns:
            The prediction `[B, out_channels, T, H, W]` in the model's dtype, the same on every TP and CP rank.

        Raises:
            ValueError: attention_kwargs given.
        """
        if attention_kwargs:
            raise ValueError(f"attention_kwargs {sorted(attention_kwargs)} have no meaning for this model")
        t, h, w = hidden_states.shape[2:]
        context, sequence = self.shards_of(t * h * w)
        place, sequence_place = self.places()

        video = self.latent_embedding(hidden_states.to(self.dtype))
        video = sequence.split(context.split(video, 1, place), 1, sequence_place)
        cos, sin = (context.split(table, 0, place) for table in self.rope(t, h, w))
        text, text_mask = self._text(
            encoder_hidden_states.to(self.dtype),
            encoder_attention_mask.bool(),
            encoder_hidden_states_2.to(self.dtype),
            encoder_attention_mask_2.bool(),
            timestep,
        )
        temb = F.silu(self.time_embedder(timestep))
        for block, modulation in zip(self.blocks, self._modulations(temb), strict=True):
            video, text = block(video, text, modulation, text_mask, (cos, sin), context.sequence_length)

        scale, shift = self.modulation_out(temb).chunk(2, dim=1)
        projected = self.proj_out(adaln_modulate(video, scale, shift, epsilon=EPSILON)[0])
        projected = context.gather(sequence.gather(projected), 1, self.context_group)
        return TransformerOutput(projected.transpose(1, 2).unflatten(2, (t, h, w)))

    def _text(
        self,
        text: torch.Tensor,
        mask: torch.Tensor,
        glyphs: torch.Tensor,
        glyph_mask: torch.Tensor,
        timestep: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens of both texts `[B, L_2 + L_1, hidden]` and the mask of those that are not padding.

        Their order means nothing, for they have no positions.
        """
        kinds = self.token_kinds.weight
        refined = self.token_refiner(text, timestep, mask) + kinds[0]
        projected = self.glyph_projection(glyphs) + kinds[1]
        return torch.cat([projected, refined], dim=1), torch.cat([glyph_mask, mask], dim=1)

    def _modulations(self, temb: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each block's `[B, 6 · hidden]` for the video and for the text, with one collective for all of them."""
        blocks: list[TransformerBlock] = list(self.blocks)  # type: ignore[arg-type]
        shards = [layer(temb) for block in blocks for layer in (block.modulation, block.text_modulation)]
        whole = self.group.all_gather(torch.stack(shards), dim=-1).unbind(0)
        return list(zip(whole[::2], whole[1::2], strict=True))
