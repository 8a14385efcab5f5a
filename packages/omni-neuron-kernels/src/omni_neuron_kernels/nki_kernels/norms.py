# SPDX-License-Identifier: Apache-2.0
"""Row norms: RMS norm, and layer norm with adaptive modulation and a gated residual. The cores of an LNC share rows."""

import nki
import nki.isa as nisa
import nki.language as nl

P = 128
BN_STATS_COLUMNS = 512


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
            nisa.dma_copy(out[b, r : r + h], _modulated(data, factor, offset, epsilon))
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
            nisa.dma_copy(out[b, r : r + h], _modulated(data, factor, offset, epsilon))
    return out, updated


def _broadcast(tensor, offset, width):
    """`width` elements of an HBM tensor from `offset` on, on every partition."""
    tile = nl.ndarray((P, width), tensor.dtype, buffer=nl.sbuf)
    nisa.dma_copy(tile, tensor.ap([[0, P], [1, width]], offset=offset))
    return tile


def _modulation(scale, shift, b, width):
    factor = _broadcast(scale, b * width, width)
    nisa.tensor_scalar(factor, factor, nl.add, 1.0)
    return factor, _broadcast(shift, b * width, width)


def _modulated(data, factor, offset, epsilon):
    """Layer norm of each row from `bn_stats` in pieces, times factor, plus offset; in data's dtype."""
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
    result = nl.ndarray((h, width), data.dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(result, normal, offset[0:h], nl.add)
    return result
