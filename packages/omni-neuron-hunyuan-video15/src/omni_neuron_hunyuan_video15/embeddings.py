# SPDX-License-Identifier: Apache-2.0
"""The ways into the two token streams: the latents, the timestep, and two encoded texts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from omni_neuron_hunyuan_video15.config import HunyuanVideo15Config
from omni_neuron_kernels import flash_attention
from omni_neuron_parallel import (
    AxisGroup,
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    sinusoidal_embedding,
)
from omni_neuron_runtime import SafetensorsWeightLoader, set_weight_loader

TIME_FREQUENCIES = 256
GLYPH_HIDDEN_SIZE = 2048  # whatever the model's width


class LatentEmbedding(nn.Linear):
    """A token for each latent position, `[B, C, T, H, W]` to `[B, T · H · W, hidden]`; replicated over TP.

    In the checkpoint it is a convolution with a kernel of one position.
    """

    def __init__(self, config: HunyuanVideo15Config):
        super().__init__(config.in_channels, config.hidden_size)
        set_weight_loader(self.weight, SafetensorsWeightLoader(lambda slices, rank: slices[0][:].flatten(1)))

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return super().forward(latents.flatten(2).transpose(1, 2))


class SiluMlp(nn.Module):
    """Two linear layers with a SiLU between, `[…, in_features]` to `[…, features]`; replicated over TP."""

    def __init__(self, in_features: int, features: int):
        super().__init__()
        self.linear_1 = nn.Linear(in_features, features)
        self.linear_2 = nn.Linear(features, features)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self.linear_2(F.silu(self.linear_1(hidden)))


class TimeEmbedding(SiluMlp):
    """A timestep `[B]` (0 to 1000) to `[B, hidden]`: the MLP on its sinusoids."""

    def __init__(self, features: int):
        super().__init__(TIME_FREQUENCIES, features)

    def forward(self, timestep: torch.Tensor) -> torch.Tensor:
        """See the class; the sinusoids are float32."""
        return super().forward(sinusoidal_embedding(timestep, TIME_FREQUENCIES).to(self.linear_1.weight.dtype))


class RefinerBlock(nn.Module):
    """Self-attention and feed-forward over the text, gated by the timestep and the pooled text; split over TP."""

    def __init__(self, config: HunyuanVideo15Config, group: AxisGroup):
        super().__init__()
        dim, self.head_dim = config.hidden_size, config.attention_head_dim
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.qkv = QKVParallelLinear(dim, config.num_attention_heads, self.head_dim, group=group)
        self.o = RowParallelLinear(dim, dim, group=group)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.up = ColumnParallelLinear(dim, 4 * dim, group=group)
        self.down = RowParallelLinear(4 * dim, dim, group=group)
        self.gates = nn.Linear(dim, 2 * dim)

    def forward(self, text: torch.Tensor, temb: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`[B, L, hidden]` to the same; `mask` bool `[B, L]`, false where nobody may look."""
        query, key, value = (part.unflatten(2, (-1, self.head_dim)) for part in self.qkv(self.norm1(text)))
        attended = flash_attention(query, key, value, key_mask=mask).flatten(2)
        attention_gate, mlp_gate = self.gates(F.silu(temb)).unsqueeze(1).chunk(2, dim=-1)
        text = text + self.o(attended) * attention_gate
        return text + self.down(F.silu(self.up(self.norm2(text)))) * mlp_gate


class TokenRefiner(nn.Module):
    """The first text, as the language model encoded it, to tokens of the DiT: `[B, L, text_embed_dim]` to
    `[B, L, hidden]`. It depends on the timestep, so it is part of every step."""

    def __init__(self, config: HunyuanVideo15Config, group: AxisGroup):
        super().__init__()
        self.time_embedder = TimeEmbedding(config.hidden_size)
        self.text_embedder = SiluMlp(config.text_embed_dim, config.hidden_size)
        self.proj_in = nn.Linear(config.text_embed_dim, config.hidden_size)
        self.blocks = nn.ModuleList(RefinerBlock(config, group) for _ in range(config.num_refiner_layers))

    def forward(self, text: torch.Tensor, timestep: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """See the class; `mask` bool `[B, L]` with at least one token. What padding becomes means nothing."""
        weights = mask.float().unsqueeze(-1)
        pooled = ((text.float() * weights).sum(1) / weights.sum(1)).to(text.dtype)
        temb = self.time_embedder(timestep) + self.text_embedder(pooled)
        hidden = self.proj_in(text)
        for block in self.blocks:
            hidden = block(hidden, temb, mask)
        return hidden


class GlyphProjection(nn.Module):
    """The second text, the words to be drawn as ByT5 encoded them, to tokens of the DiT: `[B, L, text_embed_2_dim]` to
    `[B, L, hidden]`. Replicated over TP."""

    def __init__(self, config: HunyuanVideo15Config):
        super().__init__()
        self.norm = nn.LayerNorm(config.text_embed_2_dim)
        self.linear_1 = nn.Linear(config.text_embed_2_dim, GLYPH_HIDDEN_SIZE)
        self.linear_2 = nn.Linear(GLYPH_HIDDEN_SIZE, GLYPH_HIDDEN_SIZE)
        self.linear_3 = nn.Linear(GLYPH_HIDDEN_SIZE, config.hidden_size)

    def forward(self, glyphs: torch.Tensor) -> torch.Tensor:
        """See the class."""
        hidden = F.gelu(self.linear_1(self.norm(glyphs)))
        return self.linear_3(F.gelu(self.linear_2(hidden)))
