# SPDX-License-Identifier: Apache-2.0
"""Flash attention with stationary keys: scores `[keys, queries]` go into the second matmul without a transpose.

The order of keys does not matter to softmax, nor that of queries to the loops. So of a run of 128·T rows partition p
takes rows p·T to p·T + T − 1, which lie side by side in HBM, and tile t holds row p·T + t of every p.
"""

import nki
import nki.isa as nisa
import nki.language as nl

P = 128
SECTION_TILES = 64  # keys on chip at a time: 8,192
BLOCK_TILES = 32  # queries on chip at a time: 4,096
GROUP_TILES = 4  # queries of one matmul: 512, one PSUM bank of float32
MATMUL_COLUMNS = 512
LOOK_AHEAD = 2  # score tiles that TensorE computes before it needs the first one's exponentials
LOOK_AHEAD_WITH_MAXIMUM = 1  # there it also has the next maximum to work on, which takes PSUM banks


@nki.jit
def flash_attention(q, k, v, scale, key_length, bounded):
    """softmax(scale · q kᵀ) v over the first `key_length` keys, float32 or bfloat16.

    Heads that are `bounded` take exp(scale · s) as it is: nothing but ScalarE touches the scores. The others find each
    row's maximum over a section of keys first, with the queries stationary; a matmul of two rows then subtracts it from
    the scores in PSUM, and sections merge as exp(peak − running peak). The maxima of the next 512 queries are found
    while the present ones are summed.

    Args:
        q: `[heads, S_q, d]`, d ≤ 128.
        k: `[key heads, S_k, d]`; head h attends to key head h // (heads / key heads).
        v: shape as `k`.
        scale: factor of the scores, above zero.
        key_length: 1 to S_k.
        bounded: a bool for each head.
    """
    heads, queries = q.shape[0], q.shape[1]
    out = nl.ndarray(q.shape, q.dtype, buffer=nl.shared_hbm)
    share = heads // k.shape[0]
    tiles_per_core = (queries // P + nl.num_programs() - 1) // nl.num_programs()
    blocks = _pieces(queries, max(1, min(BLOCK_TILES, tiles_per_core)))
    sections = _pieces(key_length, SECTION_TILES)
    unit = 0
    for head in range(heads):
        for block in blocks:
            if unit % nl.num_programs() == nl.program_id():
                _attend(out, q, k, v, head, head // share, block, sections, scale, bounded[head])
            unit += 1
    return out


def _pieces(rows, most_tiles):
    """(first row, partitions, tiles) of pieces that cover `rows`: full tiles, and what is left as a tile of its own."""
    pieces = []
    full = rows // P
    for tile in range(0, full, most_tiles):
        pieces.append((tile * P, P, min(most_tiles, full - tile)))
    if rows % P:
        pieces.append((full * P, rows % P, 1))
    return pieces


def _attend(out, q, k, v, head, kv_head, block, sections, scale, bounded):
    """One block of queries of one head over all keys."""
    _, p, tiles = block
    d = q.shape[2]
    columns = _transposed(q, head, block)
    sums = nl.ndarray((p, tiles, d + 1), "float32", buffer=nl.sbuf)
    steps = []  # section and span of query tiles
    for number in range(len(sections)):
        for first in range(0, tiles, GROUP_TILES):
            steps.append((number, (first, min(tiles, first + GROUP_TILES))))
    if bounded:
        _sum_bounded(sums, columns, steps, k, v, kv_head, sections, scale)
    else:
        _sum_with_maximum(sums, columns, steps, k, v, kv_head, sections, scale)
    result = nl.ndarray((p, tiles, d), q.dtype, buffer=nl.sbuf)
    for t in range(tiles):
        inverse = nl.ndarray((p, 1), "float32", buffer=nl.sbuf)
        nisa.reciprocal(inverse, sums[:, t, d : d + 1])
        nisa.tensor_scalar(result[:, t], sums[:, t, 0:d], nl.multiply, inverse)
    nisa.dma_copy(_rows(out, head, block), result)


def _sum_bounded(sums, columns, steps, k, v, kv_head, sections, scale):
    """Σ exp(scale · s) · v and Σ exp(scale · s) over all keys.

    Exponentials wait in a queue, so that TensorE goes on with the next scores instead of waiting for ScalarE.
    """
    p = sums.shape[0]
    waiting = []
    for s in range(len(steps)):
        number, span = steps[s]
        if s == 0 or number != steps[s - 1][0]:
            keys, values = _transposed(k, kv_head, sections[number]), _values(v, kv_head, sections[number])
        totals = _totals(sums, span)
        for j in range(values.shape[1]):
            scores = _scores(columns, keys, values, j, span, p)
            waiting.append((_exponentials(scores, values, scale), values, j, totals, steps[s]))
            if len(waiting) > LOOK_AHEAD:
                _accumulate_bounded(sums, waiting.pop(0))
    for entry in waiting:
        _accumulate_bounded(sums, entry)


def _accumulate_bounded(sums, entry):
    number, span = entry[4]
    if not _accumulate(entry, sums.shape[0]):
        return
    for t in range(span[0], span[1]):
        if number == 0:
            nisa.tensor_copy(sums[:, t], entry[3][t - span[0]])
        else:
            nisa.tensor_tensor(sums[:, t], sums[:, t], entry[3][t - span[0]], nl.add)


def _sum_with_maximum(sums, columns, steps, k, v, kv_head, sections, scale):
    """As `_sum_bounded`, each row over exp(scale · its maximum), which `peaks` holds negated."""
    p, tiles = sums.shape[0], sums.shape[1]
    peaks = nl.ndarray((p, tiles), "float32", buffer=nl.sbuf)
    ones = nl.ndarray((2, P), k.dtype, buffer=nl.sbuf)
    nisa.memset(ones, 1.0)
    keys, values = [_transposed(k, kv_head, sections[0])], []
    found = _maxima(steps[0][1], p, keys[0])
    _scan(found, columns, keys[0], steps[0][1], 0, found.shape[1] * found.shape[2])
    shifts, factors = _shifts(peaks, found, steps[0], k.dtype, scale)
    waiting = []
    for s in range(len(steps)):
        number, span = steps[s]
        if number == len(values):
            values.append(_values(v, kv_head, sections[number]))
        ahead, scans, scanned = s + 1 < len(steps), 0, 0
        if ahead:
            next_number, next_span = steps[s + 1]
            if next_number == len(keys):
                keys.append(_transposed(k, kv_head, sections[next_number]))
            found = _maxima(next_span, p, keys[next_number])
            scans = found.shape[1] * found.shape[2]
        totals = _totals(sums, span)
        key_p, key_tiles = values[number].shape[0], values[number].shape[1]
        for j in range(key_tiles):
            scores = _scores(columns, keys[number], values[number], j, span, p)
            nisa.nc_matmul(scores, ones[:, 0:key_p], shifts, accumulate=True)
            waiting.append((_exponentials(scores, values[number], scale), values[number], j, totals, steps[s], factors))
            if ahead:
                # Done a few tiles before the end, so that nothing waits for the last maximum.
                due = min(scans, scans * (j + 1) // max(1, key_tiles - 4))
                _scan(found, columns, keys[next_number], next_span, scanned, due)
                scanned = due
            if len(waiting) > LOOK_AHEAD_WITH_MAXIMUM:
                _accumulate_with_maximum(sums, waiting.pop(0))
        if ahead:
            shifts, factors = _shifts(peaks, found, steps[s + 1], k.dtype, scale)
    for entry in waiting:
        _accumulate_with_maximum(sums, entry)


def _accumulate_with_maximum(sums, entry):
    number, span = entry[4]
    if not _accumulate(entry, sums.shape[0]):
        return
    for t in range(span[0], span[1]):
        part = t - span[0]
        if number == 0:
            nisa.tensor_copy(sums[:, t], entry[3][part])
        else:
            old, new = entry[5][:, part, 0:1], entry[5][:, part, 1:2]
            nisa.tensor_scalar(sums[:, t], sums[:, t], nl.multiply, old)
            nisa.scalar_tensor_tensor(sums[:, t], entry[3][part], nl.multiply, new, nl.add, sums[:, t])


def _totals(sums, span):
    """For each tile of queries a PSUM tile for its sums over a section."""
    totals = []
    for _ in range(span[0], span[1]):
        totals.append(nl.ndarray((sums.shape[0], sums.shape[2]), "float32", buffer=nl.psum))
    return totals


def _scores(columns, keys, values, j, span, p):
    """q·k of key tile j and a span of query tiles, `[keys, queries]` in PSUM."""
    key_p = values.shape[0]
    scores = nl.ndarray((key_p, (span[1] - span[0]) * p), "float32", buffer=nl.psum)
    moving = columns[:, span[0] * p : span[1] * p]
    nisa.nc_matmul(scores, keys[:, j * key_p : (j + 1) * key_p], moving, accumulate=False)
    return scores


def _exponentials(scores, values, scale):
    weights = nl.ndarray(scores.shape, values.dtype, buffer=nl.sbuf)
    nisa.activation(weights, nl.exp, scores, scale=scale)
    return weights


def _accumulate(entry, p):
    """Add a key tile's weights times values to the totals; whether it was the section's last."""
    weights, values, j, totals = entry[0], entry[1], entry[2], entry[3]
    for t in range(len(totals)):
        nisa.nc_matmul(totals[t], weights[:, t * p : (t + 1) * p], values[:, j], accumulate=(j > 0))
    return j == values.shape[1] - 1


def _rows(tensor, head, piece):
    """The rows of a piece as `[partitions, tiles, d]`, each partition's side by side in HBM."""
    first, p, tiles = piece
    d = tensor.shape[2]
    return tensor.ap([[tiles * d, p], [d, tiles], [1, d]], offset=(head * tensor.shape[1] + first) * d)


def _transposed(tensor, head, piece):
    """A piece as `[d, tiles · partitions]`, tile after tile."""
    _, p, tiles = piece
    d = tensor.shape[2]
    data = nl.ndarray((p, tiles, d), tensor.dtype, buffer=nl.sbuf)
    turned = nl.ndarray((d, tiles * p), tensor.dtype, buffer=nl.sbuf)
    nisa.dma_copy(data, _rows(tensor, head, piece))
    for t in range(tiles):
        flipped = nl.ndarray((d, p), tensor.dtype, buffer=nl.psum)
        nisa.nc_transpose(flipped, data[:, t], engine=nisa.engine.tensor)
        nisa.tensor_copy(turned[:, t * p : (t + 1) * p], flipped)
    return turned


def _values(tensor, head, piece):
    """A piece of values with a column of ones, which makes the second matmul sum the weights as well."""
    _, p, tiles = piece
    d = tensor.shape[2]
    data = nl.ndarray((p, tiles, d), tensor.dtype, buffer=nl.sbuf)
    widened = nl.ndarray((p, tiles, d + 1), tensor.dtype, buffer=nl.sbuf)
    nisa.dma_copy(data, _rows(tensor, head, piece))
    nisa.tensor_copy(widened[:, :, 0:d], data)
    nisa.memset(widened[:, :, d : d + 1], 1.0)
    return widened


def _maxima(span, p, keys):
    """Where `_scan` puts the maxima of each query tile over chunks of a section's keys."""
    chunks = (keys.shape[1] + MATMUL_COLUMNS - 1) // MATMUL_COLUMNS
    return nl.ndarray((p, span[1] - span[0], chunks), "float32", buffer=nl.sbuf)


def _scan(found, columns, keys, span, start, end):
    """Fill entries `start` to `end` of `found`, counted by query tile and then chunk of keys."""
    p, _, chunks = found.shape
    for number in range(start, end):
        t, c = number // chunks, number % chunks
        first, last = c * MATMUL_COLUMNS, min(keys.shape[1], (c + 1) * MATMUL_COLUMNS)
        scores = nl.ndarray((p, last - first), "float32", buffer=nl.psum)
        stationary = columns[:, (span[0] + t) * p : (span[0] + t + 1) * p]
        nisa.nc_matmul(scores, stationary, keys[:, first:last], accumulate=False)
        nisa.tensor_reduce(found[:, t, c : c + 1], nl.maximum, scores, axis=1)


def _shifts(peaks, found, step, dtype, scale):
    """What to add to a step's scores, and how its sums merge.

    Returns:
        −maximum of every query as the sum of two rows `[2, queries]` of `dtype`: rounded, and the rest. And
        `[p, tiles, 2]`: the factors of the sums so far and of the step's; `peaks` is brought up to date.
    """
    number, span = step
    p, tiles, _ = found.shape
    exact = nl.ndarray((p, tiles), "float32", buffer=nl.sbuf)
    both = nl.ndarray((p, tiles, 2), dtype, buffer=nl.sbuf)
    factors = nl.ndarray((p, tiles, 2), "float32", buffer=nl.sbuf)
    nisa.tensor_reduce(exact, nl.maximum, found, axis=2, negate=True)
    nisa.tensor_copy(both[:, :, 0], exact)
    nisa.tensor_tensor(both[:, :, 1], exact, both[:, :, 0], nl.subtract)
    shifts = nl.ndarray((2, tiles * p), dtype, buffer=nl.sbuf)
    for t in range(tiles):
        flipped = nl.ndarray((2, p), dtype, buffer=nl.psum)
        nisa.nc_transpose(flipped, both[:, t], engine=nisa.engine.tensor)
        nisa.tensor_copy(shifts[:, t * p : (t + 1) * p], flipped)
    running = peaks[:, span[0] : span[1]]
    used = nl.ndarray((p, tiles), "float32", buffer=nl.sbuf)
    nisa.tensor_tensor(used, both[:, :, 0], both[:, :, 1], nl.add)
    if number == 0:
        nisa.tensor_copy(running, used)
    else:
        peak = nl.ndarray((p, tiles), "float32", buffer=nl.sbuf)
        nisa.tensor_tensor(peak, running, used, nl.minimum)
        nisa.tensor_tensor(factors[:, :, 0], peak, running, nl.subtract)
        nisa.tensor_tensor(factors[:, :, 1], peak, used, nl.subtract)
        nisa.activation(factors, nl.exp, factors, scale=scale)
        nisa.tensor_copy(running, peak)
    return shifts, factors
