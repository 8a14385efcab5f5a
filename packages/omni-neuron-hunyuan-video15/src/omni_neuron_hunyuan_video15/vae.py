# SPDX-License-Identifier: Apache-2.0
"""diffusers' VAE with one thing done otherwise: the mask of its attention, which it writes row by row."""

from __future__ import annotations

import torch
from torch import nn


def use_one_comparison(vae: nn.Module) -> None:
    """Make the mask of every attention block by `causal_mask`.

    diffusers' own way is one operation for each latent of a tile, thousands in a graph.
    """
    for module in vae.modules():
        if hasattr(module, "prepare_causal_attention_mask"):
            module.prepare_causal_attention_mask = causal_mask  # type: ignore[assignment]


def causal_mask(
    n_frame: int, n_hw: int, dtype: torch.dtype, device: torch.device, batch_size: int | None = None
) -> torch.Tensor:
    """A frame attends to itself and those before it: 0 where it does, else −∞. Signature and values as diffusers'.

    Args:
        n_frame: latent frames.
        n_hw: latents of a frame.
        dtype: of the mask.
        device: of the mask.
        batch_size: None for no dim of batch elements.

    Returns:
        `[B, S, S]` or `[S, S]`, S = n_frame · n_hw.
    """
    frames = torch.arange(n_frame, device=device)[:, None].expand(-1, n_hw).flatten()
    mask = torch.zeros((), dtype=dtype, device=device).masked_fill(frames[:, None] < frames, float("-inf"))
    return mask if batch_size is None else mask.expand(batch_size, -1, -1)
