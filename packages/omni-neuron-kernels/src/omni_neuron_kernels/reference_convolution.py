# SPDX-License-Identifier: Apache-2.0
"""Causal convolution in plain torch, in the dtype of its input: torch sums in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def causal_conv3d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    padding: tuple[int, int, int],
    past: torch.Tensor | None,
) -> torch.Tensor:
    """See `ops_convolution.causal_conv3d`."""
    frames = x if past is None else torch.cat([past, x], dim=2)
    if padding[0]:
        frames = F.pad(frames, (0, 0, 0, 0, padding[0], 0))
    if frames.shape[2] == weight.shape[2] == 1:
        return F.conv2d(frames.squeeze(2), weight.squeeze(2), bias, padding=padding[1:]).unsqueeze(2)
    return F.conv3d(frames, weight, bias, padding=(0, *padding[1:]))
