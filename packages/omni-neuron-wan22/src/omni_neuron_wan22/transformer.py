# SPDX-License-Identifier: Apache-2.0
"""The Wan2.2 DiT, written for one rank; TP is in the layers' names, CP in `context_attention`.

The tokens S of a video are split over CP, whole over TP; with sequence parallelism a rank's tokens are further split
over TP between two row-parallel layers. Below, S_cp = ceil(S / cp) and S_tp = ceil(S_cp / tp), or S_cp without it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from omni_neuron_kernels import flash_attention, mlp, output_projection, qkv_projection, rms_norm
from omni_neuron_parallel import (
    AxisGroup,
    ColumnParallelLinear,
    ContextMethod,
    DistributedRMSNorm,
    QKVParallelLinear,
    RowParallelLinear,
    SequenceParallel,
    SequenceShard,
    SplitTokens,
    context_attention,
    get_group,
)
from omni_neuron_wan22.config import WanConfig
from omni_neuron_wan22.embeddings import PatchEmbedding, WanTimeTextEmbedding
from omni_neuron_wan22.modulation import WanAdaLayerNorm, WanGatedResidual, add_gated, float32_parameter
from omni_neuron_wan22.rope import WanRotaryPosEmbed


class CrossAttentionKV(NamedTuple):
    """The text, and the image embedding where the model has one, as every block's cross-attention sees them.

    Attributes:
        blocks: one (key, value) pair `[B, N / tp, L, D]` a block.
        bias: `[1, 1, 1, L]` added to the text's scores; None for none.
        image_blocks: the image's pairs, which get a softmax of their own; None where the model has no image embedding.
    """

    blocks: list[tuple[torch.Tensor, torch.Tensor]]
    bias: torch.Tensor | None = None
    image_blocks: list[tuple[torch.Tensor, torch.Tensor]] | None = None


def fold_padding(embeds: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Replace the zero rows that pad a text by one of them, without changing what cross-attention returns.

    Wan's cross-attention has no mask: the padding takes part. But equal rows have equal keys k and values v in every
    block, and m of them contribute m · exp(q·k) · v = exp(q·k + log m) · v. So one row with log m added to its score
    stands for all, and a short prompt costs a few keys instead of 512.

    Args:
        embeds: `[B, L, text_dim]`, zero from row `length` on, for the whole batch.
        length: rows that hold text.

    Returns:
        `[B, length + 1, text_dim]` and the scores' bias `[1, 1, 1, length + 1]` float32; or what was given and
        None, where at most one row is padding.
    """
    padded = embeds.shape[1] - length
    if padded <= 1:
        return embeds, None
    bias = torch.zeros(1, 1, 1, length + 1, dtype=torch.float32, device=embeds.device)
    bias[..., -1] = math.log(padded)
    return embeds[:, : length + 1], bias


class TransformerOutput(NamedTuple):
    """What `forward` returns; `[0]` and `.sample` are the same."""

    sample: torch.Tensor


class Tokens(NamedTuple):
    """What passes from block to block, and what every block takes with it.

    Attributes:
        hidden: this rank's tokens `[B, S_tp, hidden]`.
        temb: the output's modulation `[B, hidden]`; with `first_frame` `[2 B, hidden]`, that of the first frame last.
        modulation: the blocks' `[B, 6, hidden]`, or `[2 B, 6, hidden]` likewise.
        rotary_emb: the tables of `WanRotaryPosEmbed` for this CP rank's tokens.
        first_frame: bool `[S_tp, 1]`, the tokens of the first latent frame, where that has a timestep of its own.
    """

    hidden: torch.Tensor
    temb: torch.Tensor
    modulation: torch.Tensor
    rotary_emb: tuple[torch.Tensor, torch.Tensor]
    first_frame: torch.Tensor | None = None


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of `[B, S, N, D]` on `[B, N, L, D]`, scores plus `bias` `[1, 1, 1, L]`, as `[B, S, N · D]`."""
    if bias is None:
        return flash_attention(query, key.transpose(1, 2), value.transpose(1, 2)).flatten(2)
    query, bias = query.transpose(1, 2), bias.to(query.dtype).expand(1, 1, query.shape[1], -1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias).transpose(1, 2).flatten(2)


class WanHeadNorm(DistributedRMSNorm):
    """`DistributedRMSNorm`, by the kernel of one rank where there is one."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """See the class."""
        if self.group.size > 1:
            return super().forward(hidden)
        return rms_norm(hidden, self.weight, epsilon=self.eps)


class WanOutputProjection(RowParallelLinear):
    """`RowParallelLinear` with a bias, by a kernel."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """See the class."""
        assert self.bias is not None
        return self.sum_over_ranks(output_projection(hidden, self.weight.t(), self.bias))


class WanSelfAttention(nn.Module):
    """Self-attention over all tokens: heads split over TP, queries and keys RMS-normalised across all heads.

    Input `[B, S_cp, hidden]`, output `[B, S_tp, hidden]`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int,
        eps: float,
        *,
        group: AxisGroup | None = None,
        context_group: AxisGroup | None = None,
        sequence_parallel: bool = False,
        context_method: ContextMethod = "auto",
    ):
        super().__init__()
        self.group = group or get_group("tp")
        self.context_group = context_group or get_group("cp")
        # A ring of one rank would be plain attention in a slower way.
        self.context_method: ContextMethod = context_method if self.context_group.size > 1 else "auto"
        self.num_heads, self.head_dim, self.eps = num_heads // self.group.size, head_dim, eps
        inner = num_heads * head_dim
        self.qkv = QKVParallelLinear(dim, num_heads, head_dim, group=self.group)
        self.norm_q = DistributedRMSNorm(inner, eps, group=self.group)
        self.norm_k = DistributedRMSNorm(inner, eps, group=self.group)
        self.o = WanOutputProjection(inner, dim, group=self.group, sequence_parallel=sequence_parallel)

    def forward(
        self, hidden: torch.Tensor, rotary_emb: tuple[torch.Tensor, torch.Tensor], kv_length: int | None = None
    ) -> torch.Tensor:
        """Attend to the tokens of all CP ranks.

        Args:
            hidden: this CP rank's tokens.
            rotary_emb: the tables of `WanRotaryPosEmbed` for these tokens.
            kv_length: S, where pads follow it; None for no pads.
        """
        query, key, value = self.project(hidden, rotary_emb)
        attended = context_attention(
            query, key, value, group=self.context_group, kv_length=kv_length, method=self.context_method
        )
        return self.o(attended.flatten(2))

    def project(
        self, hidden: torch.Tensor, rotary_emb: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values `[B, S_cp, N / tp, D]`, the first two normalised and rotated."""
        return qkv_projection(
            hidden,
            self.qkv.weight.t(),
            self.qkv.bias,
            heads=(self.num_heads, self.num_heads),
            head_dim=self.head_dim,
            query_gain=self.norm_q.weight,
            key_gain=self.norm_k.weight,
            rotation=rotary_emb,
            epsilon=self.eps,
            ranks=self.group.size,
            all_reduce=self.group.all_reduce,
        )


class WanCrossAttention(nn.Module):
    """Attention of the video's tokens on the text; keys and values are projected once a request (`project_kv`).

    As in Wan, the padded text positions take part: there is no mask. Every CP rank has the whole text, so nothing is
    communicated over CP. With `added_kv_proj_dim` the tokens attend to an image embedding, too, in a softmax of its
    own, and the two results are added.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int,
        eps: float,
        *,
        added_kv_proj_dim: int | None = None,
        group: AxisGroup | None = None,
        sequence_parallel: bool = False,
    ):
        super().__init__()
        group = group or get_group("tp")
        self.head_dim = head_dim
        inner = num_heads * head_dim
        if added_kv_proj_dim is not None:
            self.image_k = ColumnParallelLinear(added_kv_proj_dim, inner, group=group)
            self.image_v = ColumnParallelLinear(added_kv_proj_dim, inner, group=group)
            self.norm_image_k = WanHeadNorm(inner, eps, group=group)
        self.q = ColumnParallelLinear(dim, inner, group=group)
        self.k = ColumnParallelLinear(dim, inner, group=group)
        self.v = ColumnParallelLinear(dim, inner, group=group)
        self.norm_q = WanHeadNorm(inner, eps, group=group)
        self.norm_k = WanHeadNorm(inner, eps, group=group)
        self.o = WanOutputProjection(inner, dim, group=group, sequence_parallel=sequence_parallel)

    def project_kv(self, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[B, N / tp, L, D]` of the embedded text `context` `[B, L, hidden]`."""
        key, value = self._heads(self.norm_k(self.k(context))), self._heads(self.v(context))
        return key.transpose(1, 2).contiguous(), value.transpose(1, 2).contiguous()

    def project_image_kv(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[B, N / tp, L, D]` of the embedded image `[B, L, hidden]`."""
        key, value = self._heads(self.norm_image_k(self.image_k(image))), self._heads(self.image_v(image))
        return key.transpose(1, 2).contiguous(), value.transpose(1, 2).contiguous()

    def forward(
        self,
        hidden: torch.Tensor,
        key_value: tuple[torch.Tensor, torch.Tensor],
        bias: torch.Tensor | None = None,
        image_key_value: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Attend: `[B, S_cp, hidden]` to `[B, S_tp, hidden]`; `bias` as in `CrossAttentionKV`."""
        query = self.project_query(hidden)
        attended = _attend(query, *key_value, bias)
        if image_key_value is not None:
            attended = attended + _attend(query, *image_key_value)
        return self.o(attended)

    def project_query(self, hidden: torch.Tensor) -> torch.Tensor:
        """Queries `[B, S_cp, N / tp, D]` of `hidden`."""
        return self._heads(self.norm_q(self.q(hidden)))

    def _heads(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unflatten(2, (-1, self.head_dim))


class WanFeedForward(nn.Module):
    """Two linear layers with a tanh-approximated GELU between, the inner features split over TP."""

    def __init__(self, dim: int, inner_dim: int, *, group: AxisGroup | None = None, sequence_parallel: bool = False):
        super().__init__()
        self.up = ColumnParallelLinear(dim, inner_dim, group=group)
        self.down = RowParallelLinear(inner_dim, dim, group=group, sequence_parallel=sequence_parallel)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[B, S_cp, dim]` to `[B, S_tp, dim]`."""
        up, down = self.up, self.down
        assert up.bias is not None and down.bias is not None
        return down.sum_over_ranks(mlp(hidden, up.weight.t(), up.bias, down.weight.t(), down.bias))


class WanTransformerBlock(nn.Module):
    """Self-attention, cross-attention and feed-forward, the first and the last modulated by the timestep."""

    def __init__(
        self,
        config: WanConfig,
        *,
        group: AxisGroup | None = None,
        context_group: AxisGroup | None = None,
        sequence_parallel: bool = False,
        context_method: ContextMethod = "auto",
    ):
        super().__init__()
        group = group or get_group("tp")
        self.sequence_group = group if sequence_parallel else AxisGroup("tp")
        dim, heads, head_dim = config.hidden_size, config.num_attention_heads, config.attention_head_dim
        self.norm1 = WanAdaLayerNorm(config.eps)
        self.attn1 = WanSelfAttention(
            dim,
            heads,
            head_dim,
            config.eps,
            group=group,
            context_group=context_group,
            sequence_parallel=sequence_parallel,
            context_method=context_method,
        )
        self.norm2 = WanGatedResidual(dim, config.eps, norm=config.cross_attn_norm)
        self.attn2 = WanCrossAttention(
            dim,
            heads,
            head_dim,
            config.eps,
            added_kv_proj_dim=config.added_kv_proj_dim,
            group=group,
            sequence_parallel=sequence_parallel,
        )
        self.norm3 = WanAdaLayerNorm(config.eps)
        self.ffn = WanFeedForward(dim, config.ffn_dim, group=group, sequence_parallel=sequence_parallel)
        self.scale_shift_table = float32_parameter(1, 6, dim)

    def forward(
        self,
        hidden: torch.Tensor,
        temb: torch.Tensor,
        rotary_emb: tuple[torch.Tensor, torch.Tensor],
        cross_attention_kv: tuple[torch.Tensor, torch.Tensor],
        cross_attention_bias: torch.Tensor | None = None,
        kv_length: int | None = None,
        image_kv: tuple[torch.Tensor, torch.Tensor] | None = None,
        first_frame: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One block, `[B, S_tp, hidden]` to the same.

        Args:
            hidden: this rank's tokens.
            temb: the projected timestep, `modulation` of `Tokens`.
            rotary_emb: the tables of `WanRotaryPosEmbed` for this CP rank's tokens.
            cross_attention_kv: this block's pair of `project_cross_attention_kv`.
            cross_attention_bias: the bias that goes with it.
            kv_length: S, where pads follow it; None for no pads.
            image_kv: this block's pair of the image embedding, where the model has one.
            first_frame: as in `Tokens`.
        """
        sequence = SequenceParallel(rotary_emb[0].shape[0], self.sequence_group)
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = (self.scale_shift_table + temb.float()).unbind(1)

        attended = self.attn1(sequence.gather(self.norm1(hidden, scale, shift, first_frame)), rotary_emb, kv_length)
        normalised, hidden = self.norm2(hidden, attended, gate, first_frame)
        hidden = hidden + self.attn2(sequence.gather(normalised), cross_attention_kv, cross_attention_bias, image_kv)
        fed = self.ffn(sequence.gather(self.norm3(hidden, ffn_scale, ffn_shift, first_frame)))
        return add_gated(hidden, fed, ffn_gate, first_frame)


class WanTransformer3DModel(SplitTokens):
    """The Wan2.2 DiT of one expert on one rank of a TP and a CP group.

    Every rank embeds all patches and keeps its tokens; S need not be divisible by anything. The projected tokens, few
    channels wide, are gathered once, at the end.

    Parameters are empty until `load_state_dict` (see `omni_neuron_wan22.load_transformer`); construct it under
    `torch.device("meta")` to spend no memory before that.

    Args:
        config: sizes.
        group: the TP group; this process's by default.
        context_group: the CP group; this process's by default.
        sequence_parallel: split tokens over TP between row-parallel layers (`SequenceParallel`).
        context_method: how self-attention meets the keys of other CP ranks; see `context_attention`.

    Raises:
        WanConfigError: TP does not divide the heads.
    """

    def __init__(
        self,
        config: WanConfig,
        *,
        group: AxisGroup | None = None,
        context_group: AxisGroup | None = None,
        sequence_parallel: bool = False,
        context_method: ContextMethod = "auto",
    ):
        super().__init__(group, context_group, sequence_parallel=sequence_parallel)
        config.check_tensor_parallel(self.group.size)
        self.config = config
        self.rope = WanRotaryPosEmbed(config.attention_head_dim, config.patch_size, config.rope_max_seq_len)
        self.patch_embedding = PatchEmbedding(config.in_channels, config.hidden_size, config.patch_size)
        self.condition_embedder = WanTimeTextEmbedding(config)
        self.blocks = nn.ModuleList(
            WanTransformerBlock(
                config,
                group=self.group,
                context_group=self.context_group,
                sequence_parallel=sequence_parallel,
                context_method=context_method,
            )
            for _ in range(config.num_layers)
        )
        self.norm_out = WanAdaLayerNorm(config.eps)
        self.proj_out = nn.Linear(config.hidden_size, config.out_channels * config.patch_volume)
        self.scale_shift_table = float32_parameter(1, 2, config.hidden_size)
        self.requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations and of all but the modulation's parameters."""
        return self.proj_out.weight.dtype

    def project_cross_attention_kv(
        self,
        encoder_hidden_states: torch.Tensor,
        bias: torch.Tensor | None = None,
        encoder_hidden_states_image: torch.Tensor | None = None,
    ) -> CrossAttentionKV:
        """Every block's keys and values of the encoded text `[B, L, text_dim]`; good for all steps of a request.

        Args:
            encoder_hidden_states: the text, or what `fold_padding` made of it.
            bias: the bias that `fold_padding` returned with it.
            encoder_hidden_states_image: CLIP's embedding `[images, L, image_dim]`, where the model takes one.

        Raises:
            ValueError: an image embedding for a model that takes none, or none for one that does.
        """
        embedder = self.condition_embedder.image_embedder
        if (embedder is None) != (encoder_hidden_states_image is None):
            given = "no image embedding" if encoder_hidden_states_image is None else "an image embedding"
            raise ValueError(f"{given} is given; the model has image_dim = {self.config.image_dim}")
        context = self.condition_embedder.embed_text(encoder_hidden_states.to(self.dtype))
        image_blocks = None
        if embedder is not None and encoder_hidden_states_image is not None:
            image = embedder(encoder_hidden_states_image.to(self.dtype))
            image_blocks = [block.attn2.project_image_kv(image) for block in self._blocks()]
        return CrossAttentionKV([block.attn2.project_kv(context) for block in self._blocks()], bias, image_blocks)

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_hidden_states_image: torch.Tensor | None = None,
        *,
        cross_attention_kv_cache: CrossAttentionKV | None = None,
        first_frame_timestep: torch.Tensor | None = None,
        return_dict: bool = True,
        attention_kwargs: dict[str, Any] | None = None,
    ) -> TransformerOutput:
        """Predict the velocity (noise − clean latents).

        Args:
            hidden_states: noisy latents `[B, C, T, H, W]`, with their condition in further channels where the model
                takes one.
            timestep: `[B]`, 0 to 1000.
            encoder_hidden_states: encoded text `[B, L, text_dim]`; not needed with a cache.
            encoder_hidden_states_image: as in `project_cross_attention_kv`; not needed with a cache.
            cross_attention_kv_cache: what `project_cross_attention_kv` returned for this text.
            first_frame_timestep: `[B]`, the timestep of the first latent frame, where it is not that of the others
                (TI2V-5B with an image: 0). diffusers has one timestep a token instead.
            return_dict: there for diffusers' signature; the result serves either way.
            attention_kwargs: accepted for diffusers' signature; must be empty.

        Returns:
            The prediction `[B, C, T, H, W]` in the model's dtype, the same on every TP and CP rank.

        Raises:
            ValueError: neither text nor cache, or attention_kwargs given.
        """
        if attention_kwargs:
            raise ValueError(f"attention_kwargs {sorted(attention_kwargs)} have no meaning for this model")
        if cross_attention_kv_cache is None:
            if encoder_hidden_states is None:
                raise ValueError("pass encoder_hidden_states or a cross_attention_kv_cache")
            cross_attention_kv_cache = self.project_cross_attention_kv(
                encoder_hidden_states, encoder_hidden_states_image=encoder_hidden_states_image
            )
        if len(cross_attention_kv_cache.blocks) != len(self.blocks):
            raise ValueError(
                f"the cross-attention cache has {len(cross_attention_kv_cache.blocks)} pairs, the model "
                f"{len(self.blocks)} blocks"
            )
        tokens = self.embed(hidden_states, timestep, first_frame_timestep)
        tokens = self.run_blocks(tokens, cross_attention_kv_cache, hidden_states.shape)
        return self.predict(tokens, hidden_states.shape)

    def embed(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        first_frame_timestep: torch.Tensor | None = None,
    ) -> Tokens:
        """The first part of `forward`: what the blocks take."""
        hidden = self.patch_embedding(hidden_states.to(self.dtype))
        context, sequence = self.shards(hidden_states.shape)
        place, sequence_place = self.places()
        hidden = sequence.split(context.split(hidden, 1, place), 1, sequence_place)
        cos, sin = (context.split(table, 0, place) for table in self.rope(hidden_states))
        first_frame = None
        if first_frame_timestep is not None:
            timestep = torch.cat([timestep, first_frame_timestep])
            of_first = context.sequence_length * self.config.patch_size[0] // hidden_states.shape[2]
            first_frame = torch.arange(context.sequence_length, device=hidden.device)[:, None] < of_first
            first_frame = sequence.split(context.split(first_frame, 0, place), 0, sequence_place)
        return Tokens(hidden, *self.condition_embedder.embed_time(timestep, self.dtype), (cos, sin), first_frame)

    def run_blocks(
        self,
        tokens: Tokens,
        cross_attention: CrossAttentionKV,
        latent_shape: torch.Size,
        first: int = 0,
        last: int | None = None,
    ) -> Tokens:
        """The blocks `first` to `last`, exclusive, on what `embed` returned for latents of `latent_shape`."""
        hidden, length = tokens.hidden, self.shards(latent_shape)[0].sequence_length
        pairs = cross_attention.blocks[first:last]
        images = cross_attention.image_blocks[first:last] if cross_attention.image_blocks else [None] * len(pairs)
        for block, key_value, image in zip(self._blocks()[first:last], pairs, images, strict=True):
            hidden = block(
                hidden,
                tokens.modulation,
                tokens.rotary_emb,
                key_value,
                cross_attention.bias,
                length,
                image,
                tokens.first_frame,
            )
        return tokens._replace(hidden=hidden)

    def predict(self, tokens: Tokens, latent_shape: torch.Size) -> TransformerOutput:
        """The last part of `forward`: the prediction from the last block's tokens."""
        context, sequence = self.shards(latent_shape)
        shift, scale = (self.scale_shift_table + tokens.temb.float().unsqueeze(1)).unbind(1)
        projected = self.proj_out(self.norm_out(tokens.hidden, scale, shift, tokens.first_frame))
        projected = context.gather(sequence.gather(projected), 1, self.context_group)
        return TransformerOutput(self._unpatchify(projected, latent_shape))

    def shards(self, latent_shape: torch.Size) -> tuple[SequenceShard, SequenceParallel]:
        """This rank's tokens of latents `[B, C, T, H, W]`, over CP, and of those over TP."""
        sizes = zip(latent_shape[2:], self.config.patch_size, strict=True)
        length = math.prod([size // patch for size, patch in sizes])  # a list: Dynamo hands no generator to C
        return self.shards_of(length)

    def _blocks(self) -> list[WanTransformerBlock]:
        return list(self.blocks)  # type: ignore[arg-type]

    def _unpatchify(self, tokens: torch.Tensor, latent_shape: torch.Size) -> torch.Tensor:
        p_t, p_h, p_w = self.config.patch_size
        b, _, t, h, w = latent_shape
        t, h, w = t // p_t, h // p_h, w // p_w
        patches = tokens.reshape(b, t, h, w, p_t, p_h, p_w, -1).permute(0, 7, 1, 4, 2, 5, 3, 6)
        return patches.reshape(b, -1, t * p_t, h * p_h, w * p_w)
