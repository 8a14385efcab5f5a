# SPDX-License-Identifier: Apache-2.0
"""Two-layer MLP with tanh-GELU: hidden activations stay on chip, weights stream once per 512 tokens."""

import nki
import nki.isa as nisa
import nki.language as nl

P = 128
TOKENS = 512  # moving columns of a matmul: one PSUM bank of float32
# Weight columns loaded at a time. A DMA row of less than 2 KiB takes the same time whatever its length, so wide is
# cheap; but each 128 columns of the first weight hold one of eight PSUM banks. Of the second, each 128 tokens do.
UP_COLUMNS = 768
DOWN_COLUMNS = 512


@nki.jit
def mlp(x, up_weight, up_bias, down_weight, down_bias):
    """gelu_tanh(x · up_weight + up_bias) · down_weight + down_bias, sums in float32.

    Args:
        x: `[rows, H]`.
        up_weight: `[H, I]` of x's dtype.
        up_bias: float32 `[I, 1]`.
        down_weight: `[I, O]` of x's dtype.
        down_bias: float32 `[1, O]`.
    """
    rows, width = x.shape
    columns = down_weight.shape[1]
    out = nl.ndarray((rows, columns), x.dtype, buffer=nl.shared_hbm)
    offset = nl.ndarray((P, columns), "float32", buffer=nl.sbuf)
    nisa.dma_copy(offset, down_bias.ap([[0, P], [1, columns]]))
    share = (rows + P * nl.num_programs() - 1) // (P * nl.num_programs()) * P
    step = min(TOKENS, share)
    for first in range(step * nl.program_id(), rows, step * nl.num_programs()):
        count = min(step, rows - first)
        activated = _up(_transposed(x, first, count, width), up_weight, up_bias)
        _down(out, activated, down_weight, offset, first, count)
    return out


def _transposed(x, first, count, width):
    """Rows `first` to `first + count` as a list of `[≤ 128 of H, count]` tiles."""
    tiles = []
    for h in range(0, width, P):
        tiles.append(nl.ndarray((min(P, width - h), count), x.dtype, buffer=nl.sbuf))
    for r in range(0, count, P):
        height = min(P, count - r)
        data = nl.ndarray((height, width), x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(data, x[first + r : first + r + height])
        for number in range(len(tiles)):
            h, w = P * number, tiles[number].shape[0]
            flipped = nl.ndarray((w, height), x.dtype, buffer=nl.psum)
            nisa.nc_transpose(flipped, data[:, h : h + w], engine=nisa.engine.tensor)
            nisa.tensor_copy(tiles[number][:, r : r + height], flipped)
    return tiles


def _up(tokens, weight, bias):
    """gelu_tanh(weightᵀ · tokens + bias) as a list of `[≤ 128 of I, count]` tiles, which the second matmul takes."""
    inner, count = weight.shape[1], tokens[0].shape[1]
    activated = []
    for start in range(0, inner, UP_COLUMNS):
        end = min(inner, start + UP_COLUMNS)
        sums = []
        for i in range(start, end, P):
            sums.append(nl.ndarray((min(P, end - i), count), "float32", buffer=nl.psum))
        for number in range(len(tokens)):
            h, height = P * number, tokens[number].shape[0]
            stripe = nl.ndarray((height, end - start), weight.dtype, buffer=nl.sbuf)
            nisa.dma_copy(stripe, weight[h : h + height, start:end])
            for part in range(len(sums)):
                i = P * part
                stationary = stripe[:, i : min(end - start, i + P)]
                nisa.nc_matmul(sums[part], stationary, tokens[number], accumulate=(number > 0))
        for part in range(len(sums)):
            i, height = start + P * part, sums[part].shape[0]
            offset = nl.ndarray((height, 1), "float32", buffer=nl.sbuf)
            tile = nl.ndarray((height, count), weight.dtype, buffer=nl.sbuf)
            nisa.dma_copy(offset, bias[i : i + height])
            nisa.activation(tile, nl.gelu_apprx_tanh, sums[part], bias=offset)
            activated.append(tile)
    return activated


def _down(out, activated, weight, offset, first, count):
    """activatedᵀ · weight + offset into rows `first` to `first + count` of out."""
    columns = weight.shape[1]
    for start in range(0, columns, DOWN_COLUMNS):
        end = min(columns, start + DOWN_COLUMNS)
        sums = []
        for r in range(0, count, P):
            sums.append(nl.ndarray((min(P, count - r), end - start), "float32", buffer=nl.psum))
        for number in range(len(activated)):
            i, height = P * number, activated[number].shape[0]
            stripe = nl.ndarray((height, end - start), weight.dtype, buffer=nl.sbuf)
            nisa.dma_copy(stripe, weight[i : i + height, start:end])
            for part in range(len(sums)):
                r = P * part
                stationary = activated[number][:, r : min(count, r + P)]
                nisa.nc_matmul(sums[part], stationary, stripe, accumulate=(number > 0))
        for part in range(len(sums)):
            r, height = first + P * part, sums[part].shape[0]
            result = nl.ndarray((height, end - start), out.dtype, buffer=nl.sbuf)
            nisa.tensor_tensor(result, sums[part], offset[0:height, start:end], nl.add)
            nisa.dma_copy(out[r : r + height, start:end], result)
