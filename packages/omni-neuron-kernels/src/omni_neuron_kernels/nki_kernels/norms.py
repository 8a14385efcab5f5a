# SPDX-License-Identifier: Apache-2.0
"""Row norms: RMS norm, and layer norm with adaptive modulation and a gated residual; FP8 with a scale per row.

The cores of an LNC share rows.
"""

import nki
import nki.isa as nisa
import nki.language as nl

P = 128
BN_STATS_COLUMNS = 512
SMALLEST_SCALE = 2.0**-80  # of a row of zeros


@nki.jit
def rms_norm(x, weight, epsilon):
    """x / sqrt(mean(x²) + ε) · weight in float32: `[rows, F]` and `[1, F]` to `[rows, F]` of x's dtype."""
    rows, width = x.shape
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    gain = _broadcast(weight, 0, width)
    for r in range(P * nl.program_id(), rows, P * nl.num_programs()):
        h = min(P, rows - r)
        data = nl.ndarray((h, width), x.dtype, buffer=nl.sbuf)
        squares = nl.ndarray((h, width), "float32", buffer=nl.sbuf)
        total = nl.ndarray((h, 1), "float32", buffer=nl.sbuf)
        nisa.dma_copy(data, x[r : r + h])
        nisa.activation_reduce(squares, nl.square, data, nl.add, total)
        nisa.tensor_scalar(total, total, nl.multiply, 1.0 / width, op1=nl.add, operand1=epsilon)
        nisa.activation(total, nl.rsqrt, total)
        result = nl.ndarray((h, width), x.dtype, buffer=nl.sbuf)
        nisa.scalar_tensor_tensor(result, data, nl.multiply, total, nl.multiply, gain[0:h])
        nisa.dma_copy(out[r : r + h], result)
    return out


@nki.jit
def adaln_modulate(hidden, scale, shift, epsilon):
    """LayerNorm(hidden) · (1 + scale) + shift: `[B, S, F]`, float32 `[B, F]` twice; result in hidden's dtype."""
    batch, rows, width = hidden.shape
    out = nl.ndarray(hidden.shape, hidden.dtype, buffer=nl.shared_hbm)
    for b in range(batch):
        factor, offset = _modulation(scale, shift, b, width)
        for r in range(P * nl.program_id(), rows, P * nl.num_programs()):
            h = min(P, rows - r)
            data = nl.ndarray((h, width), hidden.dtype, buffer=nl.sbuf)
            nisa.dma_copy(data, hidden[b, r : r + h])
            nisa.dma_copy(out[b, r : r + h], _modulated(data, factor, offset, epsilon, hidden.dtype))
    return out


@nki.jit
def gated_adaln_modulate(hidden, branch, gate, scale, shift, epsilon):
    """updated = hidden + gate · branch, rounded to hidden's dtype; then `adaln_modulate` of it: (modulated, updated).

    `[B, S, F]` twice, float32 `[B, F]` three times. One pass over HBM: the sum is normalised where it lies.
    """
    batch, rows, width = hidden.shape
    out = nl.ndarray(hidden.shape, hidden.dtype, buffer=nl.shared_hbm)
    updated = nl.ndarray(hidden.shape, hidden.dtype, buffer=nl.shared_hbm)
    for b in range(batch):
        factor, offset = _modulation(scale, shift, b, width)
        gates = _broadcast(gate, b * width, width)
        for r in range(P * nl.program_id(), rows, P * nl.num_programs()):
            h = min(P, rows - r)
            data = nl.ndarray((h, width), hidden.dtype, buffer=nl.sbuf)
            added = nl.ndarray((h, width), branch.dtype, buffer=nl.sbuf)
            product = nl.ndarray((h, width), "float32", buffer=nl.sbuf)
            nisa.dma_copy(data, hidden[b, r : r + h])
            nisa.dma_copy(added, branch[b, r : r + h])
            nisa.tensor_tensor(product, added, gates[0:h], nl.multiply)
            nisa.tensor_tensor(data, data, product, nl.add)
            nisa.dma_copy(updated[b, r : r + h], data)
            nisa.dma_copy(out[b, r : r + h], _modulated(data, factor, offset, epsilon, hidden.dtype))
    return out, updated


@nki.jit
def row_quantize(x, largest, dtype):
    """x / scale with a scale per row, its largest magnitude over `largest`.

    Args:
        x: `[rows, F]`.
        largest: finite value of `dtype`.
        dtype: "float8_e4m3" (240) or "float8_e4m3fn" (448).

    Returns:
        `[rows, F]` of dtype, and float32 scales `[rows, 1]`.
    """
    rows, width = x.shape
    out = nl.ndarray(x.shape, dtype, buffer=nl.shared_hbm)
    scales = nl.ndarray((rows, 1), "float32", buffer=nl.shared_hbm)
    for r in range(P * nl.program_id(), rows, P * nl.num_programs()):
        h = min(P, rows - r)
        data = nl.ndarray((h, width), x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(data, x[r : r + h])
        result, scale = _row_quantized(data, largest, dtype)
        nisa.dma_copy(out[r : r + h], result)
        nisa.dma_copy(scales[r : r + h], scale)
    return out, scales


@nki.jit
def quantized_adaln_modulate(hidden, gated, scale, shift, epsilon, largest, dtype):
    """`adaln_modulate`, or `gated_adaln_modulate` where `gated` is (branch, gate) rather than (), row-quantised.

    The modulated stream is quantised as float32, before it is rounded to anything else.

    Returns:
        `[B, S, F]` of dtype, its scales float32 `[B, S, 1]`, and if gated the updated stream.
    """
    batch, rows, width = hidden.shape
    out = nl.ndarray(hidden.shape, dtype, buffer=nl.shared_hbm)
    scales = nl.ndarray((batch, rows, 1), "float32", buffer=nl.shared_hbm)
    updated = nl.ndarray(hidden.shape, hidden.dtype, buffer=nl.shared_hbm) if len(gated) > 0 else hidden
    for b in range(batch):
        factor, offset = _modulation(scale, shift, b, width)
        gates = _broadcast(gated[1], b * width, width) if len(gated) > 0 else factor
        for r in range(P * nl.program_id(), rows, P * nl.num_programs()):
            h = min(P, rows - r)
            data = nl.ndarray((h, width), hidden.dtype, buffer=nl.sbuf)
            nisa.dma_copy(data, hidden[b, r : r + h])
            if len(gated) > 0:
                added = nl.ndarray((h, width), hidden.dtype, buffer=nl.sbuf)
                product = nl.ndarray((h, width), "float32", buffer=nl.sbuf)
                nisa.dma_copy(added, gated[0][b, r : r + h])
                nisa.tensor_tensor(product, added, gates[0:h], nl.multiply)
                nisa.tensor_tensor(data, data, product, nl.add)
                nisa.dma_copy(updated[b, r : r + h], data)
            result, row_scale = _row_quantized(_modulated(data, factor, offset, epsilon, "float32"), largest, dtype)
            nisa.dma_copy(out[b, r : r + h], result)
            nisa.dma_copy(scales[b, r : r + h], row_scale)
    return (out, scales, updated) if len(gated) > 0 else (out, scales)


def _row_quantized(data, largest, dtype):
    """A tile over a scale per row, in dtype, and the scales `[rows, 1]`."""
    h = data.shape[0]
    magnitudes = nl.ndarray(data.shape, "float32", buffer=nl.sbuf)
    peak = nl.ndarray((h, 1), "float32", buffer=nl.sbuf)
    scale = nl.ndarray((h, 1), "float32", buffer=nl.sbuf)
    inverse = nl.ndarray((h, 1), "float32", buffer=nl.sbuf)
    nisa.tensor_scalar_reduce(magnitudes, data, nl.abs, 0.0, nl.maximum, reduce_res=peak)
    nisa.tensor_scalar(scale, peak, nl.multiply, 1.0 / largest, op1=nl.maximum, operand1=SMALLEST_SCALE)
    nisa.reciprocal(inverse, scale)
    result = nl.ndarray(data.shape, dtype, buffer=nl.sbuf)
    nisa.activation(result, nl.copy, data, scale=inverse)
    return result, scale


def _broadcast(tensor, offset, width):
    """`width` elements of an HBM tensor from `offset` on, on every partition."""
    tile = nl.ndarray((P, width), tensor.dtype, buffer=nl.sbuf)
    nisa.dma_copy(tile, tensor.ap([[0, P], [1, width]], offset=offset))
    return tile


def _modulation(scale, shift, b, width):
    factor = _broadcast(scale, b * width, width)
    nisa.tensor_scalar(factor, factor, nl.add, 1.0)
    return factor, _broadcast(shift, b * width, width)


def _modulated(data, factor, offset, epsilon, dtype):
    """Layer norm of each row from `bn_stats` in pieces, times factor, plus offset."""
    h, width = data.shape
    pieces = (width + BN_STATS_COLUMNS - 1) // BN_STATS_COLUMNS
    stats = nl.ndarray((h, 6 * pieces), "float32", buffer=nl.sbuf)
    both = nl.ndarray((h, 2), "float32", buffer=nl.sbuf)
    for piece in range(pieces):
        first = BN_STATS_COLUMNS * piece
        nisa.bn_stats(stats[:, 6 * piece : 6 * piece + 6], data[:, first : min(width, first + BN_STATS_COLUMNS)])
    nisa.bn_aggr(both, stats)
    mean, deviation = both[:, 0:1], nl.ndarray((h, 1), "float32", buffer=nl.sbuf)
    nisa.tensor_scalar(deviation, both[:, 1:2], nl.add, epsilon)
    nisa.activation(deviation, nl.rsqrt, deviation)
    normal = nl.ndarray((h, width), "float32", buffer=nl.sbuf)
    nisa.tensor_scalar(normal, data, nl.subtract, mean, op1=nl.multiply, operand1=deviation)
    nisa.tensor_tensor(normal, normal, factor[0:h], nl.multiply)
    result = nl.ndarray((h, width), dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(result, normal, offset[0:h], nl.add)
    return result
