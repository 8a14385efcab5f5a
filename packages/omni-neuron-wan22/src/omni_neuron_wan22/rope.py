# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding over three axes (frame, row, column): the tables. `qkv_projection` rotates by them."""

from __future__ import annotations

import torch
from torch import nn


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
        """The tables of `latents` `[B, C, T, H, W]`: two float32 tensors `[S, D / 2]`, S frame-major.

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
        return torch.cat(axes, dim=-1).flatten(0, 2)
