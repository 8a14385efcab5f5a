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

from omni_neuron_kernels import adaln_modulate, flash_attention, mlp, output_projection, qkv_projection, rms_norm
from omni_neuron_parallel import (
    AxisGroup,
    ColumnParallelLinear,
    ContextMethod,
    DistributedRMSNorm,
    QKVParallelLinear,
    RowParallelLinear,
    SequenceParallel,
    SequenceShard,
    context_attention,
    get_group,
    group_place,
)
from omni_neuron_runtime import SafetensorsWeightLoader, set_weight_loader
from omni_neuron_wan22.config import WanConfig
from omni_neuron_wan22.rope import WanRotaryPosEmbed


class CrossAttentionKV(NamedTuple):
    """The text as every block's cross-attention sees it.

    Attributes:
        blocks: one (key, value) pair `[B, N / tp, L, D]` a block.
        bias: `[1, 1, 1, L]` added to the scores; None for none.
    """

    blocks: list[tuple[torch.Tensor, torch.Tensor]]
    bias: torch.Tensor | None = None


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
        temb: the output's modulation `[B, hidden]`.
        modulation: the blocks' `[B, 6, hidden]`.
        rotary_emb: the tables of `WanRotaryPosEmbed` for this CP rank's tokens.
    """

    hidden: torch.Tensor
    temb: torch.Tensor
    modulation: torch.Tensor
    rotary_emb: tuple[torch.Tensor, torch.Tensor]


def _float32_parameter(*shape: int) -> nn.Parameter:
    # Wan keeps these in float32 whatever the model's dtype: they set the modulation of every block.
    return nn.Parameter(torch.empty(*shape, dtype=torch.float32), requires_grad=False)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of `[B, S, N, D]` on `[B, N, L, D]`, scores plus `bias` `[1, 1, 1, L]`, as `[B, S, N · D]`."""
    if bias is None:
        return flash_attention(query, key.transpose(1, 2), value.transpose(1, 2)).flatten(2)
    query, bias = query.transpose(1, 2), bias.to(query.dtype).expand(1, 1, query.shape[1], -1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias).transpose(1, 2).flatten(2)


class WanAdaLayerNorm(nn.Module):
    """Layer norm over the last dim, scaled and shifted by the timestep; float32 inside, in and out in one dtype."""

    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps

    def forward(self, hidden: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        """`[B, S, F]` and `[B, F]` twice to LayerNorm(hidden) · (1 + scale) + shift."""
        return adaln_modulate(hidden, scale, shift, epsilon=self.eps)[0]


class WanGatedResidual(nn.Module):
    """hidden + gate · branch, and its layer norm with a gain and a bias, or itself without `norm`; float32 inside."""

    def __init__(self, size: int, eps: float, *, norm: bool):
        super().__init__()
        self.eps = eps
        self.weight = _float32_parameter(size) if norm else None
        self.bias = _float32_parameter(size) if norm else None

    def forward(
        self, hidden: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`[B, S, F]` twice and `[B, F]` to the normalised and the plain sum, both of hidden's dtype."""
        if self.weight is None or self.bias is None:
            updated = _add_gated(hidden, branch, gate)
            return updated, updated
        scale, shift = (self.weight - 1).expand_as(gate), self.bias.expand_as(gate)
        return adaln_modulate(hidden, scale, shift, branch=branch, gate=gate, epsilon=self.eps)


def _add_gated(hidden: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(hidden.float(), branch.float(), gate[:, None]).to(hidden.dtype)


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
    communicated over CP.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int,
        eps: float,
        *,
        group: AxisGroup | None = None,
        sequence_parallel: bool = False,
    ):
        super().__init__()
        group = group or get_group("tp")
        self.head_dim = head_dim
        inner = num_heads * head_dim
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

    def forward(
        self,
        hidden: torch.Tensor,
        key_value: tuple[torch.Tensor, torch.Tensor],
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend: `[B, S_cp, hidden]` to `[B, S_tp, hidden]`; `bias` as in `CrossAttentionKV`."""
        return self.o(_attend(self.project_query(hidden), *key_value, bias))

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
            dim, heads, head_dim, config.eps, group=group, sequence_parallel=sequence_parallel
        )
        self.norm3 = WanAdaLayerNorm(config.eps)
        self.ffn = WanFeedForward(dim, config.ffn_dim, group=group, sequence_parallel=sequence_parallel)
        self.scale_shift_table = _float32_parameter(1, 6, dim)

    def forward(
        self,
        hidden: torch.Tensor,
        temb: torch.Tensor,
        rotary_emb: tuple[torch.Tensor, torch.Tensor],
        cross_attention_kv: tuple[torch.Tensor, torch.Tensor],
        cross_attention_bias: torch.Tensor | None = None,
        kv_length: int | None = None,
    ) -> torch.Tensor:
        """One block, `[B, S_tp, hidden]` to the same.

        Args:
            hidden: this rank's tokens.
            temb: `[B, 6, hidden]`, the projected timestep.
            rotary_emb: the tables of `WanRotaryPosEmbed` for this CP rank's tokens.
            cross_attention_kv: this block's pair of `project_cross_attention_kv`.
            cross_attention_bias: the bias that goes with it.
            kv_length: S, where pads follow it; None for no pads.
        """
        sequence = SequenceParallel(rotary_emb[0].shape[0], self.sequence_group)
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = (self.scale_shift_table + temb.float()).unbind(1)

        attended = self.attn1(sequence.gather(self.norm1(hidden, scale, shift)), rotary_emb, kv_length)
        normalised, hidden = self.norm2(hidden, attended, gate)
        hidden = hidden + self.attn2(sequence.gather(normalised), cross_attention_kv, cross_attention_bias)
        fed = self.ffn(sequence.gather(self.norm3(hidden, ffn_scale, ffn_shift)))
        return _add_gated(hidden, fed, ffn_gate)


class _Mlp(nn.Module):
    """Two linear layers of an embedder, replicated over TP; the activation between them is the caller's."""

    def __init__(self, in_features: int, features: int, *, dtype: torch.dtype | None = None):
        super().__init__()
        self.linear_1 = nn.Linear(in_features, features, dtype=dtype)
        self.linear_2 = nn.Linear(features, features, dtype=dtype)


class WanTimeTextEmbedding(nn.Module):
    """The timestep's and the text's way into the token stream; replicated over TP."""

    def __init__(self, config: WanConfig):
        super().__init__()
        dim = config.hidden_size
        self.freq_dim = config.freq_dim
        self.time_embedder = _Mlp(config.freq_dim, dim, dtype=torch.float32)
        self.time_proj = nn.Linear(dim, 6 * dim)
        self.text_embedder = _Mlp(config.text_dim, dim)

    def embed_time(self, timestep: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """`[B]` timesteps (0 to 1000) to the output modulation `[B, hidden]` and the blocks' `[B, 6, hidden]`.

        Sinusoids of Vaswani et al. 2017, section 3.5, cosines first, then two linear layers with SiLU.
        """
        half = self.freq_dim // 2
        exponent = torch.arange(half, dtype=torch.float32, device=timestep.device) / half
        angles = timestep.float()[:, None] * 10000.0 ** -exponent[None, :]
        features = torch.cat([angles.cos(), angles.sin()], dim=-1)
        hidden = F.silu(self.time_embedder.linear_1(features))
        temb = self.time_embedder.linear_2(hidden).to(dtype)
        return temb, self.time_proj(F.silu(temb)).unflatten(1, (6, -1))

    def embed_text(self, encoder_hidden_states: torch.Tensor) -> torch.Tensor:
        """`[B, L, text_dim]` to `[B, L, hidden]`."""
        hidden = F.gelu(self.text_embedder.linear_1(encoder_hidden_states), approximate="tanh")
        return self.text_embedder.linear_2(hidden)


class PatchEmbedding(nn.Module):
    """A convolution whose stride is its kernel, the matrix product that it is: `[B, C, T, H, W]` to `[B, S, dim]`."""

    def __init__(self, channels: int, dim: int, patch_size: tuple[int, int, int]):
        super().__init__()
        self.patch_size = patch_size
        p_t, p_h, p_w = patch_size
        self.weight = nn.Parameter(torch.empty(dim, channels * p_t * p_h * p_w), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(dim), requires_grad=False)
        set_weight_loader(self.weight, SafetensorsWeightLoader(lambda slices, rank: slices[0][:].flatten(1)))

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """See the class; latent sizes that the patch does not divide are cut, as a convolution does."""
        p_t, p_h, p_w = self.patch_size
        b, c, t, h, w = latents.shape
        t, h, w = t // p_t, h // p_h, w // p_w
        cut = latents[:, :, : t * p_t, : h * p_h, : w * p_w]
        patches = cut.reshape(b, c, t, p_t, h, p_h, w, p_w).permute(0, 2, 4, 6, 1, 3, 5, 7)
        return F.linear(patches.reshape(b, t * h * w, -1), self.weight, self.bias)


class WanTransformer3DModel(nn.Module):
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
        super().__init__()
        group = group or get_group("tp")
        self.context_group = context_group or get_group("cp")
        self.sequence_group = group if sequence_parallel else AxisGroup("tp")
        # This rank's place as data, so that the compiled graph is the same on every rank.
        self.register_buffer("context_place", group_place(self.context_group), persistent=False)
        self.register_buffer("sequence_place", group_place(self.sequence_group), persistent=False)
        self.context_place: torch.Tensor
        self.sequence_place: torch.Tensor
        config.check_tensor_parallel(group.size)
        self.config = config
        self.rope = WanRotaryPosEmbed(config.attention_head_dim, config.patch_size, config.rope_max_seq_len)
        self.patch_embedding = PatchEmbedding(config.in_channels, config.hidden_size, config.patch_size)
        self.condition_embedder = WanTimeTextEmbedding(config)
        self.blocks = nn.ModuleList(
            WanTransformerBlock(
                config,
                group=group,
                context_group=self.context_group,
                sequence_parallel=sequence_parallel,
                context_method=context_method,
            )
            for _ in range(config.num_layers)
        )
        self.norm_out = WanAdaLayerNorm(config.eps)
        self.proj_out = nn.Linear(config.hidden_size, config.out_channels * config.patch_volume)
        self.scale_shift_table = _float32_parameter(1, 2, config.hidden_size)
        self.requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations and of all but the modulation's parameters."""
        return self.proj_out.weight.dtype

    def project_cross_attention_kv(
        self, encoder_hidden_states: torch.Tensor, bias: torch.Tensor | None = None
    ) -> CrossAttentionKV:
        """Every block's keys and values of the encoded text `[B, L, text_dim]`; good for all steps of a request.

        Args:
            encoder_hidden_states: the text, or what `fold_padding` made of it.
            bias: the bias that `fold_padding` returned with it.
        """
        context = self.condition_embedder.embed_text(encoder_hidden_states.to(self.dtype))
        return CrossAttentionKV([block.attn2.project_kv(context) for block in self._blocks()], bias)

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        *,
        cross_attention_kv_cache: CrossAttentionKV | None = None,
        return_dict: bool = True,
        attention_kwargs: dict[str, Any] | None = None,
    ) -> TransformerOutput:
        """Predict the velocity (noise − clean latents).

        Args:
            hidden_states: noisy latents `[B, C, T, H, W]`.
            timestep: `[B]`, 0 to 1000.
            encoder_hidden_states: encoded text `[B, L, text_dim]`; not needed with a cache.
            cross_attention_kv_cache: what `project_cross_attention_kv` returned for this text.
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
            cross_attention_kv_cache = self.project_cross_attention_kv(encoder_hidden_states)
        if len(cross_attention_kv_cache.blocks) != len(self.blocks):
            raise ValueError(
                f"the cross-attention cache has {len(cross_attention_kv_cache.blocks)} pairs, the model "
                f"{len(self.blocks)} blocks"
            )
        tokens = self.run_blocks(self.embed(hidden_states, timestep), cross_attention_kv_cache, hidden_states.shape)
        return self.predict(tokens, hidden_states.shape)

    def embed(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> Tokens:
        """The first part of `forward`: what the blocks take."""
        hidden = self.patch_embedding(hidden_states.to(self.dtype))
        context, sequence = self.shards(hidden_states.shape)
        compiling = torch.compiler.is_compiling()
        place, sequence_place = (self.context_place, self.sequence_place) if compiling else (None, None)
        hidden = sequence.split(context.split(hidden, 1, place), 1, sequence_place)
        cos, sin = (context.split(table, 0, place) for table in self.rope(hidden_states))
        return Tokens(hidden, *self.condition_embedder.embed_time(timestep, self.dtype), (cos, sin))

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
        for block, key_value in zip(self._blocks()[first:last], pairs, strict=True):
            hidden = block(hidden, tokens.modulation, tokens.rotary_emb, key_value, cross_attention.bias, length)
        return tokens._replace(hidden=hidden)

    def predict(self, tokens: Tokens, latent_shape: torch.Size) -> TransformerOutput:
        """The last part of `forward`: the prediction from the last block's tokens."""
        context, sequence = self.shards(latent_shape)
        shift, scale = (self.scale_shift_table + tokens.temb.float().unsqueeze(1)).unbind(1)
        projected = self.proj_out(self.norm_out(tokens.hidden, scale, shift))
        projected = context.gather(sequence.gather(projected), 1, self.context_group)
        return TransformerOutput(self._unpatchify(projected, latent_shape))

    def shards(self, latent_shape: torch.Size) -> tuple[SequenceShard, SequenceParallel]:
        """This rank's tokens of latents `[B, C, T, H, W]`, over CP, and of those over TP."""
        sizes = zip(latent_shape[2:], self.config.patch_size, strict=True)
        length = math.prod([size // patch for size, patch in sizes])  # a list: Dynamo hands no generator to C
        context = SequenceShard(length, self.context_group.size, self.context_group.rank)
        return context, SequenceParallel(context.shard_length, self.sequence_group)

    def _blocks(self) -> list[WanTransformerBlock]:
        return list(self.blocks)  # type: ignore[arg-type]

    def _unpatchify(self, tokens: torch.Tensor, latent_shape: torch.Size) -> torch.Tensor:
        p_t, p_h, p_w = self.config.patch_size
        b, _, t, h, w = latent_shape
        t, h, w = t // p_t, h // p_h, w // p_w
        patches = tokens.reshape(b, t, h, w, p_t, p_h, p_w, -1).permute(0, 7, 1, 4, 2, 5, 3, 6)
        return patches.reshape(b, -1, t * p_t, h * p_h, w * p_w)
