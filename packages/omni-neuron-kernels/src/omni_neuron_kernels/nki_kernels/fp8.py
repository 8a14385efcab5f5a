# SPDX-License-Identifier: Apache-2.0
"""FP8 on trn3: MX quantisation, and projections on the MX matmul with FP8 weights that have a scale per output column.

Tokens come row-quantised (one float32 scale each, block scales one) or are MX-quantised on chip (a power of two for 32
neighbours). The block scales of weights are one.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from omni_neuron_kernels.nki_kernels import tiles

P = tiles.P
BANK = tiles.BANK
BLOCK = 4 * P  # elements of the contraction in one matmul
TOKEN_TILES = 8  # of a step
GROUP_TILES = 4  # of the moving tokens of a matmul: a PSUM bank
UP_COLUMNS = 2 * BLOCK  # of the first weight, on chip at a time
DOWN_COLUMNS = 5 * BANK // 2  # of the last weight
VECTOR_BIAS = 3  # of so many blocks of columns VectorE adds the bias of one, GpSimd of the others


@nki.jit
def quantize_mx(x, dtype):
    """Quantise groups of 32 neighbours with a power of two each, by the rule of this NKI version.

    Args:
        x: `[rows, F]`, bfloat16 or float16, F a multiple of 128.
        dtype: "float8_e4m3fn" or "float8_e5m2".

    Returns:
        `[rows, F]` of dtype, and the scales' exponents plus 127, uint8 `[rows, F / 32]`.
    """
    rows, width = x.shape
    data = nl.ndarray(x.shape, dtype, buffer=nl.shared_hbm)
    exponents = nl.ndarray((rows, width // 32), "uint8", buffer=nl.shared_hbm)
    for r in range(P * nl.program_id(), rows, P * nl.num_programs()):
        h = min(P, rows - r)
        blocks = tiles.quantized_tokens(x, r, h, dtype + "_x4")
        values = nl.ndarray((h, width // 4), "float32", buffer=nl.sbuf)
        codes = nl.ndarray((h, width // 128, 4), "uint8", buffer=nl.sbuf)
        for number in range(len(blocks)):
            packed, scales = blocks[number]
            w, k = packed.shape[0], P * number
            _turn(values[:, k : k + w], packed.view("float32"))
            # Four scales of each quadrant of 32 partitions; the others were never written.
            wide = nl.ndarray((w, h), "float32", buffer=nl.sbuf)
            nisa.tensor_copy(wide, scales)
            turned = nl.ndarray((h, w // 32, 32), "float32", buffer=nl.sbuf)
            _turn(turned, wide)
            nisa.tensor_copy(codes[:, k // 32 : (k + w) // 32], turned[:, :, 0:4])
        nisa.dma_copy(data[r : r + h], values.view(dtype))
        nisa.dma_copy(exponents[r : r + h], codes)
    return data, exponents


@nki.jit
def fp8_output_projection(x, weight, weight_scale, bias):
    """MX-quantised x · (weight · weight_scale) + bias.

    Args:
        x: bfloat16 `[rows, H]`, rows a multiple of 2, H of 128.
        weight: E4M3FN `[H / 4, 4 O]`: the elements of rows 4p to 4p + 3 of a column lie side by side.
        weight_scale: float32 `[1, O]`.
        bias: float32 `[1, O]`.
    """
    rows, columns = x.shape[0], weight.shape[1] // 4
    out = nl.ndarray((rows, columns), x.dtype, buffer=nl.shared_hbm)
    factors, offset = _rows(weight_scale), _rows(bias)
    units = tiles.unit_scales()
    spans = _filled_steps(rows)
    coming = []
    for n in range(len(spans)):
        packed = coming.pop(0) if n > 0 else _quantized(x, spans[n])
        for start in range(0, columns, DOWN_COLUMNS):
            if start + DOWN_COLUMNS >= columns and n + 1 < len(spans):
                coming.append(_quantized(x, spans[n + 1]))
            _project(out, packed, weight, factors, offset, units, spans[n], start)
    return out


@nki.jit
def fp8_mlp(x, x_scale, up_weight, up_scale, up_bias, down_weight, down_scale, down_bias, dtype):
    """gelu_tanh(x · up + up_bias), MX-quantised, · down + down_bias.

    Args:
        x: row-quantised E4M3FN `[rows, H]`, rows a multiple of 2, H of 128.
        x_scale: float32 `[1, rows]`.
        up_weight: E4M3FN `[H / 4, 4 I]`, as `fp8_output_projection`'s; I a multiple of 128.
        up_scale: float32 `[I / 4, 4]`.
        up_bias: float32 `[I / 4, 4]`.
        down_weight: E4M3FN `[I / 4, 4 O]`.
        down_scale: float32 `[1, O]`.
        down_bias: float32 `[1, O]`.
        dtype: of the result.
    """
    rows, columns = x.shape[0], down_weight.shape[1] // 4
    out = nl.ndarray((rows, columns), dtype, buffer=nl.shared_hbm)
    factors, offset = _rows(down_scale), _rows(down_bias)
    units = tiles.unit_scales()
    for first, count in _filled_steps(rows):
        tokens = tiles.packed_tokens(x, first, count)
        row_scales = tiles.broadcast(x_scale, first, count, "float32")
        inner = _up(tokens, row_scales, up_weight, up_scale, up_bias, units, count)
        for start in range(0, columns, DOWN_COLUMNS):
            _project(out, inner, down_weight, factors, offset, units, (first, count), start)
    return out


def _filled_steps(rows):
    """This core's steps that have rows."""
    spans = []
    for span in tiles.steps(rows, TOKEN_TILES):
        if span[1] > 0:
            spans.append(span)
    return spans


def _quantized(x, span):
    return tiles.quantized_tokens(x, span[0], span[1], tiles.X4)


def _turn(dst, src):
    """dst = srcᵀ of float32 tiles, through PSUM, bit by bit."""
    flipped = nl.ndarray(dst.shape, "float32", buffer=nl.psum)
    nisa.nc_transpose(flipped, src, engine=nisa.engine.tensor)
    nisa.tensor_copy(dst, flipped)


def _rows(row):
    return tiles.broadcast(row, 0, row.shape[1], "bfloat16")


def _stripes(weight, start, end):
    """Columns `start` to `end` of a packed weight: a list of `[≤ 128, columns]` tiles of packed values."""
    stripes = []
    for k in range(0, weight.shape[0], P):
        height = min(P, weight.shape[0] - k)
        stripe = nl.ndarray((height, 4 * (end - start)), weight.dtype, buffer=nl.sbuf)
        nisa.dma_copy(stripe, weight[k : k + height, 4 * start : 4 * end])
        stripes.append(stripe.view(tiles.X4))
    return stripes


def _up(tokens, row_scales, weight, scale, bias, units, count):
    """Hidden activations of all tokens of a step, MX-quantised: for each 512 of them (packed values, scales)."""
    inner = weight.shape[1] // 4
    result = []
    for start in range(0, inner, UP_COLUMNS):
        end = min(inner, start + UP_COLUMNS)
        stripes = _stripes(weight, start, end)
        for block in range(start, end, BLOCK):
            height = min(P, (end - block) // 4)
            factors = tiles.loaded(scale, block // 4, height, "float32")
            offsets = tiles.loaded(bias, block // 4, height, "float32")
            spread = nl.ndarray((height, count, 4), "bfloat16", buffer=nl.sbuf)
            for first in range(0, count, GROUP_TILES * P):
                last = min(count, first + GROUP_TILES * P)
                for element in range(4):
                    at = block - start + element
                    total = _hidden(tokens, stripes, at, height, first, last, units)
                    scaled = nl.ndarray((height, last - first), "float32", buffer=nl.sbuf)
                    nisa.tensor_tensor(scaled, total, row_scales[0:height, first:last], nl.multiply)
                    nisa.activation(
                        spread[:, first:last, element],
                        nl.gelu_apprx_tanh,
                        scaled,
                        scale=factors[:, element : element + 1],
                        bias=offsets[:, element : element + 1],
                    )
            result.append(tiles.quantized(spread, tiles.X4))
    return result


def _hidden(tokens, stripes, column, height, first, last, units):
    """Every fourth column of the weight from `column` on, times some tokens: `[height, tokens]` in PSUM."""
    total = nl.ndarray((height, last - first), "float32", buffer=nl.psum)
    for number in range(len(stripes)):
        k = stripes[number].shape[0]
        stationary = stripes[number][:, column : column + 4 * height - 3 : 4]
        moving = tokens[number][:, first:last]
        scales = (units[0:k, 0:height], units[0:k, 0 : last - first])
        nisa.nc_matmul_mx(total, stationary, moving, scales[0], scales[1], accumulate=(number > 0))
    return total


def _project(out, packed, weight, factors, offset, units, span, start):
    """packedᵀ · weight, times factors, plus offset, into `DOWN_COLUMNS` columns of a span of rows of out."""
    first, count = span
    end = min(out.shape[1], start + DOWN_COLUMNS)
    stripes = _stripes(weight, start, end)
    for r in range(0, count, P):
        h = min(P, count - r)
        result = nl.ndarray((h, end - start), out.dtype, buffer=nl.sbuf)
        for column in range(start, end, BANK):
            width = min(BANK, end - column)
            total = nl.ndarray((h, width), "float32", buffer=nl.psum)
            for number in range(len(packed)):
                data, scales = packed[number]
                k = data.shape[0]
                moving = stripes[number][:, column - start : column - start + width]
                stationary, unit = data[:, r : r + h], units[0:k, 0:width]
                nisa.nc_matmul_mx(total, stationary, moving, scales[:, r : r + h], unit, accumulate=(number > 0))
            place = result[:, column - start : column - start + width]
            engine = nisa.engine.vector if (column - start) // BANK % VECTOR_BIAS == 0 else nisa.engine.gpsimd
            vectors = (factors[0:h, column : column + width], offset[0:h, column : column + width])
            _leave(place, total, vectors[0], vectors[1], engine)
        nisa.dma_copy(out[first + r : first + r + h, start:end], result)


def _leave(dst, total, factors, offset, engine):
    """dst = total · factors + offset, the sum on `engine`."""
    copied = nl.ndarray(total.shape, "bfloat16", buffer=nl.sbuf)
    scaled = nl.ndarray(total.shape, "bfloat16", buffer=nl.sbuf)
    nisa.activation(copied, nl.copy, total)
    nisa.tensor_tensor(scaled, copied, factors, nl.multiply)
    nisa.tensor_tensor(dst, scaled, offset, nl.add, engine=engine)
