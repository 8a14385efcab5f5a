# SPDX-License-Identifier: Apache-2.0
"""Attention on tensors `[B, S, N, D]`: cases, what is exact, and the ring on the ranks of a simulated world."""

import importlib
import math

import torch
import torch.nn.functional as F

from omni_neuron_kernels import key_statistics, nki_attention
from omni_neuron_kernels.softmax_regimes import joined_statistics, unpacked_statistics
from omni_neuron_nkisim import run_spmd


def kernels(module):
    """Imported when a test runs: the simulator is `nki` from then on only."""
    return importlib.import_module(f"omni_neuron_kernels.nki_kernels.{module}")


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative_error(value, exact):
    return float((value.double() - exact).norm() / exact.norm())


def heads(queries, keys=None, batch=1, count=3, key_heads=None, dim=16, gain=1.0, dtype=torch.float32):
    keys, key_heads = keys or queries, key_heads or count
    q = random(batch, queries, count, dim, seed=1) * gain
    return q.to(dtype), *(random(batch, keys, key_heads, dim, dtype=dtype, seed=seed) for seed in (2, 3))


def exact(q, k, v, scale=None, mask=None):
    """Output and lse in float64, and each row's largest score; `mask` is of the keys `[B, S_k]`."""
    share = q.shape[2] // k.shape[2]
    queries, keys, values = (
        tensor.double().transpose(1, 2) for tensor in (q, k.repeat_interleave(share, 2), v.repeat_interleave(share, 2))
    )
    scores = queries @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores, values = (
            scores.masked_fill(~mask[:, None, None], -math.inf),
            values.masked_fill(~mask[:, None, :, None], 0),
        )
    return (scores.softmax(-1) @ values).transpose(1, 2), scores.logsumexp(-1), scores.amax(-1)


def torchs(q, k, v, mask=None):
    """What torch makes of the same inputs in their own dtype."""
    given = None if mask is None else mask[:, None, None]
    share = q.shape[2] // k.shape[2]
    tensors = (q, k.repeat_interleave(share, 2), v.repeat_interleave(share, 2))
    return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in tensors), attn_mask=given).transpose(1, 2)


def check(output, q, k, v, mask=None):
    """float32 within 1e-5 relative L2, bfloat16 within 1.25 × of torch's bfloat16 error, and no row lost."""
    expected = exact(q, k, v, mask=mask)[0]
    assert output.dtype == q.dtype and output.shape == q.shape
    limit = 1e-5 if q.dtype == torch.float32 else 1.25 * relative_error(torchs(q, k, v, mask), expected)
    assert relative_error(output, expected) <= limit
    assert bool((output.double().norm(dim=-1) > 0.5 * expected.norm(dim=-1)).all())


def outlier(gap, length=48, dim=16, dtype=torch.float32):
    """Head 1 of 3: one key orthogonal to every query, so long that the bound exceeds each row's maximum by `gap`."""
    q, k, v = heads(length, dim=dim)
    q[:, :, 1, 0] = 0
    q[:, :, 1] *= math.sqrt(dim) / q[:, :, 1].norm(dim=-1, keepdim=True)
    k[:, 37, 1] = 0
    # scale · ‖q‖ = 1 in that head, so its bound is the norm of this key.
    k[:, 37, 1, 0] = gap + exact(q, k, v)[2][:, 1].max()
    return q.to(dtype), k.to(dtype), v.to(dtype)


def learned_gains(gain, queries, keys, dim=128, count=2, dtype=torch.float32):
    """α·β as after QK norm with learned gains: rows of norm √D times √gain each."""
    q, k, v = (
        random(1, queries, count, dim, seed=1),
        random(1, keys, count, dim, seed=2),
        random(1, keys, count, dim, seed=3),
    )
    q, k = (F.normalize(tensor, dim=-1) * math.sqrt(dim * gain) for tensor in (q, k))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def split(tensor, ranks, pad):
    """Equal shards along dim 1, the last ones filled up."""
    rows = -(-tensor.shape[1] // ranks) * ranks
    return F.pad(tensor, (0, 0, 0, 0, 0, rows - tensor.shape[1]), value=pad).chunk(ranks, 1)


class InTurn:
    """The ranks of a group, asked one after the other and twice: the second time each gets what all of them gave."""

    def __init__(self, size):
        self.size, self.given = size, []

    def all_gather(self, tensor, dim):
        if len(self.given) < self.size:
            self.given.append(tensor)
            return tensor
        return torch.cat(self.given, dim)


def ring(q, k, v, ranks, lnc=1, groups=None, key_length=None, key_mask=None, depth=1, shard=None, regime=None):
    """Whole tensors through `ring_attention` on `ranks` ranks: output, lse, lost rows, and each rank's regimes.

    Pads of keys and values hold NaN. `groups` names another world than the ranks in order: every group of it computes
    the same. `shard` is the number of keys a rank has, if that is more than it needs. `regime` is forced on all heads.
    """
    groups = groups or [list(range(ranks))]
    length, scale = k.shape[1] if key_length is None else key_length, q.shape[-1] ** -0.5
    if shard:
        k, v = (F.pad(t, (0, 0, 0, 0, 0, ranks * shard - t.shape[1]), value=math.nan) for t in (k, v))
    masks = split(key_mask[..., None, None].float(), ranks, 0.0) if key_mask is not None else None
    shards = list(zip(split(q, ranks, 0.0), split(k, ranks, math.nan), split(v, ranks, math.nan), strict=True))
    local = [
        nki_attention.ring_mask(keys, rank, ranks, length, None if masks is None else masks[rank][..., 0, 0].bool())
        for rank, (_, keys, _) in enumerate(shards)
    ]
    parts = [key_statistics(shards[rank][1], shards[rank][2], local[rank]).packed() for rank in range(ranks)]
    statistics = joined_statistics([unpacked_statistics(packed) for packed in parts])
    group = InTurn(ranks)
    for _ in range(2):
        prepared = [
            nki_attention.prepared(*shards[rank], local[rank], statistics, scale, group) for rank in range(ranks)
        ]
    world = {}
    for group in groups:
        for place, rank in enumerate(group):
            given = prepared[place]
            regimes = (regime,) * len(given.regimes) if regime else given.regimes
            arguments = (*given.tensors, scale, regimes, tuple(map(tuple, groups)), depth, True)
            world[rank] = (*arguments, given.masks, given.biases)
    results = run_spmd(kernels("ring_attention").ring_attention, [world[n] for n in range(len(world))], lnc=lnc)
    wholes = []
    for group in groups:
        output = torch.cat([results[rank][0].unflatten(0, (q.shape[0], -1)) for rank in group], 2)[:, :, : q.shape[1]]
        lse = torch.cat([results[rank][1].unflatten(0, (q.shape[0], -1)) for rank in group], 2)[:, :, : q.shape[1]]
        wholes.append((output.transpose(1, 2), lse))
    for output, _ in wholes:
        torch.testing.assert_close(output, wholes[0][0], rtol=0, atol=0, equal_nan=True)
    lost = sum(int(result[2].sum()) for result in results)
    return *wholes[0], lost, [given.regimes for given in prepared]


def check_ring(q, k, v, ranks, mask=None, **options):
    """`check`, the same of lse, and that no row is lost; returns each rank's regimes."""
    output, lse, lost, regimes = ring(q, k, v, ranks, **options)
    check(output, q, k, v, mask)
    # Of scores up to the hundreds, and in bfloat16 of weights that are rounded to it.
    tolerance = 1e-3 if q.dtype == torch.float32 else 5e-3
    assert float((lse - exact(q, k, v, mask=mask)[1]).abs().max()) <= tolerance
    assert lost == 0
    return regimes
