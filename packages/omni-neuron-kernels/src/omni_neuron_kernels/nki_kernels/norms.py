# SPDX-License-Identifier: Apache-2.0
"""Row norms: RMS norm, and layer norm with adaptive modulation and a gated residual; FP8 with a scale per row.

The cores of an LNC share rows.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from omni_neuron_kernels.nki_kernels import tiles

P = tiles.P
BN_STATS_COLUMNS = 512
SMALLEST_SCALE = 2.0**-80  # of a row of zeros


@nki.jit
def rms_norm(x, weight, epsilon):
    """x / sqrt(mean(x²) + ε) · weight in float32: `[rows, F]` and `[1, F]` to `[rows, F]` of x's dtype."""
    rows, width = x.shape
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    gain = tiles.broadcast(weight, 0, width, weight.dtype)
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
    out = nl.ndarray(hidden.shape, hidden.dtype, buffer=nl.shared_hbm)
    _modulate(hidden, (), scale, shift, epsilon, out, hidden, ())
    return out


@nki.jit
def gated_adaln_modulate(hidden, branch, gate, scale, shift, epsilon):
    """updated = hidden + gate · branch, rounded to hidden's dtype; then `adaln_modulate` of it: (modulated, updated).

    `[B, S, F]` twice, float32 `[B, F]` three times. One pass over HBM: the sum is normalised where it lies.
    """
    out = nl.ndarray(hidden.shape, hidden.dtype, buffer=nl.shared_hbm)
    updated = nl.ndarray(hidden.shape, hidden.dtype, buffer=nl.shared_hbm)
    _modulate(hidden, (branch, gate), scale, shift, epsilon, out, updated, ())
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
    out = nl.ndarray(hidden.shape, dtype, buffer=nl.shared_hbm)
    scales = nl.ndarray((hidden.shape[0], hidden.shape[1], 1), "float32", buffer=nl.shared_hbm)
    if len(gated) == 0:
        _modulate(hidden, gated, scale, shift, epsilon, out, hidden, (scales, largest, dtype))
        return out, scales
    updated = nl.ndarray(hidden.shape, hidden.dtype, buffer=nl.shared_hbm)
    _modulate(hidden, gated, scale, shift, epsilon, out, updated, (scales, largest, dtype))
    return out, scales, updated


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


def _modulate(hidden, gated, scale, shift, epsilon, out, updated, quantised):
    """Rows through (gate,) norm, modulation (and quantisation).

    VectorE and GpSimd take turns on a tile of rows, each with about as much to do. So that neither waits for the other,
    the parts of one turn belong to neighbouring tiles.
    """
    batch, rows, width = hidden.shape
    spans = []
    for r in range(P * nl.program_id(), rows, P * nl.num_programs()):
        spans.append((r, min(P, rows - r)))
    count = len(spans)
    waiting = 1 if len(quantised) > 0 else 0
    for b in range(batch):
        vectors = []
        for vector in (scale, shift):
            vectors.append(tiles.broadcast(vector, b * width, width, vector.dtype))
        nisa.tensor_scalar(vectors[0], vectors[0], nl.add, 1.0)
        if len(gated) > 0:
            vectors.append(tiles.broadcast(gated[1], b * width, width, gated[1].dtype))
        loaded, summed, modulated = [], [], []
        for n in range(-2, count + 1):
            if n + 2 < count:
                loaded.append(_loaded(hidden, gated, vectors, b, spans[n + 2]))
            if n >= 0 and n < count:
                _normalise(summed[0], epsilon)
            if n + 1 >= 0 and n + 1 < count:
                summed.append(loaded.pop(0))
                _add(summed[-1], updated, b, len(gated) > 0)
            if n >= 0 and n < count:
                modulated.append(summed.pop(0))
                nisa.tensor_tensor(
                    modulated[-1]["work"], modulated[-1]["work"], _top(vectors[0], modulated[-1]), nl.multiply
                )
                _shift(modulated[-1], vectors[1], "float32" if len(quantised) > 0 else out.dtype)
            if len(modulated) > waiting or (n == count and len(modulated) > 0):
                _write(modulated.pop(0), out, b, quantised)


def _top(vector, tile):
    return vector[0 : tile["height"]]


def _loaded(hidden, gated, vectors, b, span):
    """A tile of rows, and gate · branch of it as "work"."""
    r, h = span
    width = hidden.shape[2]
    data = nl.ndarray((h, width), hidden.dtype, buffer=nl.sbuf)
    nisa.dma_copy(data, hidden[b, r : r + h])
    # What is float32 already serves as the place for what is computed from it.
    work = data
    if len(gated) > 0:
        work = nl.ndarray((h, width), hidden.dtype, buffer=nl.sbuf)
        nisa.dma_copy(work, gated[0][b, r : r + h])
    added = work
    if hidden.dtype != "float32":
        work = nl.ndarray((h, width), "float32", buffer=nl.sbuf)
    if len(gated) > 0:
        nisa.tensor_tensor(work, added, vectors[2][0:h], nl.multiply, engine=nisa.engine.gpsimd)
    return {"row": r, "height": h, "data": data, "work": work, "statistics": ()}


def _add(tile, updated, b, gated):
    """Add gate · branch to the tile, write the sum, and take mean and variance of its rows."""
    r, h, data = tile["row"], tile["height"], tile["data"]
    width = data.shape[1]
    if gated:
        nisa.tensor_tensor(data, data, tile["work"], nl.add)
        nisa.dma_copy(updated[b, r : r + h], data)
    pieces = (width + BN_STATS_COLUMNS - 1) // BN_STATS_COLUMNS
    stats = nl.ndarray((h, 6 * pieces), "float32", buffer=nl.sbuf)
    both = nl.ndarray((h, 2), "float32", buffer=nl.sbuf)
    for piece in range(pieces):
        first = BN_STATS_COLUMNS * piece
        nisa.bn_stats(stats[:, 6 * piece : 6 * piece + 6], data[:, first : min(width, first + BN_STATS_COLUMNS)])
    nisa.bn_aggr(both, stats)
    tile["statistics"] = both


def _normalise(tile, epsilon):
    mean, variance = tile["statistics"][:, 0:1], tile["statistics"][:, 1:2]
    deviation = nl.ndarray((tile["height"], 1), "float32", buffer=nl.sbuf)
    nisa.tensor_scalar(deviation, variance, nl.add, epsilon, engine=nisa.engine.gpsimd)
    nisa.activation(deviation, nl.rsqrt, deviation)
    nisa.tensor_scalar(
        tile["work"],
        tile["data"],
        nl.subtract,
        mean,
        op1=nl.multiply,
        operand1=deviation,
        engine=nisa.engine.gpsimd,
    )


def _shift(tile, shift, dtype):
    result = tile["work"]
    if dtype != "float32":
        result = nl.ndarray(result.shape, dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(result, tile["work"], _top(shift, tile), nl.add, engine=nisa.engine.gpsimd)
    tile["work"] = result
    tile["data"] = ()


def _write(tile, out, b, quantised):
    r, h = tile["row"], tile["height"]
    if len(quantised) == 0:
        nisa.dma_copy(out[b, r : r + h], tile["work"])
        return
    result, scale = _row_quantized(tile["work"], quantised[1], quantised[2])
    nisa.dma_copy(out[b, r : r + h], result)
    nisa.dma_copy(quantised[0][b, r : r + h], scale)
