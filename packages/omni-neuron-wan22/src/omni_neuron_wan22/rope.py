# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding over three axes (frame, row, column): the tables. `qkv_projection` rotates by them."""

from __future__ import annotations

import torch

from omni_neuron_parallel import RotaryTables


class WanRotaryPosEmbed(RotaryTables):
    """The cosines and sines of every token of a latent video.

    Of a head's channels, 2 · (d // 6) belong to rows, as many to columns, the rest to frames. The tables are kept for
    `max_seq_len` positions an axis and expanded to the video's grid on the fly.
    """

    def __init__(self, attention_head_dim: int, patch_size: tuple[int, int, int], max_seq_len: int, theta: float = 1e4):
        spatial = 2 * (attention_head_dim // 6)
        super().__init__((attention_head_dim - 2 * spatial, spatial, spatial), (max_seq_len,) * 3, theta=theta)
        self.patch_size = patch_size
        self.max_seq_len = max_seq_len

    def forward(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """The tables of `latents` `[B, C, T, H, W]`: two float32 tensors `[S, D / 2]`, S frame-major.

        Raises:
            ValueError: a grid longer than the tables on some axis.
        """
        grid = [size // patch for size, patch in zip(latents.shape[2:], self.patch_size, strict=True)]
        if max(grid) > self.max_seq_len:
            raise ValueError(f"token grid {grid} is longer than rope_max_seq_len = {self.max_seq_len} on an axis")
        return super().forward(*grid)
