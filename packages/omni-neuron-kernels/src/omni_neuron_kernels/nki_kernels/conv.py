# SPDX-License-Identifier: Apache-2.0
"""Causal 3-D convolution with stationary pixels: 128 output positions at a time, a matmul for each tap of the kernel.

The rows of a block lie one after the other in SBUF, with their padding. So tap (i, j) of position p is at
p + i · row + j, and 128 positions are one run, whatever the width; those that begin in padding are dropped at the end.

- Stationary pixels cost TensorE a cycle for each output channel, stationary weights one for each of 128.
- A matmul of few output channels takes as long as one of 64. Then it computes several frames (`unroll`): the weights
  are a band, in which a column that an input frame does not reach is zero.
- Channels that fill half a tile or less lie there again, moved by a column, so that a matmul does two taps or more.
"""

import nki
import nki.isa as nisa
import nki.language as nl

P = 128


@nki.jit
def causal_conv3d(parts, weight, bias, padding, group, rows, unroll):
    """Frame t of the result depends on frames t − Kt + 1 to t of the padded input. Stride 1; sums in float32.

    Of the `unroll` frames of one matmul each meets the others' input with zero weights: what is not finite in one makes
    all of them so.

    Args:
        parts: tensors `[B, C, T_i, H, W]` that follow one another in time.
        weight: `[O, C, Kt, Kh, Kw]` of their dtype.
        bias: float32 `[1, O]`.
        padding: zero frames before the first, zero rows above and below, zero columns left and right; each less than
            the kernel.
        group: output channels at a time, at most 512.
        rows: output rows at a time.
        unroll: output frames of one matmul; unroll · group is at most 512.
    """
    batch, height, width = parts[0].shape[0], parts[0].shape[3], parts[0].shape[4]
    columns, _, depth, tall, wide = weight.shape
    frames = padding[0] + 1 - depth
    for part in parts:
        frames += part.shape[2]
    shape = (batch, columns, frames, height + 2 * padding[1] + 1 - tall, width + 2 * padding[2] + 1 - wide)
    out = nl.ndarray(shape, weight.dtype, buffer=nl.shared_hbm)
    groups = (columns + group - 1) // group
    # Cores share the output channels if they can: each then loads its weights only, and no row twice.
    by_group = groups % nl.num_programs() == 0
    for number in range(groups):
        blocks = []
        unit = 0
        for b in range(batch):
            for first in range(0, shape[3], rows):
                if (number if by_group else unit) % nl.num_programs() == nl.program_id():
                    blocks.append((b, first, min(rows, shape[3] - first)))
                unit += 1
        if len(blocks) > 0:
            span = (number * group, min(columns, (number + 1) * group))
            _convolve(out, parts, weight, bias, padding, span, blocks, unroll)
    return out


def _convolve(out, parts, weight, bias, padding, span, blocks, unroll):
    """A span of output channels of some blocks of rows. The frames of a step are loaded during the one before."""
    stripes = _weights(weight, span, unroll)
    offset = _offset(bias, span, unroll)
    steps = []  # number of the block, first output frame, output frames
    for number in range(len(blocks)):
        for first in range(0, out.shape[2], unroll):
            steps.append((number, first, min(unroll, out.shape[2] - first)))
    window = []  # number of the block, input frame, its tiles
    for s in range(len(steps)):
        kept = []
        for ahead in range(s, min(s + 2, len(steps))):
            _extend(kept, window, steps[ahead], blocks, parts, weight, padding)
        window = kept
        results = _sums(window, steps[s], blocks, stripes, offset, weight, padding, unroll, out)
        _store(out, results, steps[s], blocks, span)


def _channel_tiles(weight):
    """(first channel, channels, copies) of tiles that hold channels on partitions, each copy moved by a column."""
    channels, wide = weight.shape[1], weight.shape[4]
    tiles = []
    for first in range(0, channels, P):
        count = min(P, channels - first)
        # Engines begin at every 32nd partition.
        tiles.append((first, count, min(wide, P // count) if count % 32 == 0 else 1))
    return tiles


def _weights(weight, span, unroll):
    """For each tile of channels the weights `[copies · channels, Kh, groups of columns, band · output channels]`.

    In the band, frame k of the kernel is at unroll + Kt − 2 − k. Input frame i of a step begins there at
    unroll + Kt − 2 − i, so that it meets output frame t with the weights of frame i − t.
    """
    _, _, depth, tall, wide = weight.shape
    count = span[1] - span[0]
    band = 2 * unroll + depth - 2
    stripes = []
    turn = 0
    for first, channels, copies in _channel_tiles(weight):
        groups = (wide + copies - 1) // copies
        stripe = nl.ndarray((copies * channels, tall, groups, band * count), weight.dtype, buffer=nl.sbuf)
        if unroll > 1:
            nisa.memset(stripe, 0.0)
        for o in range(span[0], span[1], P):
            height = min(P, span[1] - o)
            data = nl.ndarray((height, channels, depth * tall * wide), weight.dtype, buffer=nl.sbuf)
            nisa.dma_copy(data, weight[o : o + height, first : first + channels])
            for tap in range(depth * tall * wide):
                k, i, j = tap // (tall * wide), tap // wide % tall, tap % wide
                flipped = nl.ndarray((channels, height), weight.dtype, buffer=nl.psum)
                nisa.nc_transpose(flipped, data[:, :, tap], engine=nisa.engine.tensor)
                row = j % copies * channels
                column = (unroll + depth - 2 - k) * count + o - span[0]
                target = stripe[row : row + channels, i, j // copies, column : column + height]
                nisa.tensor_copy(target, flipped, engine=nisa.engine.scalar if turn % 3 == 2 else nisa.engine.vector)
                turn += 1
        stripes.append(stripe)
    return stripes


def _offset(bias, span, unroll):
    """The bias of a span of output channels, once for each of the frames of a matmul, on every partition."""
    count = span[1] - span[0]
    tile = nl.ndarray((P, unroll * count), "float32", buffer=nl.sbuf)
    for t in range(unroll):
        nisa.dma_copy(tile[:, t * count : (t + 1) * count], bias.ap([[0, P], [1, count]], offset=span[0]))
    return tile


def _extend(kept, window, step, blocks, parts, weight, padding):
    """Add what a step needs to `kept`: the input frames that `window` has, and others from HBM."""
    number, first, count = step
    for frame in range(max(0, first - padding[0]), first + count + weight.shape[2] - 1 - padding[0]):
        if len(_find(kept, number, frame)) == 0:
            tiles = _find(window, number, frame)
            if len(tiles) == 0:
                tiles = _load(parts, blocks[number], frame, weight, padding)
            kept.append((number, frame, tiles))


def _find(window, number, frame):
    """The tiles of a block's frame; none if the window lacks it."""
    for entry in window:
        if entry[0] == number and entry[1] == frame:
            return entry[2]
    return []


def _load(parts, block, frame, weight, padding):
    """The rows of a frame that a block reads, padded: for each tile of channels `[copies · channels, copies − 1 + F]`.

    F is rows · padded width. Copy c begins c elements earlier, so that what lies at the same place is c columns on.
    """
    b, first, rows = block
    source = parts[0]
    for part in parts:
        if 0 <= frame < part.shape[2]:
            source, index = part, frame
        frame -= part.shape[2]
    height, width = source.shape[3], source.shape[4]
    total, row = rows + weight.shape[3] - 1, width + 2 * padding[2]
    low, high = max(0, first - padding[1]), min(height, first - padding[1] + total)
    top = low - (first - padding[1])
    bottom = top + high - low
    tiles = []
    for channel, channels, copies in _channel_tiles(weight):
        tile = nl.ndarray((copies * channels, copies - 1 + total * row), source.dtype, buffer=nl.sbuf)
        data = source[b, channel : channel + channels, index, low:high]
        staged = tile
        if row > width:
            # From HBM in one run a partition: DMA takes as long for a row as for 2 KiB.
            staged = nl.ndarray((copies * channels, high - low, width), source.dtype, buffer=nl.sbuf)
        for c in range(copies):
            part = c * channels, (c + 1) * channels
            image = tile[part[0] : part[1], copies - 1 - c : copies - 1 - c + total * row]
            image = image.reshape((channels, total, row))
            if row > width:
                nisa.dma_copy(staged[part[0] : part[1]], data)
                inside = image[:, top:bottom, padding[2] : padding[2] + width]
                nisa.tensor_copy(inside, staged[part[0] : part[1]], engine=nisa.engine.gpsimd)
                nisa.memset(image[:, :, 0 : padding[2]], 0.0, engine=nisa.engine.gpsimd)
                nisa.memset(image[:, :, padding[2] + width : row], 0.0, engine=nisa.engine.gpsimd)
            else:
                nisa.dma_copy(image[:, top:bottom], data)
            if top > 0:
                nisa.memset(image[:, 0:top], 0.0, engine=nisa.engine.gpsimd)
            if bottom < total:
                nisa.memset(image[:, bottom:total], 0.0, engine=nisa.engine.gpsimd)
        tiles.append(tile)
    return tiles


def _sums(window, step, blocks, stripes, offset, weight, padding, unroll, out):
    """The step's output frames side by side: tiles `[≤ 128 of frames · output channels, rows · padded width]`."""
    number, first, count = step
    _, _, depth, tall, wide = weight.shape
    row, rows = out.shape[4] + wide - 1, blocks[number][2]
    columns = offset.shape[1] // unroll
    channel_tiles = _channel_tiles(weight)
    results = []
    for c in range(0, count * columns, P):
        results.append(nl.ndarray((min(P, count * columns - c), rows * row), out.dtype, buffer=nl.sbuf))
    waiting = []
    for position in range(0, (rows - 1) * row + out.shape[4], P):
        height = min(P, (rows - 1) * row + out.shape[4] - position)
        total = nl.ndarray((height, count * columns), "float32", buffer=nl.psum)
        begun = False
        for k in range(count + depth - 1):
            frame = first + k - padding[0]
            if frame >= 0:
                tiles = _find(window, number, frame)
                column = (unroll + depth - 2 - k) * columns
                for n in range(len(tiles)):
                    _, channels, copies = channel_tiles[n]
                    for i in range(tall):
                        for j in range(0, wide, copies):
                            partitions = channels * min(copies, wide - j)
                            at = copies - 1 + position + i * row + j
                            moving = stripes[n][0:partitions, i, j // copies, column : column + count * columns]
                            nisa.nc_matmul(total, tiles[n][0:partitions, at : at + height], moving, accumulate=begun)
                            begun = True
        values = nl.ndarray((height, count * columns), out.dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(values, total, offset[0:height, 0 : count * columns], nl.add)
        waiting.append((values, position))
        # TensorE goes on with the next positions while VectorE empties PSUM.
        if len(waiting) > 1:
            _turn(results, waiting.pop(0))
    _turn(results, waiting.pop(0))
    return results


def _turn(results, entry):
    """Positions with their channels into results, which have channels on partitions."""
    values, position = entry
    height = values.shape[0]
    for n in range(len(results)):
        channels = results[n].shape[0]
        flipped = nl.ndarray((channels, height), values.dtype, buffer=nl.psum)
        nisa.nc_transpose(flipped, values[:, n * P : n * P + channels], engine=nisa.engine.tensor)
        target = results[n][:, position : position + height]
        nisa.tensor_copy(target, flipped, engine=nisa.engine.scalar)


def _store(out, results, step, blocks, span):
    number, first, count = step
    b, row, rows = blocks[number]
    columns, width = span[1] - span[0], out.shape[4]
    for n in range(len(results)):
        image = results[n].reshape((results[n].shape[0], rows, results[n].shape[1] // rows))
        if image.shape[2] > width:
            # As one run a partition, as in `_load`.
            packed = nl.ndarray((image.shape[0], rows, width), out.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(packed, image[:, :, 0:width], engine=nisa.engine.gpsimd)
            image = packed
        for t in range(count):
            low, high = max(n * P, t * columns), min(n * P + image.shape[0], (t + 1) * columns)
            if low < high:
                channel = span[0] + low - t * columns
                target = out[b, channel : channel + high - low, first + t, row : row + rows]
                nisa.dma_copy(target, image[low - n * P : high - n * P])
