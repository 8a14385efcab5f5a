# SPDX-License-Identifier: Apache-2.0
"""The public function of causal 3-D convolution."""

from __future__ import annotations

import torch

from omni_neuron_kernels import reference_convolution
from omni_neuron_kernels.op_support import expect_shape, run_op


def causal_conv3d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    padding: tuple[int, int, int] = (0, 0, 0),
    past: torch.Tensor | None = None,
) -> torch.Tensor:
    """3-D convolution of stride 1 in which frame t reads no later one: `past`, then `x`, padded in front only.

    A kernel may compute up to 64 frames together: what is not finite in one makes the others NaN, earlier ones too.

    Args:
        x: `[B, C, T, H, W]`.
        weight: `[O, C, Kt, Kh, Kw]`, as `nn.Conv3d` has it.
        bias: `[O]`.
        padding: zero frames before the first, zero rows above and below, zero columns left and right; each less than
            the kernel's size.
        past: `[B, C, T_past, H, W]`, the frames before `x`, such as a feature cache; padding comes before those.

    Returns:
        `[B, O, padding[0] + T_past + T − Kt + 1, H + 2 · padding[1] − Kh + 1, W + 2 · padding[2] − Kw + 1]` in x's
        dtype, sums in float32.

    Raises:
        ValueError: shapes or padding that do not fit.
    """
    if x.dim() != 5 or weight.dim() != 5 or weight.shape[1] != x.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} are not [B, C, T, H, W] and [O, C, …]")
    expect_shape("bias", bias, (weight.shape[0],))
    frames = x.shape[2]
    if past is not None:
        past_frames = past.shape[2] if past.dim() == 5 else 0
        expect_shape("past", past, (*x.shape[:2], past_frames, *x.shape[3:]))
        frames += past_frames
    kernel = tuple(weight.shape[2:])
    if len(padding) != 3 or not all(0 <= zeros < size for zeros, size in zip(padding, kernel, strict=True)):
        raise ValueError(f"padding = {padding}: valid are 0 to less than the kernel's {kernel}")
    sizes = (padding[0] + frames, x.shape[3] + 2 * padding[1], x.shape[4] + 2 * padding[2])
    if any(size < least for size, least in zip(sizes, kernel, strict=True)):
        raise ValueError(f"{sizes} padded frames, rows and columns are less than the kernel's {kernel}")
    return run_op(reference_convolution.causal_conv3d, x, weight, bias, padding=tuple(padding), past=past)
