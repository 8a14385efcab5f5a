# SPDX-License-Identifier: Apache-2.0
"""Launch of the NKI kernel of causal 3-D convolution: its limits, and how it divides the work to fit on chip."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from omni_neuron_kernels.nki_launch import CORES, SBUF_BYTES, dtype_limit, kernels_of, vector_row

# Limits that AWS documents for its own kernel of this kind. Its third, images of 1024 × 1024, is not needed here: work
# is divided into blocks of rows, and whether one row fits is computed.
CHANNELS, COLUMNS = 1280, 2048
WEIGHT_BYTES = SBUF_BYTES // 2
PSUM_COLUMNS = 512
LEAST_COLUMNS = 64  # a matmul of fewer takes as long


class ConvPlan(NamedTuple):
    """The compile-time sizes of `nki_kernels.conv.causal_conv3d`.

    Attributes:
        group: output channels at a time.
        rows: output rows at a time.
        unroll: output frames of one matmul.
    """

    group: int
    rows: int
    unroll: int


def plan_convolution(
    image: tuple[int, int],
    frames: int,
    weight: tuple[int, ...],
    padding: tuple[int, int, int],
    itemsize: int,
    cores: int = CORES,
) -> ConvPlan | str:
    """How to divide a convolution, or why it does not fit on chip.

    Args:
        image: height and width of the input.
        frames: input frames, those of the past included, padding not.
        weight: shape `[O, C, Kt, Kh, Kw]`.
        padding: of the public function.
        itemsize: bytes of an element.
        cores: of the launch.
    """
    (columns, channels, depth, tall, wide), (height, width) = weight, image
    if channels > CHANNELS or columns > COLUMNS:
        return f"{channels} input and {columns} output channels: at most {CHANNELS} and {COLUMNS}"
    out_frames = padding[0] + frames - depth + 1
    out_height, out_width = height + 2 * padding[1] - tall + 1, width + 2 * padding[2] - wide + 1
    groups = math.ceil(columns / PSUM_COLUMNS)
    if columns >= LEAST_COLUMNS * cores:
        groups = math.ceil(groups / cores) * cores  # the cores share them
    while True:
        group = math.ceil(columns / groups)
        unroll = max(1, min(out_frames, LEAST_COLUMNS // group))
        weights = _weight_bytes(channels, depth, tall, wide, unroll, group) * itemsize
        if weights <= WEIGHT_BYTES or group == 1:
            break
        groups += cores
    row, tiles = width + 2 * padding[2], math.ceil(channels / 128)
    pieces = math.ceil(unroll * group / 128)
    raw = 2 * min(channels, 128) * depth * tall * wide
    # Input frames of two steps, results and what goes from or to HBM, twice each.
    held = 2 * (unroll + depth - 1)
    input_row = held * tiles * row + (2 * tiles * width if row > width else 0)
    output_row = 2 * pieces * (row + (out_width if row > out_width else 0))
    fixed = weights + (raw + (tall - 1) * input_row + held * tiles * wide) * itemsize
    fixed += unroll * group * (4 + 2 * itemsize)
    most = (SBUF_BYTES - fixed) // ((input_row + output_row) * itemsize)
    if weights > WEIGHT_BYTES or most < 1:
        needed = fixed + (input_row + output_row) * itemsize
        return f"a row of {width} and its weights need {needed} bytes of SBUF per partition, at most {SBUF_BYTES}"
    share = out_height if groups % cores == 0 else math.ceil(out_height / cores)
    return ConvPlan(group, math.ceil(share / math.ceil(share / most)), unroll)


def _weight_bytes(channels: int, depth: int, tall: int, wide: int, unroll: int, group: int) -> int:
    """Elements of the band of weights on a partition, over all tiles of channels."""
    rest = channels % 128
    copies = min(wide, 128 // rest) if rest and rest % 32 == 0 else 1
    taps = channels // 128 * wide + (math.ceil(wide / copies) if rest else 0)
    return taps * tall * (2 * unroll + depth - 2) * group


def _plan(x: torch.Tensor, weight: torch.Tensor, padding: tuple[int, int, int], past: torch.Tensor | None) -> Any:
    frames = x.shape[2] + (0 if past is None else past.shape[2])
    return plan_convolution((x.shape[3], x.shape[4]), frames, tuple(weight.shape), padding, x.element_size())


def causal_conv3d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    padding: tuple[int, int, int],
    past: torch.Tensor | None,
) -> torch.Tensor:
    """See `ops_convolution.causal_conv3d`."""
    parts = (x.contiguous(),) if past is None else (past.contiguous(), x.contiguous())
    plan = _plan(x, weight, padding, past)
    kernel = kernels_of("conv").causal_conv3d[CORES]
    return kernel(parts, weight.contiguous(), vector_row(bias), padding, *plan)


def causal_conv3d_limits(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    padding: tuple[int, int, int] = (0, 0, 0),
    past: torch.Tensor | None = None,
) -> str | None:
    """Why these arguments are not for the kernel."""
    given = {"x": x, "weight": weight} if past is None else {"x": x, "weight": weight, "past": past}
    plan = _plan(x, weight, padding, past)
    return dtype_limit(**given) or (plan if isinstance(plan, str) else None)
