# SPDX-License-Identifier: Apache-2.0
"""Flash attention over keys that this rank holds whole."""

import nki
import nki.language as nl

from omni_neuron_kernels.nki_kernels import attention_layout as layout
from omni_neuron_kernels.nki_kernels import softmax_pipeline as pipeline

BLOCK_PIECES = 8  # queries on chip at a time: 4,096


@nki.jit
def flash_attention(q, k, v, scale, key_length, regimes, masks=(), biases=()):
    """softmax(scale · q kᵀ) v over the first `key_length` keys, float32 or bfloat16.

    Args:
        q: `[heads, S_q, d]`, d ≤ 511; it is contracted in chunks of 128.
        k: `[key heads, S_k, d]`; head h attends to key head h // (heads / key heads).
        v: shape as `k`.
        scale: factor of the scores, above zero.
        key_length: 1 to S_k.
        regimes: for each head "unshifted", "tile_shift" or "running_maximum"; see `softmax_pipeline`.
        masks: none, or one `[B, S_k]` of k's dtype, key heads a multiple of B: 1 for keys that take part, 0 for the
            others, whose values have to be finite and whose key has to be that of one that takes part.
        biases: one float32 `[heads, ⌈S_q / 512⌉]` if a head has a "tile_shift": minus the shift of each 512 queries.
    """
    heads, queries, d = q.shape
    out = nl.ndarray(q.shape, q.dtype, buffer=nl.shared_hbm)
    task = {
        "q": q, "k": k, "v": v, "out": out, "lse": (), "counts": (), "masks": masks, "biases": biases, "scale": scale,
        "chunks": layout.chunks_of(d), "pairs": (), "ones": layout.ones(k.dtype),
        "banks": layout.psum_banks(regimes),
    }  # fmt: skip
    share, pieces = heads // k.shape[0], []
    for head in range(heads):
        pieces += pipeline.pieces_of(head, queries, regimes[head])
    items, own = [], pipeline.own_share(pieces)
    for key_head in range(k.shape[0]):
        mine = []
        for piece in own:
            if piece["head"] // share == key_head:
                mine.append(piece)
        for first in range(0, len(mine), BLOCK_PIECES):
            sections = layout.sections_of(key_head, key_length, d, layout.itemsize(k))
            items += pipeline.items_of(mine[first : first + BLOCK_PIECES], sections, 0, True)
    pipeline.run_items(task, items, ())
    return out
