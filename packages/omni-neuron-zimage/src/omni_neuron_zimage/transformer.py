# SPDX-License-Identifier: Apache-2.0
"""The Z-Image transformer, written for one rank; TP is in the layers' names, CP in `context_attention`.

One stream holds the image's tokens and the caption's. Both are split over CP, so that a rank's part of the stream is a
part of the image and behind it a part of the caption; attention does not mind the order. The caption is padded to a
fixed length and a mask says which of its rows there are: one graph serves every prompt. With sequence parallelism a
rank's part is further split over TP between two row-parallel layers.

One image at a time: a caption's length is the position of its image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from omni_neuron_kernels import adaln_modulate, flash_attention, gated_mlp, rotate_pairs
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
    sinusoidal_embedding,
)
from omni_neuron_zimage.config import (
    SEQUENCE_MULTIPLE,
    TIMESTEP_FEATURES,
    TIMESTEP_HIDDEN,
    ZImageConfig,
    padded_length,
)

HEAD_NORM_EPSILON = 1e-5  # whatever norm_eps is
OUTPUT_NORM_EPSILON = 1e-6

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Caption(NamedTuple):
    """A prompt as the stream takes it, the same in every step (`ZImageTransformer2DModel.refine_caption`).

    Attributes:
        tokens: `[1, L, dim]`.
        mask: bool `[1, L]`, true for the rows that take part.
        image_position: int64 `[1]`, where the image stands on the first rotary axis: behind the caption.
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    image_position: torch.Tensor


class TimestepEmbedding(nn.Module):
    """Sinusoids and two linear layers; replicated over TP."""

    def __init__(self, features: int):
        super().__init__()
        self.linear_1 = nn.Linear(TIMESTEP_FEATURES, TIMESTEP_HIDDEN)
        self.linear_2 = nn.Linear(TIMESTEP_HIDDEN, features)

    def forward(self, timestep: torch.Tensor) -> torch.Tensor:
        """Float32 `[1]`, 0 to 1000, to `[1, features]` in the weights' dtype."""
        features = sinusoidal_embedding(timestep, TIMESTEP_FEATURES).to(self.linear_1.weight.dtype)
        return self.linear_2(F.silu(self.linear_1(features)))


class ZImageAttention(nn.Module):
    """Attention with heads split over TP, queries and keys RMS-normalised head by head, then rotated.

    Input `[1, S, dim]`, output the same, or this TP rank's rows of it with sequence parallelism.
    """

    def __init__(self, config: ZImageConfig, *, group: AxisGroup, sequence_parallel: bool):
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv = QKVParallelLinear(config.dim, config.n_heads, config.head_dim, bias=False, group=group)
        self.norm_q = RMSNorm(config.head_dim, HEAD_NORM_EPSILON)
        self.norm_k = RMSNorm(config.head_dim, HEAD_NORM_EPSILON)
        self.out = RowParallelLinear(
            config.dim, config.dim, bias=False, group=group, sequence_parallel=sequence_parallel
        )

    def forward(self, hidden: torch.Tensor, tables: torch.Tensor, attend: Attend) -> torch.Tensor:
        """`attend` takes queries, keys and values `[1, S, N / tp, D]` and returns what the queries got."""
        query, key, value = (part.unflatten(2, (-1, self.head_dim)) for part in self.qkv(hidden))
        query, key = (rotate_pairs(part, *tables.unbind(0)) for part in (self.norm_q(query), self.norm_k(key)))
        return self.out(attend(query, key, value).flatten(2))


class ZImageFeedForward(nn.Module):
    """SwiGLU (Shazeer 2020) without biases, the inner features split over TP; shapes as `ZImageAttention`'s."""

    def __init__(self, config: ZImageConfig, *, group: AxisGroup, sequence_parallel: bool):
        super().__init__()
        self.gate = ColumnParallelLinear(config.dim, config.ffn_dim, bias=False, group=group)
        self.up = ColumnParallelLinear(config.dim, config.ffn_dim, bias=False, group=group)
        self.down = RowParallelLinear(
            config.ffn_dim, config.dim, bias=False, group=group, sequence_parallel=sequence_parallel
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """See the class."""
        weights = (layer.weight.t() for layer in (self.gate, self.up, self.down))
        return self.down.sum_over_ranks(gated_mlp(hidden, *weights, activation="silu"))


class ZImageBlock(nn.Module):
    """Attention and feed-forward, each between two norms; with `modulated` the timestep scales and gates both."""

    def __init__(self, config: ZImageConfig, *, modulated: bool, group: AxisGroup, sequence_parallel: bool):
        super().__init__()
        self.attention = ZImageAttention(config, group=group, sequence_parallel=sequence_parallel)
        self.feed_forward = ZImageFeedForward(config, group=group, sequence_parallel=sequence_parallel)
        self.attention_norm1 = RMSNorm(config.dim, config.norm_eps)
        self.attention_norm2 = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm1 = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm2 = RMSNorm(config.dim, config.norm_eps)
        self.modulation = nn.Linear(config.timestep_dim, 4 * config.dim) if modulated else None

    def forward(
        self,
        hidden: torch.Tensor,
        tables: torch.Tensor,
        attend: Attend,
        stream: SequenceParallel,
        temb: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One block, `[1, S_tp, dim]` to the same.

        Args:
            hidden: this rank's tokens, split over TP by `stream`.
            tables: of the tokens of all TP ranks.
            attend: as in `ZImageAttention`.
            stream: how the tokens are split over TP.
            temb: `[1, timestep_dim]`, for a modulated block.
        """
        scale: torch.Tensor | float = 1.0
        gate, ffn_scale, ffn_gate = scale, scale, scale
        if self.modulation is not None:
            assert temb is not None
            scale, gate, ffn_scale, ffn_gate = self.modulation(temb).unsqueeze(1).chunk(4, dim=-1)
            scale, ffn_scale, gate, ffn_gate = 1.0 + scale, 1.0 + ffn_scale, gate.tanh(), ffn_gate.tanh()
        attended = self.attention(stream.gather(self.attention_norm1(hidden) * scale), tables, attend)
        hidden = hidden + gate * self.attention_norm2(attended)
        fed = self.feed_forward(stream.gather(self.ffn_norm1(hidden) * ffn_scale))
        return hidden + ffn_gate * self.ffn_norm2(fed)


class OutputLayer(nn.Module):
    """Layer norm scaled by the timestep, and the projection to latent values; replicated over TP."""

    def __init__(self, config: ZImageConfig):
        super().__init__()
        self.modulation = nn.Linear(config.timestep_dim, config.dim)
        self.linear = nn.Linear(config.dim, config.patch_channels)

    def forward(self, hidden: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        """`[1, S, dim]` to `[1, S, patch_channels]`."""
        scale = self.modulation(F.silu(temb))
        scaled, _ = adaln_modulate(hidden, scale, torch.zeros_like(scale), epsilon=OUTPUT_NORM_EPSILON)
        return self.linear(scaled)


class ZImageTransformer2DModel(SplitTokens):
    """The Z-Image transformer on one rank of a TP and a CP group.

    Every rank embeds the whole image, a few channels wide, and keeps its tokens; what is predicted for them is gathered
    once, at the end. Parameters are empty until weights are loaded; construct it under `torch.device("meta")` to spend
    no memory before that.

    Args:
        config: sizes.
        group: the TP group; this process's by default.
        context_group: the CP group; this process's by default.
        sequence_parallel: split tokens over TP between row-parallel layers (`SequenceParallel`).
        context_method: how attention meets the keys of other CP ranks; see `context_attention`.

    Raises:
        ModelConfigError: TP does not divide the heads.
    """

    def __init__(
        self,
        config: ZImageConfig,
        *,
        group: AxisGroup | None = None,
        context_group: AxisGroup | None = None,
        sequence_parallel: bool = False,
        context_method: ContextMethod = "auto",
    ):
        super().__init__(group, context_group, sequence_parallel=sequence_parallel)
        group = self.group
        config.check_tensor_parallel(group.size)
        self.config = config
        # A ring of one rank would be plain attention in a slower way.
        self.context_method: ContextMethod = context_method if self.context_group.size > 1 else "auto"

        def blocks(count: int, modulated: bool) -> nn.ModuleList:
            return nn.ModuleList(
                ZImageBlock(config, modulated=modulated, group=group, sequence_parallel=sequence_parallel)
                for _ in range(count)
            )

        # Of caption, row and column; diffusers rounds angles to float32.
        self.rotary = RotaryTables(
            config.axes_dims, config.axes_lens, theta=config.rope_theta, angle_dtype=torch.float32
        )
        self.timestep_embedder = TimestepEmbedding(config.timestep_dim)
        self.image_embedder = nn.Linear(config.patch_channels, config.dim)
        self.image_pad = nn.Parameter(torch.empty(1, config.dim))
        self.caption_norm = RMSNorm(config.cap_feat_dim, config.norm_eps)
        self.caption_embedder = nn.Linear(config.cap_feat_dim, config.dim)
        self.caption_pad = nn.Parameter(torch.empty(1, config.dim))
        self.context_refiner = blocks(config.n_refiner_layers, modulated=False)
        self.noise_refiner = blocks(config.n_refiner_layers, modulated=True)
        self.layers = blocks(config.n_layers, modulated=True)
        self.output = OutputLayer(config)
        self.requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations."""
        return self.output.linear.weight.dtype

    def refine_caption(self, features: torch.Tensor, length: torch.Tensor) -> Caption:
        """Embed and refine a caption; good for all steps of a request. The same on every CP rank.

        As in diffusers, a learned pad fills the caption up to a multiple of `SEQUENCE_MULTIPLE`, and takes part.

        Args:
            features: the encoded text `[1, L, cap_feat_dim]`, L a multiple of `SEQUENCE_MULTIPLE`; what is in the rows
                from `length` on does not matter, but it is finite.
            length: rows that hold text, int64 `[1]`: data, so that one graph serves every prompt.

        Raises:
            ValueError: an L that is no multiple, or longer than the model's positions.
        """
        rows = features.shape[1]
        if rows % SEQUENCE_MULTIPLE or not 0 < rows <= self.config.longest_caption:
            raise ValueError(
                f"{rows} caption rows: valid are multiples of {SEQUENCE_MULTIPLE} up to {self.config.longest_caption}"
            )
        place = torch.arange(rows, device=features.device)
        padded = (length + SEQUENCE_MULTIPLE - 1) // SEQUENCE_MULTIPLE * SEQUENCE_MULTIPLE
        mask = (place < padded).unsqueeze(0)
        embedded = self.caption_embedder(self.caption_norm(features.to(self.dtype)))
        embedded = torch.where((place < length)[None, :, None], embedded, self.caption_pad)

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return flash_attention(query, key, value, key_mask=mask)

        hidden, stream = self._run(self.context_refiner, embedded, self._caption_tables(rows, features.device), attend)
        return Caption(stream.gather(hidden), mask, padded + 1)

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor, caption: Caption) -> torch.Tensor:
        """Predict the velocity (clean latents − noise, as diffusers' transformer does).

        Args:
            hidden_states: noisy latents `[1, C, H, W]`.
            timestep: `[1]`, 0 for noise to 1 for an image: not the scheduler's, which runs from 1000 to 0.
            caption: of `refine_caption`.

        Returns:
            `[1, C, H, W]` in the model's dtype, the same on every TP and CP rank.

        Raises:
            ValueError: more than one image, or one larger than the model's positions.
        """
        rows, columns = grid = self._grid(hidden_states)
        tokens = rows * columns
        length = padded_length(tokens)
        temb = self.timestep_embedder(timestep * self.config.t_scale)
        embedded = self.image_embedder(self._patches(hidden_states.to(self.dtype), grid))
        embedded = torch.cat([embedded, self.image_pad.expand(1, length - tokens, -1)], dim=1)

        # This rank's part of the image, and of the caption.
        (of_image, _), (of_caption, _) = self.shards_of(length), self.shards_of(caption.tokens.shape[1])
        (place, _), cp, method = self.places(), self.context_group, self.context_method
        image_tables = of_image.split(self._image_tables(grid, caption.image_position, length), 1, place)
        caption_tables = self._caption_tables(caption.tokens.shape[1], embedded.device)
        caption_tables = of_caption.split(caption_tables, 1, place)
        takes_part = torch.ones(1, length, dtype=torch.bool, device=embedded.device)
        mask = torch.cat([of_image.split(takes_part, 1, place), of_caption.split(caption.mask, 1, place)], dim=1)

        def attend_to_image(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return context_attention(query, key, value, group=cp, kv_length=length, method=method)

        def attend_to_all(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return context_attention(query, key, value, group=cp, key_mask=mask, method=method)

        image = of_image.split(embedded, 1, place)
        image, stream = self._run(self.noise_refiner, image, image_tables, attend_to_image, temb)
        hidden = torch.cat([stream.gather(image), of_caption.split(caption.tokens, 1, place)], dim=1)
        tables = torch.cat([image_tables, caption_tables], dim=1)
        hidden, stream = self._run(self.layers, hidden, tables, attend_to_all, temb)
        projected = stream.gather(self.output(hidden, temb))[:, : of_image.shard_length]
        return self._unpatch(of_image.gather(projected, 1, cp)[:, :tokens], grid)

    def _run(
        self,
        blocks: Iterable[nn.Module],
        hidden: torch.Tensor,
        tables: torch.Tensor,
        attend: Attend,
        temb: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, SequenceParallel]:
        """Tokens `[1, S, dim]` through blocks; what comes out is split over TP by the `SequenceParallel`."""
        stream = SequenceParallel(hidden.shape[1], self.sequence_group)
        hidden = stream.split(hidden, 1, self.places()[1])
        for block in blocks:
            hidden = block(hidden, tables, attend, stream, temb)
        return hidden, stream

    def _image_tables(self, grid: tuple[int, int], position: torch.Tensor, length: int) -> torch.Tensor:
        """Cosines and sines `[2, length, head_dim / 2]` of an image at `position` `[1]`; pads stand at the origin."""
        cos, sin = self.rotary(position, *grid)
        pads = (0, 0, 0, length - cos.shape[0])
        return torch.stack([F.pad(cos, pads, value=1.0), F.pad(sin, pads)])

    def _caption_tables(self, rows: int, device: torch.device) -> torch.Tensor:
        """The same of a caption, whose tokens and pads stand at 1 to `rows`."""
        return torch.stack(self.rotary(torch.arange(1, rows + 1, device=device), 1, 1))

    def _grid(self, latents: torch.Tensor) -> tuple[int, int]:
        grid = (latents.shape[2] // self.config.patch_size, latents.shape[3] // self.config.patch_size)
        if latents.shape[0] != 1:
            raise ValueError(f"latents {tuple(latents.shape)}: valid is one image, [1, C, H, W]")
        if grid[0] > self.config.axes_lens[1] or grid[1] > self.config.axes_lens[2]:
            raise ValueError(f"an image of {grid} tokens: axes_lens allows {tuple(self.config.axes_lens[1:])}")
        return grid

    def _patches(self, latents: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """`[1, C, H, W]` to `[1, S, patch_channels]`, the channels innermost."""
        patch = self.config.patch_size
        split = latents.reshape(1, -1, grid[0], patch, grid[1], patch)
        return split.permute(0, 2, 4, 3, 5, 1).reshape(1, grid[0] * grid[1], -1)

    def _unpatch(self, tokens: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        patch = self.config.patch_size
        split = tokens.reshape(1, *grid, patch, patch, -1).permute(0, 5, 1, 3, 2, 4)
        return split.reshape(1, -1, grid[0] * patch, grid[1] * patch)
