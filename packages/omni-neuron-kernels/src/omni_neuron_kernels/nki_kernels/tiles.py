# SPDX-License-Identifier: Apache-2.0
"""What kernels of projections share: who computes which tokens, how tiles get on chip, FP8 in the layout of MX.

MX matmuls contract over partitions and the four elements of a packed value. Everywhere here packed value p of a block
of 512 holds the elements 4p to 4p + 3, so that four neighbours of a row lie in one value and a group of eight values is
a group of 32 neighbours, as in the OCP MX specification.
"""

import nki.isa as nisa
import nki.language as nl

P = 128
BANK = 512  # float32 columns of a PSUM bank
X4 = "float8_e4m3fn_x4"
UNIT_SCALE = 127  # the exponent of an MX scale of one


def steps(rows, most_tiles):
    """(first row, rows) of this core's steps of up to `most_tiles` tiles of 128 rows, about equally long.

    Both cores have equally many, so that they meet in collectives; the last ones may be of no rows.
    """
    tiles = (rows + P - 1) // P
    share = (tiles + nl.num_programs() - 1) // nl.num_programs()
    number = (share + most_tiles - 1) // most_tiles
    begin = share * nl.program_id()
    result = []
    for n in range(number):
        first, last = P * (begin + share * n // number), P * (begin + share * (n + 1) // number)
        result.append((min(first, rows), min(last, rows) - min(first, rows)))
    return result


def as_dtype(tile, dtype):
    """The tile, or a copy of it in another dtype."""
    if dtype == tile.dtype:
        return tile
    cast = nl.ndarray(tile.shape, dtype, buffer=nl.sbuf)
    nisa.tensor_copy(cast, tile)
    return cast


def loaded(table, first, height, dtype):
    """Rows of an HBM tensor as a tile of `dtype`."""
    tile = nl.ndarray((height, table.shape[1]), table.dtype, buffer=nl.sbuf)
    nisa.dma_copy(tile, table[first : first + height])
    return as_dtype(tile, dtype)


def broadcast(row, first, width, dtype):
    """`width` elements of an HBM tensor on every partition, as a tile of `dtype`."""
    tile = nl.ndarray((P, width), row.dtype, buffer=nl.sbuf)
    nisa.dma_copy(tile, row.ap([[0, P], [1, width]], offset=first))
    return as_dtype(tile, dtype)


def unit_scales():
    """MX scales that are one, for any operand of up to 512 packed values."""
    tile = nl.ndarray((P, BANK), "uint8", buffer=nl.sbuf)
    nisa.memset(tile, UNIT_SCALE)
    return tile


def packed_tokens(x, first, count):
    """E4M3FN rows of x as a list of `[≤ 128, rows]` tiles of packed values. They are turned as float32, bit by bit."""
    values = x.shape[1] // 4
    tiles = []
    for k in range(0, values, P):
        tiles.append(nl.ndarray((min(P, values - k), max(1, count)), "float32", buffer=nl.sbuf))
    for r in range(0, count, P):
        height = min(P, count - r)
        data = nl.ndarray((height, x.shape[1]), x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(data, x[first + r : first + r + height])
        bits = data.view("float32")
        for number in range(len(tiles)):
            k, w = P * number, tiles[number].shape[0]
            flipped = nl.ndarray((w, height), "float32", buffer=nl.psum)
            nisa.nc_transpose(flipped, bits[:, k : k + w], engine=nisa.engine.tensor)
            nisa.tensor_copy(tiles[number][:, r : r + height], flipped, engine=nisa.engine.scalar)
    result = []
    for tile in tiles:
        result.append(tile.view(X4))
    return result


def quantized_tokens(x, first, count, dtype):
    """Rows of x, 16-bit floats, as a list of (packed values `[≤ 128, rows]`, their scales)."""
    values = x.shape[1] // 4
    spread = []
    for k in range(0, values, P):
        spread.append(nl.ndarray((min(P, values - k), count, 4), x.dtype, buffer=nl.sbuf))
    for r in range(0, count, P):
        height = min(P, count - r)
        data = nl.ndarray((height, x.shape[1]), x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(data, x[first + r : first + r + height])
        for number in range(len(spread)):
            w = spread[number].shape[0]
            start = 4 * P * number
            for element in range(4):
                flipped = nl.ndarray((w, height), x.dtype, buffer=nl.psum)
                columns = data[:, start + element : start + 4 * w : 4]
                nisa.nc_transpose(flipped, columns, engine=nisa.engine.tensor)
                place = spread[number][:, r : r + height, element]
                nisa.tensor_copy(place, flipped, engine=nisa.engine.scalar)
    result = []
    for tile in spread:
        result.append(quantized(tile, dtype))
    return result


def quantized(spread, dtype):
    """(packed values, scales) of a tile `[partitions, rows, 4]`; each group of 8 partitions × 4 has a scale."""
    p, rows = spread.shape[0], spread.shape[1]
    packed = nl.ndarray((p, rows), dtype, buffer=nl.sbuf)
    scales = nl.ndarray((p, rows), "uint8", buffer=nl.sbuf)
    nisa.quantize_mx(packed, spread, scales)
    return packed, scales
