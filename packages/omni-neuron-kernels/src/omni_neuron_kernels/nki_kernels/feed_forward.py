# SPDX-License-Identifier: Apache-2.0
"""MLPs and projections: hidden activations stay on chip, weights stream once per 512 tokens."""

import nki
import nki.isa as nisa
import nki.language as nl

from omni_neuron_kernels.nki_kernels import tiles

P = tiles.P
TOKENS = 512  # moving columns of a matmul: one PSUM bank of float32
# Weight columns loaded at a time. A DMA row of less than 2 KiB takes the same time whatever its length, so wide is
# cheap; but each 128 columns of the first weight hold one of eight PSUM banks. Of the second, each 128 tokens do.
UP_COLUMNS = 768
DOWN_COLUMNS = 512
# Of a second weight with few rows, more columns are loaded at a time, and stay until all of them are done, if what then
# lies on chip at once leaves the rest of trn2's 224 KiB of a partition to tiles in flight.
WIDE_BYTES = 2048
RESIDENT_BYTES = 64 * 1024
SBUF_BYTES = 192 * 1024


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
    rows, columns = x.shape[0], down_weight.shape[1]
    out = nl.ndarray((rows, columns), x.dtype, buffer=nl.shared_hbm)
    offset = tiles.broadcast(down_bias, 0, columns, down_bias.dtype)
    for span in _spans(rows):
        activated = _up(_transposed(x, span), up_weight, up_bias)
        _project(out, activated, down_weight, offset, span)
    return out


@nki.jit
def gated_mlp(x, gate_weight, up_weight, down_weight, silu):
    """(act(x · gate_weight) ⊙ (x · up_weight)) · down_weight with SiLU or tanh-GELU; shapes as of `mlp`, no biases."""
    rows, columns = x.shape[0], down_weight.shape[1]
    out = nl.ndarray((rows, columns), x.dtype, buffer=nl.shared_hbm)
    offset = nl.ndarray((P, columns), "float32", buffer=nl.sbuf)
    nisa.memset(offset, 0.0)
    for span in _spans(rows):
        activated = _gated(_transposed(x, span), gate_weight, up_weight, nl.silu if silu else nl.gelu_apprx_tanh)
        _project(out, activated, down_weight, offset, span)
    return out


@nki.jit
def output_projection(x, weight, bias):
    """x · weight + bias, sums in float32: `[rows, H]`, `[H, O]` of x's dtype, float32 `[1, O]`."""
    rows, columns = x.shape[0], weight.shape[1]
    out = nl.ndarray((rows, columns), x.dtype, buffer=nl.shared_hbm)
    offset = tiles.broadcast(bias, 0, columns, bias.dtype)
    for span in _spans(rows):
        _project(out, _transposed(x, span), weight, offset, span)
    return out


def _spans(rows):
    """(first row, rows) of this core's parts of at most `TOKENS` rows."""
    share = (rows + P * nl.num_programs() - 1) // (P * nl.num_programs()) * P
    step = min(TOKENS, share)
    spans = []
    for first in range(step * nl.program_id(), rows, step * nl.num_programs()):
        spans.append((first, min(step, rows - first)))
    return spans


def _transposed(x, span):
    """A span of rows as a list of `[≤ 128 of H, rows]` tiles."""
    first, count = span
    width = x.shape[1]
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
    """gelu_tanh(weightᵀ · tokens + bias) as a list of `[≤ 128 of I, rows]` tiles, which the second matmul takes."""
    activated = []
    for start in range(0, weight.shape[1], UP_COLUMNS):
        _append_activated(activated, _sums(tokens, weight, start), bias, start, weight.dtype)
    return activated


def _append_activated(activated, sums, bias, start, dtype):
    for part in range(len(sums)):
        i, height = start + P * part, sums[part].shape[0]
        offset = nl.ndarray((height, 1), "float32", buffer=nl.sbuf)
        tile = nl.ndarray(sums[part].shape, dtype, buffer=nl.sbuf)
        nisa.dma_copy(offset, bias[i : i + height])
        nisa.activation(tile, nl.gelu_apprx_tanh, sums[part], bias=offset)
        activated.append(tile)


def _gated(tokens, gate_weight, up_weight, op):
    """op(gate_weightᵀ · tokens) ⊙ (up_weightᵀ · tokens), tiles as `_up`'s."""
    activated = []
    for start in range(0, up_weight.shape[1], UP_COLUMNS):
        gates = _gates(_sums(tokens, gate_weight, start), op)
        _append_products(activated, gates, _sums(tokens, up_weight, start), up_weight.dtype)
    return activated


def _gates(sums, op):
    gates = []
    for total in sums:
        gate = nl.ndarray(total.shape, "float32", buffer=nl.sbuf)
        nisa.activation(gate, op, total)
        gates.append(gate)
    return gates


def _append_products(activated, gates, sums, dtype):
    for part in range(len(sums)):
        tile = nl.ndarray(sums[part].shape, dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(tile, gates[part], sums[part], nl.multiply)
        activated.append(tile)


def _sums(tokens, weight, start):
    """weightᵀ · tokens for `UP_COLUMNS` columns of weight from `start` on: `[≤ 128 columns, rows]` PSUM tiles."""
    end, count = min(weight.shape[1], start + UP_COLUMNS), tokens[0].shape[1]
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
    return sums


def _project(out, activated, weight, offset, span):
    """activatedᵀ · weight + offset into a span of rows of out."""
    first, count = span
    columns = weight.shape[1]
    wide = DOWN_COLUMNS
    resident = len(activated) * WIDE_BYTES
    held = resident + len(activated) * TOKENS * 2 + columns * 4
    if weight.dtype != "float32" and resident <= RESIDENT_BYTES and held <= SBUF_BYTES:
        wide = WIDE_BYTES // 2
    for start in range(0, columns, wide):
        end = min(columns, start + wide)
        stripes, results = [], []
        for r in range(0, count, P):
            results.append(nl.ndarray((min(P, count - r), end - start), out.dtype, buffer=nl.sbuf))
        for column in range(start, end, DOWN_COLUMNS):
            width = min(DOWN_COLUMNS, end - column)
            sums = []
            for result in results:
                sums.append(nl.ndarray((result.shape[0], width), "float32", buffer=nl.psum))
            for number in range(len(activated)):
                i, height = P * number, activated[number].shape[0]
                if column == start:
                    stripe = nl.ndarray((height, end - start), weight.dtype, buffer=nl.sbuf)
                    nisa.dma_copy(stripe, weight[i : i + height, start:end])
                    if wide > DOWN_COLUMNS:
                        stripes.append(stripe)
                else:
                    stripe = stripes[number]
                moving = stripe[:, column - start : column - start + width]
                for part in range(len(sums)):
                    r = P * part
                    stationary = activated[number][:, r : min(count, r + P)]
                    nisa.nc_matmul(sums[part], stationary, moving, accumulate=(number > 0))
            for part in range(len(sums)):
                place = results[part][:, column - start : column - start + width]
                nisa.tensor_tensor(place, sums[part], offset[0 : place.shape[0], column : column + width], nl.add)
        for part in range(len(results)):
            r = first + P * part
            nisa.dma_copy(out[r : r + results[part].shape[0], start:end], results[part])
