# SPDX-License-Identifier: Apache-2.0
"""diffusers' VAE with one thing done otherwise: its causal attention, which it runs with a mask of all latents."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock
from torch import nn


def attend_frame_by_frame(vae: nn.Module | None) -> None:
    """Make every attention block of the VAE a `FrameAttnBlock`, in place; nothing on a rank that has none.

    diffusers' own way is attention with a mask, which no device's compiler is known to take, and whose mask takes one
    operation for each latent of a tile, thousands in a graph.
    """
    for module in () if vae is None else vae.modules():
        if type(module) is HunyuanVideo15AttnBlock:
            module.__class__ = FrameAttnBlock


class FrameAttnBlock(HunyuanVideo15AttnBlock):
    """Attention of a frame to itself and those before it: one attention without a mask for each frame."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, C, T, h, w]` to the same."""
        normed = self.norm(x)
        query, key, value = (
            projection(normed).flatten(2).transpose(1, 2).unsqueeze(1)
            for projection in (self.to_q, self.to_k, self.to_v)
        )
        size = x.shape[3] * x.shape[4]
        frames = [
            F.scaled_dot_product_attention(query[:, :, end - size : end], key[:, :, :end], value[:, :, :end])
            for end in range(size, x.shape[2] * size + 1, size)
        ]
        attended = torch.cat(frames, dim=2).squeeze(1).transpose(1, 2).unflatten(2, x.shape[2:])
        return self.proj_out(attended) + x
