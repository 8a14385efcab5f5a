# SPDX-License-Identifier: Apache-2.0
"""Positions and timesteps as diffusion transformers embed them, computed and not loaded; alike on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class RotaryTables(nn.Module):
    """Cosines and sines of rotary position embedding over a grid of tokens (Su et al. 2021), axis by axis.

    The channels of a head belong to the axes in their order. With d channels, pair p of an axis turns by
    position · theta^(−2p / d). Tables are kept for each axis and expanded to a grid when it is asked for;
    `omni_neuron_kernels.rotate_pairs` and `qkv_projection` take them as they come.

    Args:
        channels: of a head for each axis, even; their sum is the head's dim.
        lengths: positions for each axis.
        theta: the base.
        angle_dtype: what angles are rounded to before cosines are taken. float64 is the accurate way; a model that was
            trained, or a reference that is written, with float32 angles differs by up to 6·10⁻⁸ · position.
    """

    def __init__(
        self,
        channels: Sequence[int],
        lengths: Sequence[int],
        *,
        theta: float = 10000.0,
        angle_dtype: torch.dtype = torch.float64,
    ):
        super().__init__()
        if len(channels) != len(lengths) or any(count % 2 for count in channels):
            raise ValueError(f"channels {list(channels)} and lengths {list(lengths)}: valid is an even number an axis")
        self.lengths = tuple(lengths)
        # On the CPU by name: weights are made on the meta device, and these tables are computed, not loaded.
        for axis, (count, length) in enumerate(zip(channels, lengths, strict=True)):
            exponents = torch.arange(0, count, 2, dtype=torch.float64, device="cpu") / max(count, 1)
            angles = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), theta**-exponents)
            angles = angles.to(angle_dtype)
            table = torch.stack([angles.cos(), angles.sin()]).float()
            self.register_buffer(f"axis_{axis}", table, persistent=False)

    def forward(self, *positions: int | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The tables of a grid of tokens, the last axis innermost.

        Args:
            positions: of each axis: n for the positions 0 to n − 1, or the positions themselves, int64 `[n]`, which may
                be data of a compiled graph.

        Returns:
            Two float32 tensors `[S, D / 2]`, S the product of all n.

        Raises:
            ValueError: another number of axes, or more positions than an axis has. Values of tensors are not looked at.
        """
        if len(positions) != len(self.lengths):
            raise ValueError(f"positions for {len(positions)} axes; the tables have {len(self.lengths)}")
        parts = []
        for axis, (wanted, length) in enumerate(zip(positions, self.lengths, strict=True)):
            table = self.get_buffer(f"axis_{axis}")
            if isinstance(wanted, torch.Tensor):
                parts.append(table.index_select(1, wanted))
                continue
            if not 0 <= wanted <= length:
                raise ValueError(f"{wanted} positions on axis {axis}; the tables have {length}")
            parts.append(table[:, :wanted])
        grid = [part.shape[1] for part in parts]
        expanded = []
        for axis, part in enumerate(parts):
            shape = [1] * len(grid)
            shape[axis] = grid[axis]
            expanded.append(part.view(2, *shape, -1).expand(2, *grid, -1))
        cos, sin = torch.cat(expanded, dim=-1).flatten(1, -2).unbind(0)
        return cos, sin


def sinusoidal_embedding(timestep: torch.Tensor, features: int) -> torch.Tensor:
    """Sinusoids of a timestep (Vaswani et al. 2017, section 3.5): cosines first, wave lengths from 2π to 2π · 10⁴.

    Args:
        timestep: `[B]`, usually 0 to 1000.
        features: even.

    Returns:
        float32 `[B, features]`.
    """
    half = features // 2
    exponent = torch.arange(half, dtype=torch.float32, device=timestep.device) / half
    angles = timestep.float()[:, None] * 10000.0 ** -exponent[None, :]
    return torch.cat([angles.cos(), angles.sin()], dim=-1)
