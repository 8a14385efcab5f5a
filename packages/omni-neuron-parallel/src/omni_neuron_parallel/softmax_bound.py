# SPDX-License-Identifier: Apache-2.0
"""When may attention leave the row maximum out of its softmax? Proven from norms, per head."""

from __future__ import annotations

import math

import torch

# float32: 2^128 is the first number too large, 2^-126 the smallest normal one (what is below may be flushed to zero).
_LOG_OVERFLOW = 128 * math.log(2)
# 2^-126 raised by 24 bits of precision, and by one bit for flushing both products and partial sums: see the docstring.
_LOG_LOSS = (126 - 24 - 1) * math.log(2)
# One nat for the rounding of a sum of up to 10^7 terms and of exp.
_MARGIN = 1.0
# Norms and scores are themselves rounded: (D + 2) · 2^-24 each, far below this for any head dim up to 4096.
_ROUNDING = 1 + 2.0**-10


def bounded_softmax_is_safe(
    q_norm_max: torch.Tensor,
    k_norm_max: torch.Tensor,
    scale: float,
    num_keys: int,
    v_abs_max: torch.Tensor,
) -> torch.Tensor:
    """Is softmax without any shift, Σ exp(s)·v / Σ exp(s) in float32, as good as with the row maximum subtracted?

    With s_ij = scale · q_i·k_j, Cauchy–Schwarz bounds every score on both sides,

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
    case; where b − max_j s_ij passes about 85, in every case). This is why the fast path here takes no shift.

    Args:
        q_norm_max: `[N]`, the largest L2 norm of a query of each head; float32.
        k_norm_max: `[N]`, the same of the keys, over every block that takes part.
        scale: factor of the scores.
        num_keys: the number of keys, over every block.
        v_abs_max: `[N]`, the largest magnitude of a value element of each head, over every block.

    Returns:
        Bool `[N]`. A norm that is infinite or not a number is not safe.
    """
    bound = abs(scale) * q_norm_max * k_norm_max * _ROUNDING
    log_v = v_abs_max.log()
    no_overflow = bound + math.log(num_keys) + log_v.clamp_min(0) < _LOG_OVERFLOW - _MARGIN
    no_loss = bound - log_v.clamp_max(0) < _LOG_LOSS
    return no_overflow & no_loss


def head_norm_max(tensor: torch.Tensor) -> torch.Tensor:
    """The largest L2 norm of a row of each head: `[B, S, N, D]` to float32 `[N]`, zero where S is zero."""
    batch, rows, heads, dim = tensor.shape
    if batch * rows == 0:
        return torch.zeros(heads, device=tensor.device)
    # A component below 2^-63 has a square that may be flushed to zero; D such components have a norm below √D · 2^-63.
    return torch.linalg.vector_norm(tensor.float(), dim=-1).amax(dim=(0, 1)) + math.sqrt(dim) * 2.0**-63


def head_abs_max(tensor: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of an element of each head: `[B, S, N, D]` to float32 `[N]`, zero where S is zero."""
    if tensor.shape[0] * tensor.shape[1] == 0:
        return torch.zeros(tensor.shape[2], device=tensor.device)
    return tensor.abs().amax(dim=(0, 1, 3)).float()
