# SPDX-License-Identifier: Apache-2.0
"""Kernels that the public NKI documentation explains, written anew from their formulas; they pass the lint.

Shapes are multiples of the tile sizes where that keeps the kernel to its formula.
"""

import nki
import nki.isa as nisa
import nki.language as nl

P = 128


@nki.jit
def tensor_add(a, b):
    """a + b, [rows, columns] by tiles of 128 × 512; the cores of an LNC take rows in turn."""
    out = nl.ndarray(a.shape, a.dtype, buffer=nl.shared_hbm)
    rows, columns = a.shape
    for r in range(P * nl.program_id(), rows, P * nl.num_programs()):
        height = min(P, rows - r)
        for c in range(0, columns, 512):
            width = min(512, columns - c)
            x = nl.ndarray((height, width), a.dtype, buffer=nl.sbuf)
            y = nl.ndarray((height, width), a.dtype, buffer=nl.sbuf)
            nisa.dma_copy(x, a[r : r + height, c : c + width])
            nisa.dma_copy(y, b[r : r + height, c : c + width])
            nisa.tensor_tensor(x, x, y, nl.add)
            nisa.dma_copy(out[r : r + height, c : c + width], x)
    return out


@nki.jit
def transpose(a):
    """aᵀ by tiles of 128 × 128 through TensorE."""
    rows, columns = a.shape
    out = nl.ndarray((columns, rows), a.dtype, buffer=nl.shared_hbm)
    for r in range(0, rows, P):
        for c in range(0, columns, P):
            h, w = min(P, rows - r), min(P, columns - c)
            x = nl.ndarray((h, w), a.dtype, buffer=nl.sbuf)
            y = nl.ndarray((w, h), a.dtype, buffer=nl.psum)
            z = nl.ndarray((w, h), a.dtype, buffer=nl.sbuf)
            nisa.dma_copy(x, a[r : r + h, c : c + w])
            nisa.nc_transpose(y, x)
            nisa.tensor_copy(z, y)
            nisa.dma_copy(out[c : c + w, r : r + h], z)
    return out


@nki.jit
def transpose_in_partitions(a, height, width):
    """[P, height · width] as [P, width · height]: a strided copy, no data crosses partitions."""
    out = nl.ndarray(a.shape, a.dtype, buffer=nl.shared_hbm)
    x = nl.ndarray(a.shape, a.dtype, buffer=nl.sbuf)
    y = nl.ndarray((a.shape[0], width, height), a.dtype, buffer=nl.sbuf)
    nisa.dma_copy(x, a)
    nisa.tensor_copy(y, x.ap([[height * width, a.shape[0]], [1, width], [width, height]]))
    nisa.dma_copy(out, y)
    return out


@nki.jit
def matmul(a_t, b):
    """a_tᵀ · b, [K, M] and [K, N], K and M multiples of 128: tiles of 128 × 128 × 512, K accumulated in PSUM."""
    k_size, m_size = a_t.shape
    n_size = b.shape[1]
    out = nl.ndarray((m_size, n_size), "float32", buffer=nl.shared_hbm)
    for m in range(0, m_size, P):
        for n in range(0, n_size, 512):
            width = min(512, n_size - n)
            total = nl.ndarray((P, width), "float32", buffer=nl.psum)
            for k in range(0, k_size, P):
                left = nl.ndarray((P, P), a_t.dtype, buffer=nl.sbuf)
                right = nl.ndarray((P, width), b.dtype, buffer=nl.sbuf)
                nisa.dma_copy(left, a_t[k : k + P, m : m + P])
                nisa.dma_copy(right, b[k : k + P, n : n + width])
                nisa.nc_matmul(total, left, right, accumulate=(k > 0))
            result = nl.ndarray((P, width), "float32", buffer=nl.sbuf)
            nisa.tensor_copy(result, total)
            nisa.dma_copy(out[m : m + P, n : n + width], result)
    return out


def broadcast_row(row, partitions):
    """A `[1, F]` HBM tensor on every partition."""
    width = row.shape[1]
    tile = nl.ndarray((partitions, width), row.dtype, buffer=nl.sbuf)
    nisa.dma_copy(tile, row.ap([[0, partitions], [1, width]]))
    return tile


@nki.jit
def rms_norm(x, weight, epsilon):
    """x / sqrt(mean(x²) + ε) · weight, [rows, F] and [1, F], up to 128 rows at a time."""
    rows, width = x.shape
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    for r in range(0, rows, P):
        h = min(P, rows - r)
        gain = broadcast_row(weight, h)
        data = nl.ndarray((h, width), x.dtype, buffer=nl.sbuf)
        squares = nl.ndarray((h, width), "float32", buffer=nl.sbuf)
        total = nl.ndarray((h, 1), "float32", buffer=nl.sbuf)
        nisa.dma_copy(data, x[r : r + h])
        nisa.activation_reduce(squares, nl.square, data, nl.add, total)
        nisa.tensor_scalar(total, total, nl.multiply, 1.0 / width, op1=nl.add, operand1=epsilon)
        nisa.activation(total, nl.rsqrt, total)
        nisa.scalar_tensor_tensor(data, data, nl.multiply, total, nl.multiply, gain)
        nisa.dma_copy(out[r : r + h], data)
    return out


@nki.jit
def layer_norm(x, weight, bias, epsilon):
    """(x − mean) / sqrt(var + ε) · weight + bias from bn_stats in pieces of 512; rows ≤ 128."""
    rows, width = x.shape
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    pieces = (width + 511) // 512
    data = nl.ndarray((rows, width), x.dtype, buffer=nl.sbuf)
    stats = nl.ndarray((rows, 6 * pieces), "float32", buffer=nl.sbuf)
    both = nl.ndarray((rows, 2), "float32", buffer=nl.sbuf)
    nisa.dma_copy(data, x)
    for piece in range(pieces):
        end = min(width, 512 * piece + 512)
        nisa.bn_stats(stats[:, 6 * piece : 6 * piece + 6], data[:, 512 * piece : end])
    nisa.bn_aggr(both, stats)
    mean, variance = both[:, 0:1], both[:, 1:2]
    nisa.tensor_scalar(variance, variance, nl.add, epsilon)
    nisa.activation(variance, nl.rsqrt, variance)
    nisa.tensor_scalar(data, data, nl.subtract, mean, op1=nl.multiply, operand1=variance)
    nisa.tensor_tensor(data, data, broadcast_row(weight, rows), nl.multiply)
    nisa.tensor_tensor(data, data, broadcast_row(bias, rows), nl.add)
    nisa.dma_copy(out, data)
    return out


@nki.jit
def softmax(x):
    """exp(x − max) / Σ over rows of up to 128 partitions."""
    rows, width = x.shape
    out = nl.ndarray(x.shape, "float32", buffer=nl.shared_hbm)
    for r in range(0, rows, P):
        h = min(P, rows - r)
        data = nl.ndarray((h, width), x.dtype, buffer=nl.sbuf)
        weights = nl.ndarray((h, width), "float32", buffer=nl.sbuf)
        top = nl.ndarray((h, 1), "float32", buffer=nl.sbuf)
        total = nl.ndarray((h, 1), "float32", buffer=nl.sbuf)
        nisa.dma_copy(data, x[r : r + h])
        nisa.tensor_reduce(top, nl.maximum, data, axis=1, negate=True)
        nisa.activation_reduce(weights, nl.exp, data, nl.add, total, bias=top)
        nisa.reciprocal(total, total)
        nisa.tensor_scalar(weights, weights, nl.multiply, total)
        nisa.dma_copy(out[r : r + h], weights)
    return out


@nki.jit
def attention(q, k, v, scale):
    """softmax(qᵀ k · scale) v: q, k [d, S], v [S, d], d ≤ 128, S a multiple of 128 and at most 512."""
    d, size = q.shape
    out = nl.ndarray((size, d), "float32", buffer=nl.shared_hbm)
    queries = nl.ndarray((d, size), q.dtype, buffer=nl.sbuf)
    keys = nl.ndarray((d, size), k.dtype, buffer=nl.sbuf)
    nisa.dma_copy(queries, q)
    nisa.dma_copy(keys, k)
    for s in range(0, size, P):
        scores = nl.ndarray((P, size), "float32", buffer=nl.psum)
        weights = nl.ndarray((P, size), "float32", buffer=nl.sbuf)
        top = nl.ndarray((P, 1), "float32", buffer=nl.sbuf)
        total = nl.ndarray((P, 1), "float32", buffer=nl.sbuf)
        nisa.nc_matmul(scores, queries[:, s : s + P], keys, accumulate=False)
        nisa.tensor_reduce(top, nl.maximum, scores, axis=1, negate=True)
        nisa.tensor_scalar(top, top, nl.multiply, scale)
        nisa.activation_reduce(weights, nl.exp, scores, nl.add, total, bias=top, scale=scale)
        nisa.reciprocal(total, total)
        result = nl.ndarray((P, d), "float32", buffer=nl.psum)
        for t in range(0, size, P):
            turned = nl.ndarray((P, P), "float32", buffer=nl.psum)
            stationary = nl.ndarray((P, P), v.dtype, buffer=nl.sbuf)
            values = nl.ndarray((P, d), v.dtype, buffer=nl.sbuf)
            nisa.nc_transpose(turned, weights[:, t : t + P])
            nisa.tensor_copy(stationary, turned)
            nisa.dma_copy(values, v[t : t + P])
            nisa.nc_matmul(result, stationary, values, accumulate=(t > 0))
        rows = nl.ndarray((P, d), "float32", buffer=nl.sbuf)
        nisa.tensor_scalar(rows, result, nl.multiply, total)
        nisa.dma_copy(out[s : s + P], rows)
    return out


@nki.jit
def average_pool(x, window):
    """Means of non-overlapping window × window squares: [channels, H, W], channels ≤ 128."""
    channels, height, width = x.shape
    h, w = height // window, width // window
    out = nl.ndarray((channels, h, w), x.dtype, buffer=nl.shared_hbm)
    data = nl.ndarray(x.shape, x.dtype, buffer=nl.sbuf)
    sums = nl.ndarray((channels, h, w), x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(data, x)
    size = height * width
    squares = data.ap([[size, channels], [window * width, h], [window, w], [width, window], [1, window]])
    nisa.tensor_reduce(sums, nl.add, squares, axis=(3, 4))
    nisa.tensor_scalar(sums, sums, nl.multiply, 1.0 / (window * window))
    nisa.dma_copy(out, sums)
    return out


@nki.jit
def prefix_sum(x):
    """Running sums along rows of up to 128 partitions, in pieces of 64 that hand on their last column."""
    rows, width = x.shape
    out = nl.ndarray(x.shape, "float32", buffer=nl.shared_hbm)
    ones = nl.ndarray((rows, 64), "float32", buffer=nl.sbuf)
    carry = nl.ndarray((rows, 1), "float32", buffer=nl.sbuf)
    nisa.memset(ones, 1.0)
    nisa.memset(carry, 0.0)
    for c in range(0, width, 64):
        w = min(64, width - c)
        data = nl.ndarray((rows, w), x.dtype, buffer=nl.sbuf)
        sums = nl.ndarray((rows, w), "float32", buffer=nl.sbuf)
        nisa.dma_copy(data, x[:, c : c + w])
        nisa.tensor_tensor_scan(sums, ones[:, 0:w], data, carry, nl.multiply, nl.add)
        nisa.tensor_copy(carry, sums[:, w - 1 : w])
        nisa.dma_copy(out[:, c : c + w], sums)
    return out


@nki.jit
def embedding(table, indices):
    """Rows of a table by index: [V, F] and [n, 1] uint32, n ≤ 128, one indirect DMA."""
    width, count = table.shape[1], indices.shape[0]
    out = nl.ndarray((count, width), table.dtype, buffer=nl.shared_hbm)
    rows = nl.ndarray((count, 1), indices.dtype, buffer=nl.sbuf)
    picked = nl.ndarray((count, width), table.dtype, buffer=nl.sbuf)
    nisa.dma_copy(rows, indices)
    nisa.dma_copy(picked, table.ap([[width, count], [1, width]], vector_offset=rows))
    nisa.dma_copy(out, picked)
    return out


@nki.jit
def causal_attention_scores(q, k):
    """The causally masked qᵀ k, d ≤ 128, S ≤ 128: affine_select on an SBUF copy."""
    d, size = q.shape
    out = nl.ndarray((size, size), "float32", buffer=nl.shared_hbm)
    queries = nl.ndarray((d, size), q.dtype, buffer=nl.sbuf)
    keys = nl.ndarray((d, size), k.dtype, buffer=nl.sbuf)
    scores = nl.ndarray((size, size), "float32", buffer=nl.psum)
    masked = nl.ndarray((size, size), "float32", buffer=nl.sbuf)
    nisa.dma_copy(queries, q)
    nisa.dma_copy(keys, k)
    nisa.nc_matmul(scores, queries, keys, accumulate=False)
    nisa.tensor_copy(masked, scores)
    nisa.affine_select(masked, [[-1, size]], 1, masked, -1e30, cmp_op=nl.greater_equal)
    nisa.dma_copy(out, masked)
    return out
