# SPDX-License-Identifier: Apache-2.0
"""Exact attention over a sequence whose queries, keys and values are split over context parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args, overload

import torch

from omni_neuron_kernels import (
    bounded_softmax_is_safe,
    explain,
    flash_attention,
    head_abs_max,
    head_norm_max,
    log_sum_exp,
    ring_attention,
    ring_refusal,
)
from omni_neuron_parallel.groups import AxisGroup, get_partition
from omni_neuron_parallel.softmax_sums import HeadSums

ContextMethod = Literal["auto", "gather", "ring"]
KeysValues = tuple[torch.Tensor, torch.Tensor]


@dataclass
class ContextAttentionStats:
    """What the calls that were given this object did on this rank; the numbers add up over calls.

    Attributes:
        rows: query rows computed, each head and batch element counted.
        clamped_rows: rows whose softmax denominator was zero or not finite although they had a valid key. Zero by
            construction wherever scores are finite in float32; else the input holds infinities, NaN, or norms as large.
        blocks: key blocks computed; a block without a valid key is not, except in the ring of a kernel.
        bounded_heads: heads that took the bounded softmax, proven safe; the others took the running maximum. The ring
            of a kernel does not tell.
    """

    rows: int = 0
    clamped_rows: int = 0
    blocks: int = 0
    bounded_heads: int = 0


class _Joint(NamedTuple):
    """Keys and values that every rank holds, and bool `[B, S_joint]` of those that take part; None: all."""

    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None


@overload
def context_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: AxisGroup,
    scale: float | None = ...,
    kv_length: int | None = ...,
    method: ContextMethod = ...,
    return_lse: Literal[False] = False,
    joint_kv: KeysValues | None = ...,
    key_mask: torch.Tensor | None = ...,
    joint_mask: torch.Tensor | None = ...,
    stats: ContextAttentionStats | None = ...,
) -> torch.Tensor: ...


@overload
def context_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: AxisGroup,
    scale: float | None = ...,
    kv_length: int | None = ...,
    method: ContextMethod = ...,
    return_lse: Literal[True],
    joint_kv: KeysValues | None = ...,
    key_mask: torch.Tensor | None = ...,
    joint_mask: torch.Tensor | None = ...,
    stats: ContextAttentionStats | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def context_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: AxisGroup,
    scale: float | None = None,
    kv_length: int | None = None,
    method: ContextMethod = "auto",
    return_lse: bool = False,
    joint_kv: KeysValues | None = None,
    key_mask: torch.Tensor | None = None,
    joint_mask: torch.Tensor | None = None,
    stats: ContextAttentionStats | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale · q kᵀ) v of this rank's queries over the keys of every rank. Collective over `group`.

    "gather" joins K and V in one stacked all-gather and calls `omni_neuron_kernels.flash_attention`, which without a
    Neuron device is torch's attention: one collective, K and V of the whole sequence on every rank. "ring" keeps K and
    V in shards and passes them on, one rotation a step, each started before the block at hand is computed; two shards
    are held at a time. Both are exact, and torch.compile traces both into one graph. In the ring the heads that
    `bounded_softmax_is_safe` proves safe add up unshifted exponentials, the others keep a running maximum; that proof
    costs one all-gather of two numbers a head. It decides by data, which one graph cannot: compiled, every head keeps
    the running maximum, and nothing is gathered for the proof.

    A kernel library may have a ring of its own, in one kernel: `omni_neuron_kernels.explain("ring_attention", …)` says
    whether one takes the arguments, in compiled code `ring_refusal`. It then runs instead of torch's ring, and is what
    "auto" chooses in eager code; compiled, "auto" gathers. Not with `joint_kv`, and in compiled code not with
    `return_lse`. Torch's own ring is compiled for the host only: its rotation is no operation of a device's compiler.

    Args:
        q: `[B, S_q, N, D]`, this rank's queries; S_q is free, so queries that every rank holds may be among them. As
            many on every rank where a kernel may run the ring: each rank asks for itself whether it takes so many.
        k: `[B, S_local, N, D]`, this rank's keys: rows [rank · S_local, (rank + 1) · S_local) of the padded sequence.
        v: this rank's values, shape as `k`.
        group: the ranks that share the sequence. In a group of one this is plain attention: so is cross-attention,
            whose keys are whole on every rank, and which never communicates.
        scale: factor of the scores; None for 1 / √D.
        kv_length: the number of valid keys of the whole sequence; those from there on are pads and take no part,
            whatever they hold. None: all are valid.
        method: "gather", "ring", or "auto": the ring of a kernel where there is one for these arguments, else gather.
        return_lse: also return the logarithm of each row's softmax denominator.
        joint_kv: further keys and values `[B, S_joint, N, D]` that every rank holds whole, such as a text prompt's;
            each query attends to them once. They are not counted in `kv_length`.
        key_mask: bool `[B, S_local]`, true for this rank's keys that take part, on every rank or on none; others do
            not, whatever they hold. None: all within `kv_length`. At least one key must be left for every batch
            element, the other ranks' and joint ones included. Eager code makes sure, for which the ranks exchange one
            number a batch element and wait for the device; compiled code cannot.
        joint_mask: bool `[B, S_joint]`, the same for `joint_kv`, and alike on every rank. It may leave none: then
            `kv_length` is at least 1.
        stats: counters to add to. Counting waits for the device, and cannot be compiled.

    Returns:
        `[B, S_q, N, D]` in q's dtype, accumulated in float32; with `return_lse` also float32 `[B, N, S_q]`.

    Raises:
        ValueError: shapes that do not fit, an unknown method, a `kv_length` that leaves no key or names too many, a
            mask that is not bool or leaves no key, a `joint_mask` without `joint_kv`, or "ring" in code that is
            compiled for a device, where no kernel takes the arguments.
    """
    _check(q, k, v, joint_kv, method)
    _check_mask("key_mask", key_mask, k)
    if joint_mask is not None and joint_kv is None:
        raise ValueError("joint_mask without joint_kv: valid is None, or both")
    joint = None if joint_kv is None else _Joint(*joint_kv, joint_mask)
    if joint is not None:
        _check_mask("joint_mask", joint_mask, joint.k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    valid = _valid_keys(kv_length, k.shape[1], group, joint)
    if key_mask is not None and not torch.compiler.is_compiling():
        _check_keys_left(key_mask[:, : valid[group.rank]], group, joint)
    lse: torch.Tensor | None
    kernel_ring = None
    if group.size > 1 and method != "gather":
        if torch.compiler.is_compiling():
            takes = method == "ring" and _takes_compiled_ring(q, k, v, group, scale, joint, return_lse)
        else:
            takes = joint is None
        kernel_ring = _kernel_ring(q, k, v, group, scale, sum(valid), key_mask) if takes else None
    if kernel_ring is not None:
        output, lse, _ = ring_attention(q, k, v, **kernel_ring, return_lse=return_lse or stats is not None)
        if stats is not None:
            stats.blocks += group.size
    elif method == "ring":
        output, lse = _ring(q, k, v, group, scale, valid, joint, key_mask, stats)
    else:
        output, lse = _gather(q, k, v, group, scale, sum(valid), joint, key_mask, return_lse or stats is not None)
        if stats is not None:
            stats.blocks += 1
    if stats is not None:
        assert lse is not None
        stats.rows += lse.numel()
        stats.clamped_rows += int((~lse.isfinite()).sum())
    if return_lse:
        assert lse is not None
        return output, lse
    return output


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, joint_kv: KeysValues | None, method: str) -> None:
    if method not in get_args(ContextMethod):
        raise ValueError(f"method = {method!r}: valid are {', '.join(get_args(ContextMethod))}")
    pairs = (
        [("k", k, "v", v)] if joint_kv is None else [("k", k, "v", v), ("joint k", joint_kv[0], "joint v", joint_kv[1])]
    )
    for key_name, key, value_name, value in pairs:
        if key.shape != value.shape or key.dim() != 4:
            raise ValueError(
                f"{key_name} {tuple(key.shape)} and {value_name} {tuple(value.shape)} are not of one shape [B, S, N, D]"
            )
        if q.dim() != 4 or (q.shape[0], *q.shape[2:]) != (key.shape[0], *key.shape[2:]):
            raise ValueError(f"q {tuple(q.shape)} and {key_name} {tuple(key.shape)} differ in more than their tokens")


def _check_mask(name: str, mask: torch.Tensor | None, keys: torch.Tensor) -> None:
    if mask is not None and (mask.dtype != torch.bool or mask.shape != keys.shape[:2]):
        raise ValueError(f"{name} is {mask.dtype} {tuple(mask.shape)}; valid is torch.bool {tuple(keys.shape[:2])}")


def _valid_keys(kv_length: int | None, shard_length: int, group: AxisGroup, joint: _Joint | None) -> list[int]:
    """The number of valid keys in each rank's block."""
    total = shard_length * group.size
    length = total if kv_length is None else kv_length
    # A joint mask may leave no joint key, which nobody can know from shapes.
    least = 0 if joint is not None and joint.k.shape[1] and joint.mask is None else 1
    if not least <= length <= total:
        raise ValueError(
            f"kv_length = {length}: valid are {least}..{total} ({group.size} ranks of {shard_length} keys each)"
        )
    return [min(max(length - rank * shard_length, 0), shard_length) for rank in range(group.size)]


def _check_keys_left(key_mask: torch.Tensor, group: AxisGroup, joint: _Joint | None) -> None:
    """Collective over `group`, and the same verdict on every rank."""
    left = group.all_gather(key_mask.any(1, keepdim=True).float(), dim=1).amax(1) > 0
    if joint is not None:
        left |= joint.k.shape[1] > 0 if joint.mask is None else joint.mask.any(1)
    if not left.all():
        without = (~left).nonzero().flatten().tolist()
        raise ValueError(f"key_mask leaves batch elements {without} without a key; valid is at least one key for each")


def _takes_compiled_ring(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: AxisGroup,
    scale: float,
    joint: _Joint | None,
    return_lse: bool,
) -> bool:
    """Whether a kernel's ring is the node of a graph; False for torch's own ring, which only the host can compile."""
    if joint is not None or return_lse:
        refusal: str | None = "joint_kv and return_lse have no kernel"
    else:
        refusal = ring_refusal(q, k, v, group=group, scale=scale)
    if refusal is not None and q.device.type != "cpu":
        raise ValueError(
            f"method = 'ring' cannot be compiled for {q.device.type} ({refusal}): valid are gather and auto (of an "
            f"engine, the setting context_method)"
        )
    return refusal is None


def _kernel_ring(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: AxisGroup,
    scale: float,
    kv_length: int,
    key_mask: torch.Tensor | None,
) -> dict[str, Any] | None:
    """The options of `ring_attention` where someone takes these arguments; None for the reference, which gathers."""
    options = {
        "group": group,
        "replica_groups": get_partition(group),
        "scale": scale,
        "key_length": kv_length,
        "key_mask": key_mask,
    }
    if torch.compiler.is_compiling():  # `_takes_compiled_ring` has asked
        return options
    return options if explain("ring_attention", q, k, v, **options).provider != "torch" else None


def _gather(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: AxisGroup,
    scale: float,
    kv_length: int,
    joint: _Joint | None,
    key_mask: torch.Tensor | None,
    with_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if group.size > 1:
        k, v = group.all_gather(torch.stack([k, v]), dim=2).unbind(0)
    k, v = k[:, :kv_length], v[:, :kv_length]
    mask = None if key_mask is None else _unmarked(group.all_gather(_marked(key_mask, k), dim=1)[:, :kv_length])
    if joint is not None:
        mask = _joined(mask, k, joint)
        k, v = torch.cat([k, joint.k], dim=1), torch.cat([v, joint.v], dim=1)
    output = flash_attention(q, k, v, scale=scale, key_mask=mask)
    return output, log_sum_exp(q, k, scale, mask) if with_lse else None


def _joined(mask: torch.Tensor | None, k: torch.Tensor, joint: _Joint) -> torch.Tensor | None:
    """The mask of keys `k` followed by the joint ones; None where all of them take part."""
    if mask is None and joint.mask is None:
        return None
    parts = ((mask, k), (joint.mask, joint.k))
    return torch.cat([k.new_ones(k.shape[:2], dtype=torch.bool) if m is None else m for m, k in parts], dim=1)


def _marked(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The mask in the dtype of keys, which every backend's collectives know."""
    return mask.to(like.dtype)


def _unmarked(marks: torch.Tensor) -> torch.Tensor:
    return marks > 0


def _zeroed(k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> KeysValues:
    """Keys and values that take no part as zeros, which neither a proof nor a product of theirs sees."""
    if mask is None:
        return k, v
    chosen = mask[:, :, None, None]
    return torch.where(chosen, k, 0), torch.where(chosen, v, 0)


def _ring(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: AxisGroup,
    scale: float,
    valid: list[int],
    joint: _Joint | None,
    key_mask: torch.Tensor | None,
    stats: ContextAttentionStats | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = _zeroed(k, v, key_mask)
    if joint is not None:
        joint = _Joint(*_zeroed(joint.k, joint.v, joint.mask), joint.mask)
    sums = _split_heads(q, k, v, group, scale, valid, joint)
    blocks = 0
    if joint is not None and joint.k.shape[1]:
        blocks += 1
        for part in sums:
            part.add(joint.k, joint.v, joint.mask)
    block = torch.stack([k, v])
    marks = None if key_mask is None else _marked(key_mask, k)
    for step in range(group.size):
        # The next block travels while this one is computed.
        travels = step + 1 < group.size
        next_block = group.start_rotate(block) if travels else None
        next_marks = group.start_rotate(marks) if travels and marks is not None else None
        keys = valid[(group.rank - step) % group.size]
        if keys:
            blocks += 1
            mask = None if marks is None else _unmarked(marks[:, :keys])
            for part in sums:
                part.add(block[0][:, :keys], block[1][:, :keys], mask)
        if next_block is not None:
            block = next_block()
        if next_marks is not None:
            marks = next_marks()
    if stats is not None:
        stats.blocks += blocks
        stats.bounded_heads += sum(len(part.heads) for part in sums if part.bounded)
    order = torch.cat([part.heads for part in sums]).argsort()
    output = torch.cat([part.output() for part in sums], dim=1).index_select(1, order)
    lse = torch.cat([part.log_sum_exp() for part in sums], dim=1).index_select(1, order)
    return output.transpose(1, 2).to(q.dtype), lse


def _split_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: AxisGroup,
    scale: float,
    valid: list[int],
    joint: _Joint | None,
) -> list[HeadSums]:
    """Empty sums of the heads: of those with a bounded softmax, and of those with a running maximum."""
    if torch.compiler.is_compiling():
        return [HeadSums(q, scale, torch.arange(q.shape[2], device=q.device), bounded=False)]
    safe = _safe_heads(q, k, v, group, scale, valid, joint)
    split = ((safe.nonzero().flatten(), True), ((~safe).nonzero().flatten(), False))
    return [HeadSums(q, scale, heads, bounded) for heads, bounded in split if len(heads)]


def _safe_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: AxisGroup,
    scale: float,
    valid: list[int],
    joint: _Joint | None,
) -> torch.Tensor:
    """Bool `[N]`: the heads whose bounded softmax is proven safe for this rank's queries over every rank's keys.

    Masked keys are zeros by now and lower no maximum of norms or of values that take part. They are counted, which
    makes the proof's bound of overflow larger than it must be; its bound of loss does not depend on their number, since
    they add nothing that could be rounded.
    """
    num_keys = sum(valid)
    local = [(k[:, : valid[group.rank]], v[:, : valid[group.rank]])]
    if joint is not None:
        local.append((joint.k, joint.v))
        num_keys += joint.k.shape[1]
    largest = torch.stack([torch.stack([head_norm_max(key), head_abs_max(value)]) for key, value in local]).amax(0)
    k_norm_max, v_abs_max = group.all_gather(largest.unsqueeze(0), dim=0).amax(0).unbind(0)
    return bounded_softmax_is_safe(head_norm_max(q), k_norm_max, scale, num_keys, v_abs_max)
