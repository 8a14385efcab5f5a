# SPDX-License-Identifier: Apache-2.0
"""How each head's softmax is kept inside float32, proven from norms and one mean, whatever the data.

With s_ij = scale · q_i·k_j, n keys, V = max|v| and a shift c, softmax is Σ exp(s − c)·v / Σ exp(s − c). It needs that:

1. Nothing overflows. Σ exp(s − c) ≤ n·e^(U − c), where U is an upper bound of the row's scores, and Σ exp(s − c)·|v| is
   at most V times that. Both stay below 2^128 if U − c + ln n + max(0, ln V) < 128·ln 2 − 1 = 87.7; the one nat is for
   rounding.
2. Nothing is lost below 2^-126, even where subnormal numbers are flushed to zero. A weight that is flushed errs by at
   most 2^-126, which its value multiplies by up to V; a product and a partial sum err by at most 2^-126 each. Over n
   keys that is n·2^-126·(V + 2) in the numerator and n·2^-126·2 in the denominator, together at most
   n·2^-126·(3V + 2) / Σ exp(s − c) in the result. With Σ exp(s − c) ≥ n·e^(L − c) that is below the rounding 2^-24·V of
   a result of size V if e^(c − L) ≤ 2^102·V / (3V + 2); since V / (3V + 2) ≥ min(1, V) / 5, it is enough that
   c − L < 102·ln 2 − ln 5 + min(0, ln V) = 69.1 + min(0, ln V).

Under both no row is zero that should not be, and partial results with one shift merge by addition.

The bounds. Let m be the mean of the n keys, over every rank. Adding a vector to every key adds one number to a row's
scores, which no softmax sees, so keys may be taken as centred: with μ_i = scale · q_i·m,
s_ij = μ_i + scale · q_i·(k_j − m).

- Above (Cauchy–Schwarz): s_ij ≤ μ_i + |scale|·‖q_i‖·max‖k_j − m‖, and s_ij ≤ |scale|·‖q_i‖·max‖k_j‖.
- Below (Jensen): Σ_j exp(s_ij) ≥ n·exp(mean_j s_ij) = n·e^μ_i. This is what centring gains: without it nothing better
  is known than −|scale|·‖q_i‖·max‖k_j‖.

The keys themselves stay as they are: k − m rounded to bfloat16 would cost accuracy where it is needed most, and μ_i
need not be zero, it only has to lie in range of the shift. That is c = 0 ("unshifted"), or else one c for each 512
queries ("tile_shift"), which ScalarE adds to the scores for nothing; a shift of each row would lie along the free axis
and cost a pass of VectorE. For values around 1 and keys centred as they are, |scale|·‖q‖·max‖k‖ may reach 156.8 − ln n
with a shift (146 for 32,760 keys), 87.7 − ln n (77) without one, and 69 were nothing known of the mean. Heads beyond,
or whose μ_i differ too much within 512 queries, keep a running maximum.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from omni_neuron_kernels.reference_attention import RingGroup

Regime = Literal["unshifted", "tile_shift", "running_maximum"]
_REGIMES: tuple[Regime, ...] = ("unshifted", "tile_shift", "running_maximum")  # each valid where one before it is

QUERY_TILE = 512  # queries that share a shift, in order

# 2^128 is the first number too large for float32 and bfloat16; one nat for the rounding of exp and of sums.
_LOG_OVERFLOW = 128 * math.log(2) - 1
# float32: 2^-126 is the smallest normal number, below which flushing begins.
_LOG_LOSS = 102 * math.log(2) - math.log(5)
# 2^-126 raised by 24 bits of precision, and by one bit for flushing both products and partial sums.
_LOG_LOSS_OF_BOUND = (126 - 24 - 1) * math.log(2)
# Norms, means and scores are themselves rounded: (D + 2) · 2^-24 each, far below this for any head dim up to 4096.
_ROUNDING = 2.0**-10


def bounded_softmax_is_safe(
    q_norm_max: torch.Tensor,
    k_norm_max: torch.Tensor,
    scale: float,
    num_keys: int,
    v_abs_max: torch.Tensor,
) -> torch.Tensor:
    """Is softmax without any shift, Σ exp(s)·v / Σ exp(s) in float32, as good as with the row maximum subtracted?

    The proof from norms alone, without a mean. With s_ij = scale · q_i·k_j, Cauchy–Schwarz bounds every score on both
    sides,

        |s_ij| ≤ |scale| · ‖q_i‖ · ‖k_j‖ ≤ |scale| · max‖q‖ · max‖k‖ =: b,

    hence exp(s_ij) lies in [e^-b, e^b] whatever the data. Let n be the number of keys and V = max|v|. It is safe iff

    1. nothing overflows: Σ exp(s) ≤ n·e^b and Σ exp(s)·|v| ≤ n·e^b·V stay below 2^128, that is
       b + ln n + max(0, ln V) < 128·ln 2 − margin = 87.7;
    2. nothing is lost below 2^-126, even where subnormal numbers are flushed to zero. The denominator is at least
       n·e^-b; each of n products exp(s)·v, and each partial sum, errs by at most 2^-126; together the result errs by at
       most 2n·2^-126 / (n·e^-b) = 2^-125·e^b. That is below the rounding 2^-24·V of a result of size V iff
       b ≤ 101·ln 2 + ln V = 70.0 + ln V. For V > 1 the term ln V is dropped, so that exp(s) itself is never flushed.

    Under 1 and 2 no row is zero that should not be, and partial results of several key blocks merge by addition: their
    shift, zero, is the same. The rounding of s, about 2^-24·b, enters exp the same way with and without a shift.

    Subtracting the bound itself, c = b, puts the exponents in [−2b, 0]: overflow is impossible, but e^-2b has to stay
    above 2^-126, so safety needs 2b < 87.3 − margin: half the range, and rows vanish silently beyond it (in the worst
    case; where b − max_j s_ij passes about 85, in every case). This is why the fast path takes no such shift.

    Args:
        q_norm_max: `[N]`, the largest L2 norm of a query of each head; float32.
        k_norm_max: `[N]`, the same of the keys, over every block that takes part.
        scale: factor of the scores.
        num_keys: the number of keys, over every block.
        v_abs_max: `[N]`, the largest magnitude of a value element of each head, over every block.

    Returns:
        Bool `[N]`. A norm that is infinite or not a number is not safe.
    """
    bound = abs(scale) * q_norm_max * k_norm_max * (1 + _ROUNDING)
    log_v = v_abs_max.log()
    no_overflow = bound + math.log(num_keys) + log_v.clamp_min(0) < _LOG_OVERFLOW
    no_loss = bound - log_v.clamp_max(0) < _LOG_LOSS_OF_BOUND
    return no_overflow & no_loss


def head_norm_max(tensor: torch.Tensor) -> torch.Tensor:
    """The largest L2 norm of a row of each head: `[B, S, N, D]` to float32 `[N]`, zero where S is zero."""
    if tensor.shape[0] * tensor.shape[1] == 0:
        return torch.zeros(tensor.shape[2], device=tensor.device)
    return _norms(tensor).amax(dim=(0, 1))


def head_abs_max(tensor: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of an element of each head: `[B, S, N, D]` to float32 `[N]`, zero where S is zero."""
    if tensor.shape[0] * tensor.shape[1] == 0:
        return torch.zeros(tensor.shape[2], device=tensor.device)
    return tensor.abs().amax(dim=(0, 1, 3)).float()


def _norms(tensor: torch.Tensor) -> torch.Tensor:
    """L2 norms over the last dim, at least as large as they are."""
    # A component below 2^-63 has a square that may be flushed to zero; D such components have a norm below √D · 2^-63.
    return torch.linalg.vector_norm(tensor.float(), dim=-1) + math.sqrt(tensor.shape[-1]) * 2.0**-63


class KeyStatistics(NamedTuple):
    """What the proofs need to know of the keys that take part, of one rank or of all; float32.

    Attributes:
        number: `[B]`, how many they are.
        mean: `[B, N_k, D]`; zero without keys, as the rest.
        radius: `[B, N_k]`, the largest distance of one from the mean.
        norm: `[B, N_k]`, the largest norm.
        value: `[B, N_k]`, the largest magnitude of an element of their values.
        example: `[B, N_k, D]`, one of them, unrounded.
    """

    number: torch.Tensor
    mean: torch.Tensor
    radius: torch.Tensor
    norm: torch.Tensor
    value: torch.Tensor
    example: torch.Tensor

    def packed(self) -> torch.Tensor:
        """As one tensor `[B, N_k, 2·D + 4]`, for one collective."""
        numbers = torch.stack([self.number[:, None].expand_as(self.norm), self.radius, self.norm, self.value], dim=-1)
        return torch.cat([numbers, self.mean, self.example], dim=-1)


def unpacked_statistics(packed: torch.Tensor) -> KeyStatistics:
    """What `KeyStatistics.packed` was made of."""
    count, radius, norm, value = packed[..., :4].unbind(-1)
    mean, example = packed[..., 4:].chunk(2, dim=-1)
    return KeyStatistics(count[:, 0], mean, radius, norm, value, example)


def key_statistics(k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> KeyStatistics:
    """Statistics of keys and values `[B, S_k, N_k, D]`; `mask`, bool `[B, S_k]`, is true for those that take part."""
    batch, rows = k.shape[:2]
    if mask is None:
        mask = torch.ones(batch, rows, dtype=torch.bool, device=k.device)
    count, chosen = mask.sum(1), mask[:, :, None, None]
    keys = torch.where(chosen, k, 0).float()
    # Zeros stand for the masked ones in every maximum.
    mean = keys.sum(1) / count.clamp_min(1)[:, None, None]
    radius = torch.where(mask[:, :, None], _norms(keys - mean[:, None]), 0).amax(1)
    norm = torch.where(mask[:, :, None], _norms(keys), 0).amax(1)
    value = torch.where(chosen, v, 0).abs().amax(dim=(1, 3)).float()
    example = keys.gather(1, mask.int().argmax(1)[:, None, None, None].expand(-1, 1, *keys.shape[2:]))[:, 0]
    return KeyStatistics(count.float(), mean, radius, norm, value, example)


def joined_statistics(parts: list[KeyStatistics]) -> KeyStatistics:
    """Statistics of all keys together; the radius is an upper bound, by the triangle inequality."""
    counts = torch.stack([part.number for part in parts])
    total = counts.sum(0)
    shares = (counts / total.clamp_min(1))[:, :, None, None]
    mean = (shares * torch.stack([part.mean for part in parts])).sum(0)
    reach = torch.stack([part.radius + _norms(part.mean - mean) for part in parts])
    radius = torch.where(counts[:, :, None] > 0, reach, 0).amax(0)
    first = (counts > 0).int().argmax(0)[None, :, None, None]
    examples = torch.stack([part.example for part in parts])
    example = examples.gather(0, first.expand(1, *examples.shape[1:]))[0]
    norm, value = (torch.stack([part[n] for part in parts]).amax(0) for n in (3, 4))
    return KeyStatistics(total, mean, radius, norm, value, example)


def softmax_regimes(
    q: torch.Tensor, statistics: KeyStatistics, *, scale: float, group: RingGroup | None = None
) -> tuple[tuple[tuple[Regime, ...], ...], torch.Tensor]:
    """The regime of each head's softmax, by the proofs of this module. Waits for the device.

    Args:
        q: `[B, S_q, N, D]`, this rank's queries.
        statistics: of the keys of every rank; N is a multiple of their N_k, in order.
        scale: factor of the scores.
        group: ranks that run one program on queries of one shape, and all call this. A head then takes the way of the
            rank that needs most; what a rank's own queries prove about its shifts holds under it as well.

    Returns:
        For each batch element and head its regime, and float32 `[B, N, ⌈S_q / 512⌉]`: the shift of each 512 queries,
        zero unless this rank's own queries need one. Norms that are infinite or not a number end in "running_maximum".
    """
    share = q.shape[2] // statistics.norm.shape[1]
    mean, radius, norm, value = (tensor.repeat_interleave(share, 1) for tensor in statistics[1:5])
    length = abs(scale) * _norms(q)
    means = scale * torch.einsum("bsnd,bnd->bsn", q.float(), mean)
    direct = length * norm[:, None]
    upper = torch.minimum(means + length * radius[:, None], direct) + direct * _ROUNDING
    lower = torch.maximum(means, -direct) - direct * _ROUNDING
    log_v = value.log()[..., None]
    least = _tiles(upper, -math.inf).amax(-1) + statistics.number.log()[:, None, None] + log_v.clamp_min(0)
    least = least - _LOG_OVERFLOW
    most = _tiles(lower, math.inf).amin(-1) + log_v.clamp_max(0) + _LOG_LOSS
    unshifted = ((least < 0) & (most > 0)).all(-1)
    tile_shift = (least < most).all(-1) & ~unshifted
    shifts = torch.where(tile_shift[..., None], (least + most) / 2, 0)
    codes = torch.where(unshifted, 0, torch.where(tile_shift, 1, 2))
    if group is not None and group.size > 1:
        codes = group.all_gather(codes[None], dim=0).amax(0)
    return tuple(tuple(_REGIMES[code] for code in heads) for heads in codes.tolist()), shifts


def _tiles(rows: torch.Tensor, pad: float) -> torch.Tensor:
    """`[B, S_q, N]` to `[B, N, tiles, 512]`."""
    padded = F.pad(rows.transpose(1, 2), (0, -rows.shape[1] % QUERY_TILE), value=pad)
    return padded.unflatten(-1, (-1, QUERY_TILE))
