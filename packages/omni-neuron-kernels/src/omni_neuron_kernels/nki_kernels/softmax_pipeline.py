# SPDX-License-Identifier: Apache-2.0
"""Attention as a list of items, each a piece of queries over a section of keys, with stationary keys.

Scores `[keys, queries]` go into the second matmul without a transpose. The order of keys does not matter to softmax, so
of a run of 128·T rows partition p holds rows p·T to p·T + T − 1, which lie side by side in HBM, and tile t holds row
p·T + t of every p; what is left of a run, fewer than 128 rows, is a last tile of its own.

A piece is up to 512 consecutive queries of a head, one PSUM bank of float32 scores. How its softmax is kept in range
(`omni_neuron_kernels.softmax_regimes` has the proofs):

- "unshifted": exp(scale · s), and nothing but ScalarE touches the scores;
- "tile_shift": exp(scale · s + bias) with one bias for the piece, which ScalarE adds at no cost;
- "running_maximum": each row's maximum over a section is found first, with the queries stationary, while the item
  before is summed; a matmul of two rows then subtracts it from the scores in PSUM. A subtraction along the free axis
  would cost VectorE more than all the rest. Sections merge as exp(peak − running peak).

Pieces of all three kinds share the engines in one stream of items.
"""

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

P = 128
PIECE_ROWS = 512
MATMUL_COLUMNS = 512
SECTION_BYTES = 16 * 1024  # of transposed keys on chip at a time, per partition
LOOK_AHEAD = 2  # score tiles that TensorE computes before it needs the first one's exponentials
LOOK_AHEAD_WITH_MAXIMUM = 1  # there it also has the next maximum to work on, which takes PSUM banks
LOG_RANGE = 64  # ScalarE's logarithm takes 2^-64 to 2^64
LARGEST = 3.4028234e38  # below infinity in float32


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


def _bank(tiles, shape, dtype):
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


def pieces_of(head, rows, regime):
    """Pieces of one head's queries, not on chip yet."""
    result = []
    for first in range(0, rows, PIECE_ROWS):
        result.append({
            "head": head, "first": first, "rows": min(PIECE_ROWS, rows - first), "regime": regime,
            "fetched": False, "scanned": False, "summed": False,
        })  # fmt: skip
    return result


def own_share(pieces):
    """Those of this core: a run of the list, so that cores share few keys. A running maximum is twice the work."""
    work, total, result = [], 0, []
    for piece in pieces:
        work.append(piece["rows"] * (2 if piece["regime"] == "running_maximum" else 1))
        total += work[-1]
    done = 0
    for n in range(len(pieces)):
        if (2 * done + work[n]) * nl.num_programs() // (2 * total) == nl.program_id():
            result.append(pieces[n])
        done += work[n]
    return result


def items_of(pieces, sections, needs, final):
    """Every piece over every section.

    Args:
        pieces: of `pieces_of`.
        sections: of `sections_of`.
        needs: how many transfers have to be started before the sections' data may be read.
        final: no further sections come for these pieces.
    """
    result = []
    for number in range(len(sections)):
        for n in range(len(pieces)):
            result.append({
                "piece": pieces[n], "section": sections[number], "needs": needs,
                "last": final and number == len(sections) - 1, "releases": n == len(pieces) - 1,
            })  # fmt: skip
    return result


def run_items(task, items, transfers):
    """Compute items in order.

    An item's data is loaded two items ahead and transposed one ahead. Exponentials wait in a queue, so that TensorE
    goes on with the next scores instead of waiting for ScalarE.

    Args:
        task: what all items share: "q", "k", "v" (in HBM), "out", "lse", "masks", "biases", "counts", "scale", "pairs",
            "chunks", "ones", "banks".
        items: of `items_of`.
        transfers: (number of items that come before, source, destination) of collective permutes, in order.
    """
    waiting, started, fetched = [], 0, 0
    for s in range(-1, len(items)):
        while started < len(transfers) and transfers[started][0] <= max(0, s):
            _transfer(task, transfers[started])
            started += 1
        while fetched < min(len(items), s + 3) and items[fetched]["needs"] <= started:
            _fetch(task, items[fetched])
            fetched += 1
        scan = {"count": 0}
        if s + 1 < len(items):
            _turn(task, items[s + 1])
            if items[s + 1]["piece"]["regime"] == "running_maximum":
                scan = _new_scan(items[s + 1])
        if s >= 0:
            _sum_item(task, items[s], scan, waiting)
        if scan["count"]:
            _scan_until(task, scan, scan["count"])
            _shift_item(task, scan)
        if s >= 0 and items[s]["releases"]:
            items[s]["section"].pop("keys")
            items[s]["section"].pop("values")
    for entry in waiting:
        _accumulate(task, entry)
    for number in range(started, len(transfers)):
        _transfer(task, transfers[number])


def _transfer(task, transfer):
    ncc.collective_permute([transfer[1]], [transfer[2]], task["pairs"])


def _sum_item(task, item, scan, waiting):
    """The item's scores and exponentials, one tile of keys at a time; what waits is added up behind them."""
    piece, section = item["piece"], item["section"]
    keys, values, rows = section["keys"], section["values"], section["rows"]
    shifted = piece["regime"] == "running_maximum"
    look_ahead = LOOK_AHEAD_WITH_MAXIMUM if shifted or scan["count"] else LOOK_AHEAD
    tiles, totals = tiles_of(rows), []
    for j in range(tiles):
        p = tile_rows(rows, j)
        scores = _bank(task["banks"]["scores"], (p, piece["rows"]), "float32")
        _multiply(scores, keys, j * P, p, piece["columns"], 0, piece["rows"], task["chunks"])
        if shifted:
            nisa.nc_matmul(scores, task["ones"][:, 0:p], item["shifts"], accumulate=True)
        weights = nl.ndarray((p, piece["rows"]), values.dtype, buffer=nl.sbuf)
        if piece["regime"] == "tile_shift":
            nisa.activation(weights, nl.exp, scores, bias=piece["bias"][0:p], scale=task["scale"])
        else:
            nisa.activation(weights, nl.exp, scores, scale=task["scale"])
        waiting.append({"item": item, "tile": j, "weights": weights, "values": values, "totals": totals})
        # Done a few tiles before the end, so that nothing waits for the last maximum.
        _scan_until(task, scan, min(scan["count"], scan["count"] * (j + 1) // max(1, tiles - 4)))
        while len(waiting) > look_ahead:
            _accumulate(task, waiting.pop(0))
    if shifted:
        item.pop("shifts")


def _multiply(dst, stationary, first, size, moving, start, columns, chunks):
    """dst = stationary[:, first : first + size]ᵀ · moving[:, start : start + columns], over the head dim in chunks."""
    for c in range(len(chunks)):
        width = chunks[c][1]
        nisa.nc_matmul(
            dst,
            stationary[0:width, c, first : first + size],
            moving[0:width, c, start : start + columns],
            accumulate=(c > 0),
        )


def _accumulate(task, entry):
    """Add a key tile's weights times values to the totals, and after a section's last tile those to the sums."""
    item, j, totals, weights = entry["item"], entry["tile"], entry["totals"], entry["weights"]
    piece, rows = item["piece"], item["section"]["rows"]
    if j == 0:  # not before the totals of the item before are free
        for t in range(tiles_of(piece["rows"])):
            shape = (tile_rows(piece["rows"], t), entry["values"].shape[2])
            totals.append(_bank(task["banks"]["totals"], shape, "float32"))
    for t in range(len(totals)):
        columns = weights[:, t * P : t * P + tile_rows(piece["rows"], t)]
        nisa.nc_matmul(totals[t], columns, entry["values"][0 : tile_rows(rows, j), j], accumulate=(j > 0))
    if j < tiles_of(rows) - 1:
        return
    _merge(item, totals)
    if item["last"]:
        _finish(task, piece)


def _merge(item, totals):
    """A section's totals into the piece's sums; they leave PSUM first, since the next item waits for their banks."""
    piece = item["piece"]
    sums, left = piece["sums"], piece["sums"]
    factors = item.pop("factors") if piece["regime"] == "running_maximum" else ()
    if piece["summed"]:
        left = nl.ndarray(sums.shape, "float32", buffer=nl.sbuf)
    for t in range(len(totals)):
        nisa.tensor_copy(left[0 : tile_rows(piece["rows"], t), t], totals[t])
    if not piece["summed"]:
        piece["summed"] = True
        return
    for part in parts(piece["rows"]):
        p, low, high = part
        if piece["regime"] != "running_maximum":
            nisa.tensor_tensor(sums[0:p, low:high], sums[0:p, low:high], left[0:p, low:high], nl.add)
            continue
        for t in range(low, high):
            nisa.tensor_scalar(sums[0:p, t], sums[0:p, t], nl.multiply, factors[0:p, t, 0:1])
            new = factors[0:p, t, 1:2]
            nisa.scalar_tensor_tensor(sums[0:p, t], left[0:p, t], nl.multiply, new, nl.add, sums[0:p, t])


def _finish(task, piece):
    """Divide a piece's sums and write what was asked for."""
    d, rows, head, first = task["q"].shape[2], piece["rows"], piece["head"], piece["first"]
    sums = piece.pop("sums")
    result = nl.ndarray((min(P, rows), tiles_of(rows), d), task["q"].dtype, buffer=nl.sbuf)
    for t in range(tiles_of(rows)):
        p = tile_rows(rows, t)
        inverse = nl.ndarray((p, 1), "float32", buffer=nl.sbuf)
        nisa.reciprocal(inverse, sums[0:p, t, d : d + 1])
        nisa.tensor_scalar(result[0:p, t], sums[0:p, t, 0:d], nl.multiply, inverse)
    for part in parts(rows):
        p, low, high = part
        nisa.dma_copy(hbm_rows(task["out"], head, first, part), result[0:p, low:high])
        if len(task["counts"]):
            _count_lost(task["counts"][0][0:p], sums[0:p, low:high, d])
        if len(task["lse"]):
            logs = _log_sum_exp(task, piece, sums[0:p, low:high, d], part)
            nisa.dma_copy(hbm_numbers(task["lse"][0], head, first, part), logs)
    piece.pop("columns")


def _count_lost(count, sums):
    """Add to `count` the rows whose sum of exponentials is not above zero and below infinity."""
    p, tiles = sums.shape
    positive = nl.ndarray((p, tiles), "float32", buffer=nl.sbuf)
    kept = nl.ndarray((p, 1), "float32", buffer=nl.sbuf)
    nisa.tensor_scalar(positive, sums, nl.greater, 0.0)
    nisa.scalar_tensor_tensor(positive, sums, nl.less, LARGEST, nl.multiply, positive)
    nisa.tensor_reduce(kept, nl.add, positive, axis=1)
    nisa.tensor_scalar(kept, kept, nl.multiply, -1.0, op1=nl.add, operand1=float(tiles))
    nisa.tensor_tensor(count, count, kept, nl.add)


def _log_sum_exp(task, piece, sums, part):
    """log Σ exp(scale · s). log Σ = log max(Σ, 1) + log min(Σ, 1), each of which fits ScalarE's logarithm."""
    p, low, high = part
    large, small = nl.ndarray(sums.shape, "float32", buffer=nl.sbuf), nl.ndarray(sums.shape, "float32", buffer=nl.sbuf)
    nisa.tensor_scalar(large, sums, nl.maximum, 1.0)
    nisa.tensor_scalar(small, sums, nl.minimum, 1.0)
    nisa.activation(large, nl.log, large, scale=2.0**-LOG_RANGE)
    nisa.activation(small, nl.log, small, scale=2.0**LOG_RANGE)
    nisa.tensor_tensor(large, large, small, nl.add)
    if piece["regime"] == "running_maximum":
        nisa.scalar_tensor_tensor(large, piece["peaks"][0:p, low:high], nl.multiply, -task["scale"], nl.add, large)
    elif piece["regime"] == "tile_shift":
        nisa.tensor_scalar(large, large, nl.subtract, piece["bias"][0:p])
    return large


def _fetch(task, item):
    """Start to load what the item needs and no item before it has loaded."""
    piece, section = item["piece"], item["section"]
    if not piece["fetched"]:
        piece["fetched"] = True
        piece["data"] = _load(task["q"], piece)
        if piece["regime"] == "tile_shift":
            bias, tiles = task["biases"][0], task["biases"][0].shape[1]
            piece["bias"] = nl.ndarray((P, 1), "float32", buffer=nl.sbuf)
            start = piece["head"] * tiles + piece["first"] // PIECE_ROWS
            nisa.dma_copy(piece["bias"], bias.ap([[0, P], [1, 1]], offset=start))
    if not section["fetched"]:
        section["fetched"] = True
        fetch_section(task, section)


def _load(tensor, run):
    """A run of rows as `[partitions, tiles, d]`."""
    rows = run["rows"]
    data = nl.ndarray((min(P, rows), tiles_of(rows), tensor.shape[2]), tensor.dtype, buffer=nl.sbuf)
    for part in parts(rows):
        nisa.dma_copy(data[0 : part[0], part[1] : part[2]], hbm_rows(tensor, run["head"], run["first"], part))
    return data


def fetch_section(task, section):
    """Start to load a section, from the keys and values or from where `store_section` put it."""
    rows, width = section["rows"], task["k"].shape[2]
    if not len(section["packed"]):
        section["key_data"], section["value_data"] = _load(task["k"], section), _load(task["v"], section)
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


def _turn(task, item):
    """Bring what `_fetch` loaded into the matmuls' layouts."""
    piece, section = item["piece"], item["section"]
    if "data" in piece:
        piece["columns"] = nl.ndarray(
            (task["chunks"][0][1], len(task["chunks"]), piece["rows"]), task["q"].dtype, buffer=nl.sbuf
        )
        _transpose(task, piece["columns"], piece.pop("data"), piece["rows"])
        tiles = tiles_of(piece["rows"])
        piece["sums"] = nl.ndarray((min(P, piece["rows"]), tiles, task["q"].shape[2] + 1), "float32", buffer=nl.sbuf)
        if piece["regime"] == "running_maximum":
            piece["peaks"] = nl.ndarray((min(P, piece["rows"]), tiles), "float32", buffer=nl.sbuf)
    turn_section(task, section)


def turn_section(task, section):
    """Transposed keys, and values with a column of ones, which makes the second matmul sum the weights as well.

    Where keys are masked that column is the mask: a masked key's weight counts for nothing, whatever it is.
    """
    if "key_data" not in section:
        return
    rows, d = section["rows"], task["k"].shape[2]
    keys, values = _section_tiles(task, rows)
    _transpose(task, keys, section.pop("key_data"), rows)
    data = section.pop("value_data")
    for part in parts(rows):
        p, low, high = part
        nisa.tensor_copy(values[0:p, low:high, 0:d], data[0:p, low:high])
        if len(task["masks"]):
            nisa.tensor_copy(values[0:p, low:high, d], section["mask"][0:p, low:high])
        else:
            nisa.memset(values[0:p, low:high, d : d + 1], 1.0)
    section["keys"], section["values"] = keys, values


def _transpose(task, turned, data, rows):
    chunks = task["chunks"]
    for t in range(tiles_of(rows)):
        p = tile_rows(rows, t)
        for c in range(len(chunks)):
            first, width = chunks[c]
            flipped = _bank(task["banks"]["others"], (width, p), data.dtype)
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


def _new_scan(item):
    """Room for the maxima of each tile of queries over chunks of the section's keys; nothing is found yet."""
    rows, keys = item["piece"]["rows"], item["section"]["rows"]
    chunks = (keys + MATMUL_COLUMNS - 1) // MATMUL_COLUMNS
    found = nl.ndarray((min(P, rows), tiles_of(rows), chunks), "float32", buffer=nl.sbuf)
    return {"item": item, "found": found, "done": 0, "count": tiles_of(rows) * chunks}


def _scan_until(task, scan, end):
    """Find maxima up to entry `end`, counted by tile of queries and then chunk of keys."""
    if not scan["count"]:
        return
    piece, section, found = scan["item"]["piece"], scan["item"]["section"], scan["found"]
    chunks = found.shape[2]
    for number in range(scan["done"], end):
        t, c = number // chunks, number % chunks
        p, first = tile_rows(piece["rows"], t), c * MATMUL_COLUMNS
        columns = min(section["rows"] - first, MATMUL_COLUMNS)
        scores = _bank(task["banks"]["others"], (p, columns), "float32")
        _multiply(scores, piece["columns"], t * P, p, section["keys"], first, columns, task["chunks"])
        nisa.tensor_reduce(found[0:p, t, c : c + 1], nl.maximum, scores, axis=1)
    scan["done"] = end


def _shift_item(task, scan):
    """What to add to the item's scores, and how its sums merge, from its maxima.

    "shifts": −maximum of every query as the sum of two rows `[2, queries]` of the keys' dtype: rounded, and the rest.
    "factors" `[p, tiles, 2]`: of the sums so far and of the item's. The piece's peaks, which are negated, are brought
    up to date.
    """
    item, found = scan["item"], scan["found"]
    piece, dtype, scale = item["piece"], task["k"].dtype, task["scale"]
    rows = piece["rows"]
    both = nl.ndarray((min(P, rows), tiles_of(rows), 2), dtype, buffer=nl.sbuf)
    factors = nl.ndarray((min(P, rows), tiles_of(rows), 2), "float32", buffer=nl.sbuf)
    shifts = nl.ndarray((2, rows), dtype, buffer=nl.sbuf)
    for part in parts(rows):
        p, low, high = part
        exact = nl.ndarray((p, high - low), "float32", buffer=nl.sbuf)
        rounded, rest = both[0:p, low:high, 0], both[0:p, low:high, 1]
        nisa.tensor_reduce(exact, nl.maximum, found[0:p, low:high], axis=2, negate=True)
        nisa.tensor_copy(rounded, exact)
        nisa.tensor_tensor(rest, exact, rounded, nl.subtract)
        for t in range(low, high):
            flipped = _bank(task["banks"]["others"], (2, p), dtype)
            nisa.nc_transpose(flipped, both[0:p, t], engine=nisa.engine.tensor)
            nisa.tensor_copy(shifts[:, t * P : t * P + p], flipped)
        running = piece["peaks"][0:p, low:high]
        used = nl.ndarray((p, high - low), "float32", buffer=nl.sbuf)
        nisa.tensor_tensor(used, rounded, rest, nl.add)
        if not piece["scanned"]:
            nisa.tensor_copy(running, used)
        else:
            peak, factor = nl.ndarray((p, high - low), "float32", buffer=nl.sbuf), factors[0:p, low:high]
            nisa.tensor_tensor(peak, running, used, nl.minimum)
            nisa.tensor_tensor(factor[:, :, 0], peak, running, nl.subtract)
            nisa.tensor_tensor(factor[:, :, 1], peak, used, nl.subtract)
            nisa.activation(factor, nl.exp, factor, scale=scale)
            nisa.tensor_copy(running, peak)
    piece["scanned"] = True
    item["shifts"], item["factors"] = shifts, factors
