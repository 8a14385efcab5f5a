# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding over three axes (frame, row, column).

No graph that is compiled holds a complex number: Neuron has none.
"""

from __future__ import annotations

import torch
from torch import nn


def apply_rotary_emb_wan(hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate interleaved pairs of channels.

    (x₀, x₁) → (x₀ cos − x₁ sin, x₀ sin + x₁ cos), Su et al. 2021, eq. 34.

    Args:
        hidden: `[B, S, N, D]`.
        cos: `[1, S, 1, D / 2]` float32, one value a pair.
        sin: like `cos`.

    Returns:
        `[B, S, N, D]` in the dtype of `hidden`; the arithmetic is float32.
    """
    if hidden.device.type == "cpu" and not torch.compiler.is_compiling():
        # The same products as one complex multiplication, which is vectorised; every second channel is not. 8 × faster.
        rotation = torch.complex(cos, sin)
        pairs = torch.view_as_complex(hidden.float().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * rotation).flatten(-2).to(hidden.dtype)
    even, odd = hidden.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).to(hidden.dtype)


class WanRotaryPosEmbed(nn.Module):
    """The cosines and sines of every token of a latent video.

    Of a head's channels, 2 · (d // 6) belong to rows, as many to columns, the rest to frames. The tables are kept for
    `max_seq_len` positions an axis and expanded to the video's grid on the fly.
    """

    def __init__(self, attention_head_dim: int, patch_size: tuple[int, int, int], max_seq_len: int, theta: float = 1e4):
        super().__init__()
        self.patch_size = patch_size
        self.max_seq_len = max_seq_len
        spatial = 2 * (attention_head_dim // 6)
        self.pairs = [(attention_head_dim - 2 * spatial) // 2, spatial // 2, spatial // 2]
        # On the CPU by name: weights are made on the meta device, and these tables are computed, not loaded.
        positions = torch.arange(max_seq_len, dtype=torch.float64, device="cpu")
        angles = torch.cat(
            [
                torch.outer(positions, theta ** -(torch.arange(pairs, dtype=torch.float64, device="cpu") / pairs))
                for pairs in self.pairs
            ],
            dim=1,
        )
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)
        self.cos: torch.Tensor
        self.sin: torch.Tensor

    def forward(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The tables of `latents` `[B, C, T, H, W]`: two float32 tensors `[1, S, 1, D / 2]`, S frame-major.

        Raises:
            ValueError: a grid longer than the tables on some axis.
        """
        grid = [size // patch for size, patch in zip(latents.shape[2:], self.patch_size, strict=True)]
        if max(grid) > self.max_seq_len:
            raise ValueError(f"token grid {grid} is longer than rope_max_seq_len = {self.max_seq_len} on an axis")
        return self._expand(self.cos, grid), self._expand(self.sin, grid)

    def _expand(self, table: torch.Tensor, grid: list[int]) -> torch.Tensor:
        axes = []
        for axis, (size, part) in enumerate(zip(grid, table.split(self.pairs, dim=1), strict=True)):
            shape = [1, 1, 1, part.shape[1]]
            shape[axis] = size
            axes.append(part[:size].view(shape).expand(*grid, -1))
        return torch.cat(axes, dim=-1).flatten(0, 2)[None, :, None, :]
