# SPDX-License-Identifier: Apache-2.0
"""Query, key and value projections in one pass over the tokens, with RMS norm over all heads and rotary embedding.

The norm's factor is one number per token, so it commutes with the gain and with the rotation: both are applied as soon
as columns leave PSUM, and the factor, which needs the sums of squares of all columns of all ranks, comes last. While
one step's sums are all-reduced, the next one's tokens are projected.
"""

import nki
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from omni_neuron_kernels.nki_kernels import tiles

P = tiles.P
BANK = tiles.BANK
PIECE_BYTES = 2048  # of a row of tokens, loaded at a time
# Rows of weights, loaded at a time, that stay on chip until all tokens of a step have met them. A DMA row of less than
# 2 KiB takes the same time whatever its length; FP8 leaves room for longer ones.
STRIPE_BYTES = 2048
FP8_STRIPE_BYTES = 5120
TOKEN_TILES = 4  # tiles of 128 tokens in a step, at most; each holds a PSUM bank
FP8_TOKEN_TILES = 8
# Of trn2's 224 KiB per partition and, for FP8, of trn3's 256; what the compiler reserves is not published.
SBUF_BYTES = 208 * 1024
FP8_SBUF_BYTES = 240 * 1024
IN_FLIGHT_BYTES = 24 * 1024
FP8_IN_FLIGHT_BYTES = 40 * 1024


class Segment(nl.NKIObject):
    """The columns of queries, keys or values."""

    first: int  # column of the weight
    heads: int
    out: object
    norm: int  # number of its gain and sum; -1 for none
    rotated: bool


class Job(nl.NKIObject):
    """What every part of a launch reads."""

    x: object
    weight: object
    scales: object  # () or FP8's ([rows, 1] of the tokens, [1, columns] of the weights)
    bias: object
    head_dim: int
    segments: object
    gains: object  # a tile for each norm
    rotation: object
    wide: str  # dtype of what has left PSUM and is not done
    dtype: str
    tiles: int
    units: object  # () or a tile of MX scales that are one


class Step(nl.NKIObject):
    """Up to `tiles` tiles of tokens on their way."""

    first: int
    count: int
    tokens: object
    scales: object  # for each tile of tokens its FP8 scales
    tables: object  # for each tile of tokens its cosines and sines
    held: object  # for each tile of tokens and each segment what is to be written
    squares: object
    totals: object


@nki.jit
def qkv_projection(x, weight, bias, heads, head_dim, gains, rotation, epsilon, ranks, replica_groups):
    """x · weight + bias as queries, keys and values; the first two RMS-normalised over all heads, then rotated.

    Args:
        x: `[rows, H]`, float32 or bfloat16.
        weight: `[H, (N_q + 2 N_k) d]` of x's dtype; queries, keys, values side by side.
        bias: float32 `[1, (N_q + 2 N_k) d]`.
        heads: (N_q, N_k); one of them may be 0.
        head_dim: d.
        gains: float32 `[1, N d]` for queries and for keys, those of no heads left out; () for no norm.
        rotation: float32 cosines and sines `[rows, d / 2]` of interleaved pairs; () for none.
        epsilon: added to the mean square.
        ranks: over how many ranks the heads are split.
        replica_groups: tuples of their ids, which cover all ranks of the launch; () where `ranks` is 1.

    Returns:
        Queries, keys and values `[rows, N d]`, those of no heads left out.
    """
    job = _job(x, weight, (), bias, heads, head_dim, gains, rotation, x.dtype)
    _run(job, epsilon, ranks, replica_groups)
    return _outputs(job)


@nki.jit
def qkv_partial(x, weight, bias, heads, head_dim, gains, rotation):
    """`qkv_projection` without the norm's factor, and this rank's sums of squares, float32 `[rows, norms]`."""
    job = _job(x, weight, (), bias, heads, head_dim, gains, rotation, x.dtype)
    return _with_sums(_outputs(job), _run_partial(job))


@nki.jit
def fp8_qkv_projection(
    x, x_scale, weight, weight_scale, bias, heads, head_dim, gains, rotation, epsilon, ranks, replica_groups, dtype
):
    """`qkv_projection` of row-quantised tokens with FP8 weights on the MX matmul, its block scales all one.

    Args:
        x: `[rows, H]` E4M3FN, H a multiple of 128 and rows of 2.
        x_scale: float32 `[rows, 1]`.
        weight: `[H / 4, 4 columns]` E4M3FN: the elements of rows 4p to 4p + 3 of a column lie side by side.
        weight_scale: float32 `[1, columns]`.
        bias: as the other arguments, see `qkv_projection`.
        heads: see there.
        head_dim: see there.
        gains: see there.
        rotation: see there.
        epsilon: see there.
        ranks: see there.
        replica_groups: see there.
        dtype: of the results.
    """
    job = _job(x, weight, (x_scale, weight_scale), bias, heads, head_dim, gains, rotation, dtype)
    _run(job, epsilon, ranks, replica_groups)
    return _outputs(job)


@nki.jit
def fp8_qkv_partial(x, x_scale, weight, weight_scale, bias, heads, head_dim, gains, rotation, dtype):
    """What `qkv_partial` is to `qkv_projection`."""
    job = _job(x, weight, (x_scale, weight_scale), bias, heads, head_dim, gains, rotation, dtype)
    return _with_sums(_outputs(job), _run_partial(job))


def token_tiles(width, norm_columns, columns, item, fp8):
    """Tiles of 128 tokens that a step may have, given what else lies in SBUF; 0 if not even one fits.

    Args:
        width: H.
        norm_columns: of queries and keys that are normalised.
        columns: of all results.
        item: bytes of an element of x.
        fp8: whether x is FP8.
    """
    depth = (width + P - 1) // P * P
    out_item = 2 if fp8 else item
    stripe = (FP8_STRIPE_BYTES // 4 if fp8 else STRIPE_BYTES) * depth // P
    whole = FP8_SBUF_BYTES - FP8_IN_FLIGHT_BYTES if fp8 else SBUF_BYTES - IN_FLIGHT_BYTES
    budget = whole - stripe - norm_columns * (2 if fp8 else 4)
    # What is normalised waits until the next step is under way, and of FP8 the next step's tokens come early.
    per_tile = depth * item * (2 if fp8 else 1) + (columns + norm_columns) * out_item
    return max(0, min(FP8_TOKEN_TILES if fp8 else TOKEN_TILES, budget // per_tile))


def _job(x, weight, scales, bias, heads, head_dim, gains, rotation, dtype):
    fp8 = len(scales) > 0
    wide = "bfloat16" if fp8 else "float32"
    rows = x.shape[0]
    counts = (heads[0], heads[1], heads[1])
    segments, first, norms = [], 0, 0
    for number in range(3):
        if counts[number] > 0:
            out = nl.ndarray((rows, counts[number] * head_dim), dtype, buffer=nl.shared_hbm)
            norm = norms if number < 2 and len(gains) > 0 else -1
            norms += 1 if norm >= 0 else 0
            rotated = number < 2 and len(rotation) > 0
            segments.append(Segment(first=first, heads=counts[number], out=out, norm=norm, rotated=rotated))
            first += counts[number] * head_dim
    gain_tiles = []
    norm_columns = 0
    for gain in gains:
        gain_tiles.append(tiles.broadcast(gain, 0, gain.shape[1], wide))
        norm_columns += gain.shape[1]
    units = (tiles.unit_scales(),) if fp8 else ()
    item = 1 if fp8 else 2 if x.dtype == "bfloat16" else 4
    return Job(
        x=x,
        weight=weight,
        scales=scales,
        bias=bias,
        head_dim=head_dim,
        segments=segments,
        gains=gain_tiles,
        rotation=rotation,
        wide=wide,
        dtype=dtype,
        tiles=max(1, token_tiles(x.shape[1], norm_columns, first, item, fp8)),
        units=units,
    )


def _outputs(job):
    first = job.segments[0].out
    if len(job.segments) == 1:
        return (first,)
    if len(job.segments) == 2:
        return first, job.segments[1].out
    return first, job.segments[1].out, job.segments[2].out


def _with_sums(outs, sums):
    if len(outs) == 1:
        return outs[0], sums
    if len(outs) == 2:
        return outs[0], outs[1], sums
    return outs[0], outs[1], outs[2], sums


def _run(job, epsilon, ranks, replica_groups):
    groups = []
    for members in replica_groups:
        group = []
        for member in members:
            group.append(member)
        groups.append(group)
    columns = _column_groups(job)
    # FP8 leaves room for the next step's tokens, which are then turned while this one's are projected.
    ahead = len(job.scales) > 0
    spans = tiles.steps(job.x.shape[0], job.tiles)
    waiting, coming = [], []
    for n in range(len(spans)):
        step = coming.pop(0) if len(coming) > 0 else _begin(job, spans[n])
        _hold(job, step)
        for number in range(len(columns)):
            if ahead and number == len(columns) - 1 and n + 1 < len(spans):
                coming.append(_begin(job, spans[n + 1]))
            _project(job, step, columns[number])
            if number == 0 and len(waiting) > 0:
                _finish(job, waiting.pop(0), epsilon, ranks)
        if len(job.gains) > 0:
            step.totals = _sums(step.squares)
            if len(groups) > 0:
                summed = nl.ndarray(step.totals.shape, "float32", buffer=nl.sbuf)
                ncc.all_reduce([step.totals], [summed], ncc.ReplicaGroup(groups), nl.add)
                step.totals = summed
            step.tokens = ()
            waiting.append(step)
            if len(groups) == 0:
                _finish(job, waiting.pop(0), epsilon, ranks)
    for step in waiting:
        _finish(job, step, epsilon, ranks)


def _run_partial(job):
    """Write queries and keys as they are, and return the sums."""
    norms = len(job.gains)
    out = nl.ndarray((job.x.shape[0], norms), "float32", buffer=nl.shared_hbm)
    columns = _column_groups(job)
    for span in tiles.steps(job.x.shape[0], job.tiles):
        first, count = span
        step = _begin(job, span)
        _hold(job, step)
        for group in columns:
            _project(job, step, group)
        totals = _sums(step.squares)
        for t in range(len(step.held)):
            r, h = first + P * t, min(P, count - P * t)
            nisa.dma_copy(out[r : r + h], totals[0:h, norms * t : norms * t + norms])
            for s in range(len(job.segments)):
                if job.segments[s].norm >= 0:
                    nisa.dma_copy(job.segments[s].out[r : r + h], step.held[t][s])
    return out


def _column_groups(job):
    """Lists of (segment, number of the block in it, first head, heads), as wide as what is loaded of the weights."""
    fp8 = len(job.scales) > 0
    item = 4 if fp8 else 2 if job.x.dtype == "bfloat16" else 4
    limit = (FP8_STRIPE_BYTES if fp8 else STRIPE_BYTES) // item
    most = BANK // job.head_dim
    groups, group, width = [], [], 0
    for s in range(len(job.segments)):
        heads = job.segments[s].heads
        for head in range(0, heads, most):
            block = (s, head // most, head, min(most, heads - head))
            if width + block[3] * job.head_dim > limit and width > 0:
                groups.append(group)
                group, width = [], 0
            group.append(block)
            width += block[3] * job.head_dim
    groups.append(group)
    return groups


def _begin(job, span):
    """Tokens of a step with the contraction on partitions, and what goes with them."""
    first, count = span
    fp8 = len(job.scales) > 0
    tokens = tiles.packed_tokens(job.x, first, count) if fp8 else _transposed(job.x, first, count)
    scales, tables = [], []
    for r in range(0, count, P):
        h = min(P, count - r)
        if fp8:
            scale = nl.ndarray((h, 1), "float32", buffer=nl.sbuf)
            nisa.dma_copy(scale, job.scales[0][first + r : first + r + h])
            scales.append(scale)
        pair = []
        for table in job.rotation:
            pair.append(tiles.loaded(table, first + r, h, job.wide))
        tables.append(pair)
    return Step(first=first, count=count, tokens=tokens, scales=scales, tables=tables, held=(), squares=(), totals=())


def _hold(job, step):
    """Room for the results of a step, and for its sums of squares by blocks of columns."""
    blocks = 1
    for segment in job.segments:
        blocks = max(blocks, (segment.heads + BANK // job.head_dim - 1) // (BANK // job.head_dim))
    step.squares = nl.ndarray((P, job.tiles * max(1, len(job.gains)), blocks), "float32", buffer=nl.sbuf)
    nisa.memset(step.squares, 0.0)
    held = []
    for r in range(0, step.count, P):
        parts = []
        for segment in job.segments:
            parts.append(nl.ndarray((min(P, step.count - r), segment.heads, job.head_dim), job.dtype, buffer=nl.sbuf))
        held.append(parts)
    step.held = held


def _transposed(x, first, count):
    """Rows of x as a list of `[≤ 128 of H, rows]` tiles."""
    width = x.shape[1]
    columns = PIECE_BYTES // (2 if x.dtype == "bfloat16" else 4)
    turned = []
    for h in range(0, width, P):
        turned.append(nl.ndarray((min(P, width - h), max(1, count)), x.dtype, buffer=nl.sbuf))
    for r in range(0, count, P):
        height = min(P, count - r)
        for start in range(0, width, columns):
            end = min(width, start + columns)
            data = nl.ndarray((height, end - start), x.dtype, buffer=nl.sbuf)
            nisa.dma_copy(data, x[first + r : first + r + height, start:end])
            for h in range(start, end, P):
                w = min(P, end - h)
                flipped = nl.ndarray((w, height), x.dtype, buffer=nl.psum)
                nisa.nc_transpose(flipped, data[:, h - start : h - start + w], engine=nisa.engine.tensor)
                nisa.tensor_copy(turned[h // P][:, r : r + height], flipped)
    return turned


def _project(job, step, group):
    """The columns of a group of blocks for all tokens of a step."""
    if step.count == 0:
        return
    d, fp8 = job.head_dim, len(job.scales) > 0
    start = job.segments[group[0][0]].first + group[0][2] * d
    end = job.segments[group[-1][0]].first + (group[-1][2] + group[-1][3]) * d
    stripes = []
    for number in range(len(step.tokens)):
        k, height = P * number, step.tokens[number].shape[0]
        if fp8:
            stripe = nl.ndarray((height, 4 * (end - start)), job.weight.dtype, buffer=nl.sbuf)
            nisa.dma_copy(stripe, job.weight[k : k + height, 4 * start : 4 * end])
            stripes.append(stripe.view(tiles.X4))
        else:
            stripe = nl.ndarray((height, end - start), job.weight.dtype, buffer=nl.sbuf)
            nisa.dma_copy(stripe, job.weight[k : k + height, start:end])
            stripes.append(stripe)
    for block in group:
        first = job.segments[block[0]].first + block[2] * d
        width = block[3] * d
        bias = tiles.broadcast(job.bias, first, width, "float32")
        factors = tiles.broadcast(job.scales[1], first, width, "float32") if fp8 else bias
        for t in range(0, len(step.held), TOKEN_TILES):
            totals = _products(job, step, stripes, first - start, width, t)
            together = TOKEN_TILES if fp8 else 1
            for part in range(0, len(totals), together):
                _leave(job, step, block, t + part, totals[part : part + together], bias, factors)


def _products(job, step, stripes, offset, width, first_tile):
    """Sums over H of `width` columns for up to four tiles of tokens, in PSUM."""
    totals = []
    for t in range(first_tile, min(len(step.held), first_tile + TOKEN_TILES)):
        totals.append(nl.ndarray((min(P, step.count - P * t), width), "float32", buffer=nl.psum))
    for number in range(len(stripes)):
        moving = stripes[number][:, offset : offset + width]
        for part in range(len(totals)):
            r, h = P * (first_tile + part), totals[part].shape[0]
            stationary = step.tokens[number][:, r : r + h]
            if len(job.units) > 0:
                k, unit = stationary.shape[0], job.units[0]
                scales = (unit[0:k, 0:h], unit[0:k, 0:width])
                nisa.nc_matmul_mx(totals[part], stationary, moving, scales[0], scales[1], accumulate=(number > 0))
            else:
                nisa.nc_matmul(totals[part], stationary, moving, accumulate=(number > 0))
    return totals


def _leave(job, step, block, first_tile, totals, bias, factors):
    """From PSUM to what is held: scales, bias, sum of squares, gain, rotation. Without a norm it is written.

    Each stage is done for all tiles of tokens that are given before the next one, so that the engines, which take
    turns on a tile, need not wait for each other.
    """
    s, number, head, heads = block
    segment, d = job.segments[s], job.head_dim
    targets = []
    for part in range(len(totals)):
        targets.append(step.held[first_tile + part][s][:, head : head + heads])
    more = segment.norm >= 0 or segment.rotated
    values = _like(totals, heads, d, job.wide) if more else targets
    _biased(job, step, first_tile, values, totals, bias, factors)
    if segment.norm >= 0:
        gained = _like(totals, heads, d, job.wide) if segment.rotated else targets
        for part in range(len(totals)):
            h = totals[part].shape[0]
            unused = nl.ndarray((h, heads, d), job.wide, buffer=nl.sbuf)
            place = len(job.gains) * (first_tile + part) + segment.norm
            sums = step.squares[0:h, place, number : number + 1]
            nisa.activation_reduce(unused, nl.square, values[part], nl.add, sums)
            gain = job.gains[segment.norm][0:h, head * d : (head + heads) * d]
            nisa.tensor_tensor(gained[part], values[part], gain, nl.multiply)
        values = gained
    if segment.rotated:
        _rotate(targets, values, step.tables[first_tile : first_tile + len(totals)])
    if segment.norm < 0 and head + heads == segment.heads:
        for part in range(len(totals)):
            r, h = step.first + P * (first_tile + part), totals[part].shape[0]
            nisa.dma_copy(segment.out[r : r + h], step.held[first_tile + part][s])


def _like(totals, heads, d, dtype):
    result = []
    for total in totals:
        result.append(nl.ndarray((total.shape[0], heads, d), dtype, buffer=nl.sbuf))
    return result


def _biased(job, step, first_tile, values, totals, bias, factors):
    """values = totals, times the scales of FP8, plus bias."""
    if len(job.scales) == 0:
        for part in range(len(totals)):
            nisa.tensor_tensor(values[part], totals[part], bias[0 : totals[part].shape[0]], nl.add)
        return
    scaled = []
    for part in range(len(totals)):
        h = totals[part].shape[0]
        tile = nl.ndarray(values[part].shape, job.wide, buffer=nl.sbuf)
        scale = step.scales[first_tile + part]
        nisa.scalar_tensor_tensor(tile, totals[part], nl.multiply, scale, nl.multiply, factors[0:h])
        scaled.append(tile)
    for part in range(len(totals)):
        h = totals[part].shape[0]
        nisa.tensor_tensor(values[part], scaled[part], bias[0:h], nl.add, engine=nisa.engine.gpsimd)


def _rotate(targets, values, tables):
    """(x₀, x₁) → (x₀ cos − x₁ sin, x₀ sin + x₁ cos) for neighbouring channels of tiles `[tokens, heads, d]`."""
    straight, crossed = [], []
    for part in range(len(values)):
        src = values[part]
        h, heads, d = src.shape
        half = d // 2
        cos = tables[part][0].ap([[half, h], [0, heads], [1, half], [0, 2]])
        sin = tables[part][1].ap([[half, h], [0, heads], [1, half]])
        straight.append(nl.ndarray(src.shape, src.dtype, buffer=nl.sbuf))
        crossed.append(nl.ndarray(src.shape, src.dtype, buffer=nl.sbuf))
        nisa.tensor_tensor(straight[part], src, cos, nl.multiply)
        # GpSimd has little else to do.
        nisa.tensor_tensor(crossed[part][:, :, 0::2], src[:, :, 1::2], sin, nl.multiply, engine=nisa.engine.gpsimd)
        nisa.tensor_tensor(crossed[part][:, :, 1::2], src[:, :, 0::2], sin, nl.multiply, engine=nisa.engine.gpsimd)
    for part in range(len(values)):
        dst, a, b = targets[part], straight[part], crossed[part]
        nisa.tensor_tensor(dst[:, :, 0::2], a[:, :, 0::2], b[:, :, 0::2], nl.subtract)
        nisa.tensor_tensor(dst[:, :, 1::2], a[:, :, 1::2], b[:, :, 1::2], nl.add)


def _sums(squares):
    """Sums of squares `[128, tiles · norms]` over the blocks of a segment."""
    totals = nl.ndarray((squares.shape[0], squares.shape[1]), "float32", buffer=nl.sbuf)
    nisa.tensor_reduce(totals, nl.add, squares, axis=2)
    return totals


def _finish(job, step, epsilon, ranks):
    """Multiply what is normalised by 1 / √(mean square + ε) and write it."""
    norms = len(job.gains)
    factors = nl.ndarray(step.totals.shape, "float32", buffer=nl.sbuf)
    for s in range(len(job.segments)):
        segment = job.segments[s]
        if segment.norm >= 0:
            mean = 1.0 / (segment.heads * job.head_dim * ranks)
            part = factors[:, segment.norm :: norms]
            nisa.tensor_scalar(
                part, step.totals[:, segment.norm :: norms], nl.multiply, mean, op1=nl.add, operand1=epsilon
            )
    nisa.activation(factors, nl.rsqrt, factors)
    for t in range(len(step.held)):
        r, h = step.first + P * t, min(P, step.count - P * t)
        for s in range(len(job.segments)):
            norm = job.segments[s].norm
            if norm >= 0:
                held = step.held[t][s]
                place = norms * t + norm
                nisa.tensor_scalar(held, held, nl.multiply, factors[0:h, place : place + 1])
                nisa.dma_copy(job.segments[s].out[r : r + h], held)
