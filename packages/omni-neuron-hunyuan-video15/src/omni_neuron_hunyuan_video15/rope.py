# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding over three axes (frame, row, column): the tables, and the rotation."""

from __future__ import annotations

import torch
from torch import nn

# On one axis of a video: 512 rows of 16 pixels, or 2045 frames; far more than the model was trained for.
MAX_POSITIONS = 512


class RotaryTables(nn.Module):
    """The cosines and sines of every token of a latent video.

    The channels of a head belong to frames, rows and columns in this order, `axes_dim` of them to each. The tables are
    kept for `MAX_POSITIONS` positions an axis and expanded to the video's grid on the fly.
    """

    def __init__(self, axes_dim: tuple[int, int, int], theta: float):
        super().__init__()
        self.pairs = [dim // 2 for dim in axes_dim]
        # On the CPU by name: weights are made on the meta device, and these tables are computed, not loaded.
        positions = torch.arange(MAX_POSITIONS, dtype=torch.float64, device="cpu")
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

    def forward(self, grid: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The tables of a latent video (frames, rows, columns): two float32 tensors `[S, D / 2]`, frame-major."""
        return self._expand(self.cos, grid), self._expand(self.sin, grid)

    def _expand(self, table: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
        axes = []
        for axis, (size, part) in enumerate(zip(grid, table.split(self.pairs, dim=1), strict=True)):
            shape = [1, 1, 1, part.shape[1]]
            shape[axis] = size
            axes.append(part[:size].view(shape).expand(*grid, -1))
        return torch.cat(axes, dim=-1).flatten(0, 2)


def rotate(heads: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate neighbouring channels of `[B, S, N, D]` by tables `[S, D / 2]` (Su et al. 2021, eq. 34), in float32."""
    cos, sin = (table[None, :, None] for table in tables)
    even, odd = heads.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return rotated.flatten(-2).to(heads.dtype)
