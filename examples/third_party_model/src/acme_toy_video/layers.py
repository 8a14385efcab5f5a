# SPDX-License-Identifier: Apache-2.0
"""What the text encoder and the DiT have in common."""

from __future__ import annotations

import math

import torch


def sinusoids(values: torch.Tensor, width: int) -> torch.Tensor:
    """Sines and cosines `[N, width]` of `values` `[N]`, float32 (Vaswani et al. 2017, section 3.5)."""
    frequencies = torch.exp(torch.arange(width // 2, device=values.device) * (-2 * math.log(10000.0) / width))
    angles = values.float()[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)
