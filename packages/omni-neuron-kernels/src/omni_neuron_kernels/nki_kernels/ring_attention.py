# SPDX-License-Identifier: Apache-2.0
"""Attention over keys that are split over ranks, whose blocks travel round a ring while others are computed.

Every rank runs the same program: which block a rank holds is a matter of data. Blocks travel with their keys
transposed and their values widened, so only the first step transposes anything, and with their mask, so pads need no
lengths, and a block of nothing but pads adds zero. Such a block is computed all the same: ranks wait for each other
anyway.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from omni_neuron_kernels.nki_kernels import attention_layout as layout
from omni_neuron_kernels.nki_kernels import softmax_pipeline as pipeline

CHUNK_BYTES = 96 * 1024  # per partition, of the queries and sums of the heads that are on chip for a whole ring


@nki.jit
def ring_attention(q, k, v, scale, regimes, replica_groups, kv_prefetch_depth, with_lse, masks=(), biases=()):
    """softmax(scale · q kᵀ) v over the keys of every rank of this rank's group, float32 or bfloat16.

    Of the heads that fit on chip at a time a ring takes n − 1 hops through `kv_prefetch_depth` + 1 buffers in HBM; the
    hop that brings the block of step s + depth is started before step s is computed.

    Args:
        q: `[heads, S_q, d]`, d ≤ 128.
        k: `[key heads, S_local, d]`; head h attends to key head h // (heads / key heads).
        v: shape as `k`.
        scale: factor of the scores, above zero.
        regimes: as in `flash_attention`, the same on every rank of the group.
        replica_groups: groups of one size, each of global ranks in the order of its ring; the program is that of all.
        kv_prefetch_depth: blocks that are on their way while one is computed, from 1.
        with_lse: also return log-sum-exp.
        masks: as in `flash_attention`, of this rank's keys; on every rank or on none.
        biases: as in `flash_attention`, of this rank's queries.

    Returns:
        Output, shape and dtype of `q`; float32 `[heads, S_q]`, log Σ exp(scale · s), if `with_lse`; int32 `[cores,
        128]`, whose sum is the number of rows whose sum of exponentials is zero, infinite or not a number.
    """
    heads, queries, d = q.shape
    key_heads, keys, _ = k.shape
    ranks, cores = len(replica_groups[0]), nl.num_programs()
    out = nl.ndarray(q.shape, q.dtype, buffer=nl.shared_hbm)
    lse = (nl.ndarray((heads, queries), "float32", buffer=nl.shared_hbm),) if with_lse else ()
    lost = nl.ndarray((cores, layout.P), "int32", buffer=nl.shared_hbm)
    count = nl.ndarray((layout.P, 1), "float32", buffer=nl.sbuf)
    nisa.memset(count, 0.0)
    task = {
        "q": q, "k": k, "v": v, "out": out, "lse": lse, "counts": (count,), "masks": masks, "biases": biases,
        "scale": scale, "chunks": layout.chunks_of(d), "ones": layout.ones(k.dtype),
        "banks": layout.psum_banks(regimes),
        "pairs": _pairs(replica_groups),
    }  # fmt: skip
    step_heads = _heads_at_once(q, k)
    chunks, buffers = [], []
    for first in range(0, key_heads, step_heads):
        chunks.append((first, min(key_heads, first + step_heads)))
        own = []
        for _ in range(min(ranks, kv_prefetch_depth + 1)):
            shape = (chunks[-1][1] - first, layout.packed_size(keys, d))
            own.append(nl.ndarray(shape, k.dtype, buffer=nl.shared_hbm))
        buffers.append(own)
    _pack(task, chunks, buffers)
    items, transfers = _plan(task, regimes, chunks, buffers, ranks, kv_prefetch_depth)
    pipeline.run_items(task, items, transfers)
    nisa.dma_copy(lost.ap([[1, layout.P], [1, 1]], offset=nl.program_id() * layout.P), count)
    if with_lse:
        return out, lse[0], lost
    return out, lost


def _pairs(replica_groups):
    pairs = []
    for group in replica_groups:
        for n in range(len(group)):
            pairs.append((group[n], group[(n + 1) % len(group)]))
    return pairs


def _heads_at_once(q, k):
    """Key heads whose queries and sums fit CHUNK_BYTES on each core."""
    heads, queries, d = q.shape
    tiles = layout.tiles_of(queries) * (heads // k.shape[0])
    needed = tiles * (4 * (d + 1) + layout.P * layout.itemsize(q))
    return max(1, CHUNK_BYTES * nl.num_programs() // needed)


def _pack(task, chunks, buffers):
    """Every key head's own block into the first buffer of its chunk, each section by one of the cores."""
    k, sections, own = task["k"], [], []
    for c in range(len(chunks)):
        for head in range(chunks[c][0], chunks[c][1]):
            for section in layout.sections_of(head, k.shape[1], k.shape[2], layout.itemsize(k)):
                section["slot"], section["home"] = head - chunks[c][0], buffers[c][0]
                sections.append(section)
    for n in range(nl.program_id(), len(sections), nl.num_programs()):
        own.append(sections[n])
    for n in range(len(own)):
        # The next one is on its way while this one is transposed.
        for ahead in range(n, min(n + 2, len(own))):
            if not own[ahead]["fetched"]:
                own[ahead]["fetched"] = True
                layout.fetch_section(task, own[ahead])
        layout.turn_section(task, own[n])
        layout.store_section(task, own[n], own[n].pop("home"))
        own[n].pop("keys")
        own[n].pop("values")
    if nl.num_programs() == 2:
        for chunk_buffers in buffers:
            nisa.core_barrier(chunk_buffers[0], (0, 1))


def _plan(task, regimes, chunks, buffers, ranks, depth):
    """Items in order, chunk by chunk and step by step, and the transfers between them."""
    q, k = task["q"], task["k"]
    share, size = q.shape[0] // k.shape[0], layout.itemsize(k)
    items, transfers, here = [], [], []  # here: for each chunk and step, the transfers after which its block is there
    for _ in range(len(chunks)):
        here.append([0])
    for c in range(len(chunks)):
        pieces = []
        for head in range(chunks[c][0] * share, chunks[c][1] * share):
            pieces += pipeline.pieces_of(head, q.shape[1], regimes[head])
        pieces = pipeline.own_share(pieces)
        for step in range(ranks):
            if c == 0 or step > 0:
                _start_hops(transfers, here[c], buffers[c], len(items), _hops(step, ranks, depth))
            if step == ranks - 1 and c + 1 < len(chunks):
                # The first hops of a ring travel during the last step of the ring before.
                _start_hops(transfers, here[c + 1], buffers[c + 1], len(items), _hops(0, ranks, depth))
            for key_head in range(chunks[c][0], chunks[c][1]):
                mine = []
                for piece in pieces:
                    if piece["head"] // share == key_head:
                        mine.append(piece)
                sections = layout.sections_of(key_head, k.shape[1], k.shape[2], size)
                for section in sections:
                    section["packed"] = (buffers[c][step % len(buffers[c])],)
                    section["slot"] = key_head - chunks[c][0]
                items += pipeline.items_of(mine, sections, here[c][step], step == ranks - 1)
    return items, transfers


def _hops(step, ranks, depth):
    """The hops that start before a step; hop n brings the block of step n."""
    if step == 0:
        return range(1, min(depth, ranks - 1) + 1)
    return range(step + depth, min(step + depth + 1, ranks))


def _start_hops(transfers, here, buffers, position, hops):
    for hop in hops:
        transfers.append((position, buffers[(hop - 1) % len(buffers)], buffers[hop % len(buffers)]))
        here.append(len(transfers))
