# SPDX-License-Identifier: Apache-2.0
"""Which heads of an attention may leave the row maximum out of their softmax: proven from norms, whatever the data."""

from __future__ import annotations

import math

import torch

_LOG_OVERFLOW = 128 * math.log(2)  # 2^128 is the first number too large for float32 and bfloat16
_LOG_LOSS = (126 - 24 - 1) * math.log(2)  # 2^-126 raised by the bits of float32 and one for flushed sums
_MARGIN = 1.0  # rounding of exp and of sums
_ROUNDING = 1 + 2.0**-10  # of norms and scores


def bounded_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, key_length: int) -> torch.Tensor:
    """Which heads compute Σ exp(s)·v / Σ exp(s) safely without any shift.

    Cauchy–Schwarz: |s_ij| ≤ |scale| · max‖q‖ · max‖k‖ =: b, so every exp(s) lies in [e^-b, e^b]. With n keys and
    V = max|v| nothing overflows if b + ln n + max(0, ln V) < 128 ln 2 − 1; and what falls below 2^-126, a numerator's
    terms included, is less than float32's rounding of a result of size V if b ≤ 101 ln 2 + min(0, ln V).
    `omni_neuron_parallel.softmax_bound` has the derivation.

    Args:
        q: `[B, S_q, N, D]`.
        k: `[B, S_k, N_k, D]`, N a multiple of N_k.
        v: shape as `k`.
        scale: factor of the scores.
        key_length: the number of valid keys.

    Returns:
        Bool `[B, N]`. A norm that is infinite or not a number is not safe.
    """
    share = q.shape[2] // k.shape[2]
    keys, values = k[:, :key_length], v[:, :key_length]
    # A component below 2^-63 has a square that may be flushed to zero; D such components have a norm below √D · 2^-63.
    least = math.sqrt(q.shape[3]) * 2.0**-63
    q_norm = torch.linalg.vector_norm(q.float(), dim=-1).amax(1) + least
    k_norm = torch.linalg.vector_norm(keys.float(), dim=-1).amax(1) + least
    log_v = values.abs().amax(dim=(1, 3)).float().log().repeat_interleave(share, 1)
    bound = abs(scale) * q_norm * k_norm.repeat_interleave(share, 1) * _ROUNDING
    no_overflow = bound + math.log(key_length) + log_v.clamp_min(0) < _LOG_OVERFLOW - _MARGIN
    return no_overflow & (bound - log_v.clamp_max(0) < _LOG_LOSS)
