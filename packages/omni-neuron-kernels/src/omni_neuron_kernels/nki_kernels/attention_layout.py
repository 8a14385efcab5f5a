# SPDX-License-Identifier: Apache-2.0
"""How queries, keys and values lie in SBUF and PSUM, and how they get there.

The order of keys does not matter to softmax, nor that of queries to the loops. So of a run of 128·T rows partition p
holds rows p·T to p·T + T − 1, which lie side by side in HBM, and tile t holds row p·T + t of every p; what is left of a
run, fewer than 128 rows, is a last tile of its own.
"""

import nki.isa as nisa
import nki.language as nl

P = 128
MATMUL_COLUMNS = 512
SECTION_BYTES = 16 * 1024  # of transposed keys on chip at a time, per partition


def tiles_of(rows):
    """128-row tiles that cover `rows`."""
    return (rows + P - 1) // P


def tile_rows(rows, tile):
    """Rows of one of the tiles: 128, or fewer in the last one."""
    return min(P, rows - tile * P)


def parts(rows):
    """(partitions, first tile, last tile + 1) of the full tiles, and of the last one where it is not full."""
    full, result = rows // P, []
    if full:
        result.append((P, 0, full))
    if rows % P:
        result.append((rows % P, full, full + 1))
    return result


def hbm_rows(tensor, head, first, part):
    """The rows of one of `parts` as `[partitions, tiles, width]`; `tensor` is `[heads, rows, width]`."""
    p, low, high = part
    width, tiles = tensor.shape[2], high - low
    start = (head * tensor.shape[1] + first + low * P) * width
    return tensor.ap([[tiles * width, p], [width, tiles], [1, width]], offset=start)


def hbm_numbers(tensor, head, first, part):
    """As `hbm_rows` of `[heads, rows]`, one number a row: `[partitions, tiles]`."""
    p, low, high = part
    return tensor.ap([[high - low, p], [1, high - low]], offset=head * tensor.shape[1] + first + low * P)


def chunks_of(width):
    """(first, size) of pieces of the head dim that a matmul can contract."""
    result = []
    for first in range(0, width, P):
        result.append((first, min(P, width - first)))
    return result


def section_rows(rows, width, itemsize):
    """Rows of each section: as few sections as SECTION_BYTES allows, as equal as tiles allow."""
    most = max(1, SECTION_BYTES // (len(chunks_of(width)) * P * itemsize))
    tiles = tiles_of(rows)
    sections = (tiles + most - 1) // most
    return (tiles + sections - 1) // sections * P


def itemsize(tensor):
    """Bytes of an element of a float32 or bfloat16 tensor."""
    return 4 if tensor.dtype == "float32" else 2


def psum_banks(regimes):
    """The eight banks of PSUM, one tile each: for sums over a section, for scores, and for all else."""
    some_maximum = False
    for regime in regimes:
        some_maximum = some_maximum or regime == "running_maximum"
    tiles = []
    for _ in range(8):
        tiles.append(nl.ndarray((P, MATMUL_COLUMNS), "float32", buffer=nl.psum))
    first = 6 if some_maximum else 7
    return {"totals": tiles[0:4], "scores": tiles[4:first], "others": tiles[first:8]}


def bank(tiles, shape, dtype):
    """The one of the tiles that was used longest ago."""
    tile = tiles.pop(0)
    tiles.append(tile)
    return (tile if dtype == "float32" else tile.view(dtype))[0 : shape[0], 0 : shape[1]]


def ones(dtype):
    """Two rows of ones, which add up the two rows of a shift."""
    tile = nl.ndarray((2, P), dtype, buffer=nl.sbuf)
    nisa.memset(tile, 1.0)
    return tile


def sections_of(head, rows, width, size):
    """Sections of one key head, not on chip yet."""
    step, result = section_rows(rows, width, size), []
    for first in range(0, rows, step):
        result.append({"head": head, "first": first, "rows": min(step, rows - first), "packed": (), "fetched": False})
    return result


def load_rows(tensor, run):
    """Start to load a run of rows as `[partitions, tiles, d]`."""
    rows = run["rows"]
    data = nl.ndarray((min(P, rows), tiles_of(rows), tensor.shape[2]), tensor.dtype, buffer=nl.sbuf)
    for part in parts(rows):
        nisa.dma_copy(data[0 : part[0], part[1] : part[2]], hbm_rows(tensor, run["head"], run["first"], part))
    return data


def fetch_section(task, section):
    """Start to load a section, from the keys and values or from where `store_section` put it."""
    rows, width = section["rows"], task["k"].shape[2]
    if not len(section["packed"]):
        section["key_data"], section["value_data"] = load_rows(task["k"], section), load_rows(task["v"], section)
        if len(task["masks"]):
            mask, heads = task["masks"][0], task["k"].shape[0] // task["masks"][0].shape[0]
            section["mask"] = nl.ndarray((min(P, rows), tiles_of(rows)), mask.dtype, buffer=nl.sbuf)
            for part in parts(rows):
                numbers = hbm_numbers(mask, section["head"] // heads, section["first"], part)
                nisa.dma_copy(section["mask"][0 : part[0], part[1] : part[2]], numbers)
        return
    section["keys"], section["values"] = _section_tiles(task, rows)
    nisa.dma_copy(section["keys"][0:width, 0], _packed_keys(section, width))
    for part in parts(rows):
        nisa.dma_copy(section["values"][0 : part[0], part[1] : part[2]], _packed_values(section, width, part))


def _section_tiles(task, rows):
    """Transposed keys `[≤ 128, chunks, rows]`, and values with one more column `[partitions, tiles, d + 1]`."""
    k = task["k"]
    keys = nl.ndarray((task["chunks"][0][1], len(task["chunks"]), rows), k.dtype, buffer=nl.sbuf)
    return keys, nl.ndarray((min(P, rows), tiles_of(rows), k.shape[2] + 1), k.dtype, buffer=nl.sbuf)


def turn_section(task, section):
    """Transposed keys, and values with a column of ones, which makes the second matmul sum the weights as well.

    Where keys are masked that column is the mask: a masked key's weight counts for nothing, whatever it is.
    """
    if "key_data" not in section:
        return
    rows, d = section["rows"], task["k"].shape[2]
    keys, values = _section_tiles(task, rows)
    transpose(task, keys, section.pop("key_data"), rows)
    data = section.pop("value_data")
    for part in parts(rows):
        p, low, high = part
        nisa.tensor_copy(values[0:p, low:high, 0:d], data[0:p, low:high])
        if len(task["masks"]):
            nisa.tensor_copy(values[0:p, low:high, d], section["mask"][0:p, low:high])
        else:
            nisa.memset(values[0:p, low:high, d : d + 1], 1.0)
    section["keys"], section["values"] = keys, values


def transpose(task, turned, data, rows):
    """Loaded rows `[partitions, tiles, d]` into `[≤ 128, chunks, rows]`, through PSUM."""
    chunks = task["chunks"]
    for t in range(tiles_of(rows)):
        p = tile_rows(rows, t)
        for c in range(len(chunks)):
            first, width = chunks[c]
            flipped = bank(task["banks"]["others"], (width, p), data.dtype)
            nisa.nc_transpose(flipped, data[0:p, t, first : first + width], engine=nisa.engine.tensor)
            nisa.tensor_copy(turned[0:width, c, t * P : t * P + p], flipped)


def packed_size(rows, width):
    """Elements of a key head's sections as `store_section` keeps them."""
    return rows * (2 * width + 1)


def store_section(task, section, buffer):
    """Keep a turned section in HBM as it lies on chip, in row `section["slot"]` of `buffer`."""
    width = task["k"].shape[2]
    section["packed"] = (buffer,)
    nisa.dma_copy(_packed_keys(section, width), section["keys"][0:width, 0])
    for part in parts(section["rows"]):
        nisa.dma_copy(_packed_values(section, width, part), section["values"][0 : part[0], part[1] : part[2]])


def _packed_keys(section, width):
    buffer, rows = section["packed"][0], section["rows"]
    start = section["slot"] * buffer.shape[1] + packed_size(section["first"], width)
    return buffer.ap([[rows, width], [1, rows]], offset=start)


def _packed_values(section, width, part):
    buffer, rows = section["packed"][0], section["rows"]
    p, low, high = part
    start = section["slot"] * buffer.shape[1] + packed_size(section["first"], width) + rows * width
    row = (high - low) * (width + 1)
    return buffer.ap([[row, p], [width + 1, high - low], [1, width + 1]], offset=start + low * P * (width + 1))
