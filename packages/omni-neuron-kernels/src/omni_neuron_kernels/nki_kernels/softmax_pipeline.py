# SPDX-License-Identifier: Apache-2.0
"""Attention as a list of items, each a piece of queries over a section of keys, with stationary keys.

Scores `[keys, queries]` go into the second matmul without a transpose.

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

from omni_neuron_kernels.nki_kernels import attention_layout as layout

PIECE_ROWS = 512
LOOK_AHEAD = 2  # score tiles that TensorE computes before it needs the first one's exponentials
LOOK_AHEAD_WITH_MAXIMUM = 1  # there it also has the next maximum to work on, which takes PSUM banks
LOG_RANGE = 64  # ScalarE's logarithm takes 2^-64 to 2^64
LARGEST = 3.4028234e38  # below infinity in float32


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
    tiles, totals = layout.tiles_of(rows), []
    for j in range(tiles):
        p = layout.tile_rows(rows, j)
        scores = layout.bank(task["banks"]["scores"], (p, piece["rows"]), "float32")
        _multiply(scores, keys, j * layout.P, p, piece["columns"], 0, piece["rows"], task["chunks"])
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
        for t in range(layout.tiles_of(piece["rows"])):
            shape = (layout.tile_rows(piece["rows"], t), entry["values"].shape[2])
            totals.append(layout.bank(task["banks"]["totals"], shape, "float32"))
    for t in range(len(totals)):
        columns = weights[:, t * layout.P : t * layout.P + layout.tile_rows(piece["rows"], t)]
        nisa.nc_matmul(totals[t], columns, entry["values"][0 : layout.tile_rows(rows, j), j], accumulate=(j > 0))
    if j < layout.tiles_of(rows) - 1:
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
        nisa.tensor_copy(left[0 : layout.tile_rows(piece["rows"], t), t], totals[t])
    if not piece["summed"]:
        piece["summed"] = True
        return
    for part in layout.parts(piece["rows"]):
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
    result = nl.ndarray((min(layout.P, rows), layout.tiles_of(rows), d), task["q"].dtype, buffer=nl.sbuf)
    for t in range(layout.tiles_of(rows)):
        p = layout.tile_rows(rows, t)
        inverse = nl.ndarray((p, 1), "float32", buffer=nl.sbuf)
        nisa.reciprocal(inverse, sums[0:p, t, d : d + 1])
        nisa.tensor_scalar(result[0:p, t], sums[0:p, t, 0:d], nl.multiply, inverse)
    for part in layout.parts(rows):
        p, low, high = part
        nisa.dma_copy(layout.hbm_rows(task["out"], head, first, part), result[0:p, low:high])
        if len(task["counts"]):
            _count_lost(task["counts"][0][0:p], sums[0:p, low:high, d])
        if len(task["lse"]):
            logs = _log_sum_exp(task, piece, sums[0:p, low:high, d], part)
            nisa.dma_copy(layout.hbm_numbers(task["lse"][0], head, first, part), logs)
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
        piece["data"] = layout.load_rows(task["q"], piece)
        if piece["regime"] == "tile_shift":
            bias, tiles = task["biases"][0], task["biases"][0].shape[1]
            piece["bias"] = nl.ndarray((layout.P, 1), "float32", buffer=nl.sbuf)
            start = piece["head"] * tiles + piece["first"] // PIECE_ROWS
            nisa.dma_copy(piece["bias"], bias.ap([[0, layout.P], [1, 1]], offset=start))
    if not section["fetched"]:
        section["fetched"] = True
        layout.fetch_section(task, section)


def _turn(task, item):
    """Bring what `_fetch` loaded into the matmuls' layouts."""
    piece, section = item["piece"], item["section"]
    if "data" in piece:
        piece["columns"] = nl.ndarray(
            (task["chunks"][0][1], len(task["chunks"]), piece["rows"]), task["q"].dtype, buffer=nl.sbuf
        )
        layout.transpose(task, piece["columns"], piece.pop("data"), piece["rows"])
        tiles = layout.tiles_of(piece["rows"])
        shape = (min(layout.P, piece["rows"]), tiles, task["q"].shape[2] + 1)
        piece["sums"] = nl.ndarray(shape, "float32", buffer=nl.sbuf)
        if piece["regime"] == "running_maximum":
            piece["peaks"] = nl.ndarray((min(layout.P, piece["rows"]), tiles), "float32", buffer=nl.sbuf)
    layout.turn_section(task, section)


def _new_scan(item):
    """Room for the maxima of each tile of queries over chunks of the section's keys; nothing is found yet."""
    rows, keys = item["piece"]["rows"], item["section"]["rows"]
    chunks = (keys + layout.MATMUL_COLUMNS - 1) // layout.MATMUL_COLUMNS
    found = nl.ndarray((min(layout.P, rows), layout.tiles_of(rows), chunks), "float32", buffer=nl.sbuf)
    return {"item": item, "found": found, "done": 0, "count": layout.tiles_of(rows) * chunks}


def _scan_until(task, scan, end):
    """Find maxima up to entry `end`, counted by tile of queries and then chunk of keys."""
    if not scan["count"]:
        return
    piece, section, found = scan["item"]["piece"], scan["item"]["section"], scan["found"]
    chunks = found.shape[2]
    for number in range(scan["done"], end):
        t, c = number // chunks, number % chunks
        p, first = layout.tile_rows(piece["rows"], t), c * layout.MATMUL_COLUMNS
        columns = min(section["rows"] - first, layout.MATMUL_COLUMNS)
        scores = layout.bank(task["banks"]["others"], (p, columns), "float32")
        _multiply(scores, piece["columns"], t * layout.P, p, section["keys"], first, columns, task["chunks"])
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
    both = nl.ndarray((min(layout.P, rows), layout.tiles_of(rows), 2), dtype, buffer=nl.sbuf)
    factors = nl.ndarray((min(layout.P, rows), layout.tiles_of(rows), 2), "float32", buffer=nl.sbuf)
    shifts = nl.ndarray((2, rows), dtype, buffer=nl.sbuf)
    for part in layout.parts(rows):
        p, low, high = part
        exact = nl.ndarray((p, high - low), "float32", buffer=nl.sbuf)
        rounded, rest = both[0:p, low:high, 0], both[0:p, low:high, 1]
        nisa.tensor_reduce(exact, nl.maximum, found[0:p, low:high], axis=2, negate=True)
        nisa.tensor_copy(rounded, exact)
        nisa.tensor_tensor(rest, exact, rounded, nl.subtract)
        for t in range(low, high):
            flipped = layout.bank(task["banks"]["others"], (2, p), dtype)
            nisa.nc_transpose(flipped, both[0:p, t], engine=nisa.engine.tensor)
            nisa.tensor_copy(shifts[:, t * layout.P : t * layout.P + p], flipped)
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
