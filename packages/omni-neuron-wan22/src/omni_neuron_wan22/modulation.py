# SPDX-License-Identifier: Apache-2.0
"""How the timestep acts on the token stream: modulated layer norms and gated residuals, float32 inside."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from omni_neuron_kernels import adaln_modulate


def float32_parameter(*shape: int) -> nn.Parameter:
    """An empty parameter that is float32 whatever the model's dtype, as Wan keeps what sets the modulation."""
    return nn.Parameter(torch.empty(*shape, dtype=torch.float32), requires_grad=False)


def _by_frame(
    first_frame: torch.Tensor | None, modulate: Callable[..., tuple[torch.Tensor, ...]], *vectors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """`modulate(*vectors)`, with the second half of the vectors for the tokens of the first frame.

    Computed with either half and then chosen: which tokens are the first frame's depends on the rank, and a compiled
    graph must not.
    """
    if first_frame is None:
        return modulate(*vectors)
    halves = zip(*(vector.chunk(2) for vector in vectors), strict=True)
    others, first = (modulate(*half) for half in halves)
    return tuple(torch.where(first_frame, *pair) for pair in zip(first, others, strict=True))


class WanAdaLayerNorm(nn.Module):
    """Layer norm over the last dim, scaled and shifted by the timestep; float32 inside, in and out in one dtype."""

    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps

    def forward(
        self,
        hidden: torch.Tensor,
        scale: torch.Tensor,
        shift: torch.Tensor,
        first_frame: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`[B, S, F]` and `[B, F]` twice to LayerNorm(hidden) · (1 + scale) + shift; `first_frame` as in `Tokens`."""

        def modulate(scale: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return adaln_modulate(hidden, scale, shift, epsilon=self.eps)[:1]

        return _by_frame(first_frame, modulate, scale, shift)[0]


class WanGatedResidual(nn.Module):
    """hidden + gate · branch, and its layer norm with a gain and a bias, or itself without `norm`; float32 inside."""

    def __init__(self, size: int, eps: float, *, norm: bool):
        super().__init__()
        self.eps = eps
        self.weight = float32_parameter(size) if norm else None
        self.bias = float32_parameter(size) if norm else None

    def forward(
        self, hidden: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor, first_frame: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`[B, S, F]` twice and `[B, F]` to the normalised and the plain sum, both of hidden's dtype.

        `first_frame` as in `Tokens`.
        """
        if self.weight is None or self.bias is None:
            updated = add_gated(hidden, branch, gate, first_frame)
            return updated, updated
        weight, bias = self.weight, self.bias

        def modulate(gate: torch.Tensor) -> tuple[torch.Tensor, ...]:
            scale, shift = (weight - 1).expand_as(gate), bias.expand_as(gate)
            return adaln_modulate(hidden, scale, shift, branch=branch, gate=gate, epsilon=self.eps)

        normalised, updated = _by_frame(first_frame, modulate, gate)
        return normalised, updated


def add_gated(
    hidden: torch.Tensor, branch: torch.Tensor, gate: torch.Tensor, first_frame: torch.Tensor | None
) -> torch.Tensor:
    """hidden + gate · branch in float32, of hidden's dtype; arguments as `WanGatedResidual.forward`'s."""

    def add(gate: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.addcmul(hidden.float(), branch.float(), gate[:, None]).to(hidden.dtype),)

    return _by_frame(first_frame, add, gate)[0]
