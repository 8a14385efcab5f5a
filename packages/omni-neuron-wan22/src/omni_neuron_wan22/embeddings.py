# SPDX-License-Identifier: Apache-2.0
"""The ways into the token stream, replicated over TP: patches of the latents, timestep, text, image."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from omni_neuron_parallel import sinusoidal_embedding
from omni_neuron_runtime import SafetensorsWeightLoader, set_weight_loader
from omni_neuron_wan22.config import WanConfig


class _Mlp(nn.Module):
    """Two linear layers of an embedder, replicated over TP; the activation between them is the caller's."""

    def __init__(self, in_features: int, features: int, *, dtype: torch.dtype | None = None):
        super().__init__()
        self.linear_1 = nn.Linear(in_features, features, dtype=dtype)
        self.linear_2 = nn.Linear(features, features, dtype=dtype)


class WanImageEmbedding(nn.Module):
    """The way of CLIP's image embedding into cross-attention (Wan2.1's image-to-video); replicated over TP.

    With `positions` it takes the embeddings of the first and the last frame, `positions` rows together.
    """

    def __init__(self, in_features: int, features: int, positions: int | None):
        super().__init__()
        self.norm1 = nn.LayerNorm(in_features, dtype=torch.float32)
        self.linear_1 = nn.Linear(in_features, in_features)
        self.linear_2 = nn.Linear(in_features, features)
        self.norm2 = nn.LayerNorm(features, dtype=torch.float32)
        self.pos_embed = None if positions is None else nn.Parameter(torch.empty(1, positions, in_features))

    def forward(self, embeds: torch.Tensor) -> torch.Tensor:
        """`[images, L, in_features]` to `[1, images · L, features]`."""
        embeds = embeds.flatten(0, 1).unsqueeze(0)
        if self.pos_embed is not None:
            embeds = embeds + self.pos_embed
        hidden = self.norm1(embeds.float()).to(embeds.dtype)
        hidden = self.linear_2(F.gelu(self.linear_1(hidden)))
        return self.norm2(hidden.float()).to(embeds.dtype)


class WanTimeTextEmbedding(nn.Module):
    """The timestep's, the text's and the image's way into the token stream; replicated over TP."""

    def __init__(self, config: WanConfig):
        super().__init__()
        dim = config.hidden_size
        self.freq_dim = config.freq_dim
        self.time_embedder = _Mlp(config.freq_dim, dim, dtype=torch.float32)
        self.time_proj = nn.Linear(dim, 6 * dim)
        self.text_embedder = _Mlp(config.text_dim, dim)
        self.image_embedder = (
            None if config.image_dim is None else WanImageEmbedding(config.image_dim, dim, config.pos_embed_seq_len)
        )

    def embed_time(self, timestep: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """`[B]` timesteps (0 to 1000) to the output modulation `[B, hidden]` and the blocks' `[B, 6, hidden]`.

        `sinusoidal_embedding`, then two linear layers with SiLU.
        """
        hidden = F.silu(self.time_embedder.linear_1(sinusoidal_embedding(timestep, self.freq_dim)))
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
