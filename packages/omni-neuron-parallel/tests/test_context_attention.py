# SPDX-License-Identifier: Apache-2.0
"""Context attention against softmax in float64, where static bounds fail too; on real ranks and on emulated ones."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import context_ranks
import parallel_ranks
import pytest
import torch
import torch.nn.functional as F
from parallel_ranks import random

from omni_neuron_parallel import (
    AxisGroup,
    ContextAttentionStats,
    RankPool,
    Topology,
    context_attention,
    softmax_sums,
)
from omni_neuron_parallel.groups import get_partition

Whole = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

METHODS = ["gather", "ring"]
WORLDS = ["alone", "two_ranks", "four_ranks", "eight_emulated"]


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None) -> Whole:
    """Output and lse in float64, and each row's largest score."""
    queries, keys, values = (tensor.double().transpose(1, 2) for tensor in (q, k, v))
    scores = queries @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return (scores.softmax(-1) @ values).transpose(1, 2), scores.logsumexp(-1), scores.amax(-1)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


def run(world: str, request: pytest.FixtureRequest, whole: Whole, **options: Any) -> list[Any]:
    """(output, lse, stats) of every rank."""
    if world == "alone":
        return [context_ranks.split_attention(AxisGroup("cp"), *whole, options)]
    if world == "eight_emulated":
        return context_ranks.run_emulated(8, context_ranks.split_attention, *whole, options)
    pool: RankPool = request.getfixturevalue(world)
    topology = Topology(cp=pool.world_size)
    return pool.run(parallel_ranks.with_topology, topology, context_ranks.on_real_ranks, *whole, options)


def check(results: list[Any], whole: Whole, tolerance: float = 1e-5, lse_tolerance: float = 1e-4) -> None:
    output, lse, _ = exact(*whole)
    for result, result_lse, stats in results:
        assert relative_error(result, output) <= tolerance
        assert (result_lse - lse).abs().max() <= lse_tolerance
        assert (result.norm(dim=-1) > 0).all()
        assert stats.rows > 0 and stats.clamped_rows == 0
        assert torch.equal(result, results[0][0]), "ranks hold different outputs"


def heads(length: int = 61, num_heads: int = 3, dim: int = 16, gain: float = 1.0, dtype: Any = torch.float32) -> Whole:
    q, k, v = (random(2, length, num_heads, dim, seed=seed) for seed in (1, 2, 3))
    return (q * gain).to(dtype), k.to(dtype), v.to(dtype)


def outlier(gap: float) -> Whole:
    """Head 1: one key orthogonal to every query, so long that the static bound exceeds each row's maximum by `gap`."""
    q, k, v = heads(48)
    q[:, :, 1, 0] = 0
    q[:, :, 1] *= 4 / q[:, :, 1].norm(dim=-1, keepdim=True)
    k[:, 37, 1] = 0
    # scale · ‖q‖ = 1 in that head, so its bound is the norm of this key.
    k[:, 37, 1, 0] = gap + exact(q, k, v)[2][:, 1].max()
    return q, k, v


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("method", METHODS)
def test_random_heads(world: str, method: str, request: pytest.FixtureRequest) -> None:
    whole = heads()
    results = run(world, request, whole, method=method)
    check(results, whole)
    if method == "ring":
        assert all(stats.bounded_heads == 3 for *_, stats in results)


@pytest.mark.parametrize("world", WORLDS)
def test_an_outlier_key_that_no_query_sees(world: str, request: pytest.FixtureRequest) -> None:
    for gap in (50, 100, 300):
        whole = outlier(gap)
        _, _, peak = exact(*whole)
        bound = whole[0][:, :, 1].norm(dim=-1).max() * whole[1][:, :, 1].norm(dim=-1).max() / 4
        assert abs(bound - peak[:, 1].max() - gap) < 1e-3
        results = run(world, request, whole, method="ring")
        check(results, whole)
        # Each head is judged alone: the ordinary ones are proven safe whatever the outlier in head 1.
        assert {stats.bounded_heads for *_, stats in results} == {3 if gap == 50 else 2}


def test_the_static_bound_alone_loses_rows() -> None:
    """What the outlier is for: subtracting scale · ‖q‖ · max‖k‖ is exact at 50 and returns nothing from 100 on."""
    for gap in (50, 100, 300):
        whole = outlier(gap)
        queries, keys, values = (tensor.transpose(1, 2) for tensor in whole)
        bound = queries.norm(dim=-1, keepdim=True) * keys.norm(dim=-1).amax(-1)[..., None, None] / 4
        weights = (queries @ keys.mT / 4 - bound).exp()
        naive = (weights @ values / weights.sum(-1, keepdim=True).clamp_min(1e-37)).transpose(1, 2)
        output, _, _ = exact(*whole)
        assert relative_error(naive[:, :, 0], output[:, :, 0]) < 1e-5
        if gap == 50:
            assert relative_error(naive, output) < 1e-5
        else:
            assert relative_error(naive[:, :, 1], output[:, :, 1]) > 0.99
            with pytest.raises(AssertionError):
                check([(naive, exact(*whole)[1], ContextAttentionStats(rows=1))], whole)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("gain", [1, 6, 12, 40])
def test_learned_gains(gain: int, world: int) -> None:
    """α·β as after QK norm with learned gains: rows of norm √D times the gain, over 4096 keys."""
    q, k, v = random(1, 256, 2, 128, seed=1), random(1, 4096, 2, 128, seed=2), random(1, 4096, 2, 128, seed=3)
    q, k = (F.normalize(tensor, dim=-1) * math.sqrt(128 * gain) for tensor in (q, k))
    results = context_ranks.run_emulated(world, context_ranks.split_attention, q, k, v, {"method": "ring"})
    check(results, (q, k, v), lse_tolerance=1e-3)
    assert {stats.bounded_heads for *_, stats in results} == {2 if gain <= 6 else 0}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_is_as_near_as_on_one_device(world: str, method: str, request: pytest.FixtureRequest) -> None:
    cases = heads(), heads(gain=40), outlier(100)
    for whole in (tuple(tensor.bfloat16() for tensor in case) for case in cases):
        expected, _, _ = exact(*whole)
        single = F.scaled_dot_product_attention(*(tensor.transpose(1, 2) for tensor in whole)).transpose(1, 2)
        for output, _, stats in run(world, request, whole, method=method):
            assert output.dtype == torch.bfloat16 and stats.clamped_rows == 0
            assert (output.norm(dim=-1) > 0).all()
            assert relative_error(output, expected) <= relative_error(single, expected) * 1.05


@pytest.mark.parametrize("world", ["two_ranks", "four_ranks", "eight_emulated"])
@pytest.mark.parametrize("method", METHODS)
def test_pads_and_masked_blocks(world: str, method: str, request: pytest.FixtureRequest) -> None:
    """13 valid keys of 16: the last blocks hold some or none; 3 and 1: fewer keys than a shard of 8 or 4 holds."""
    q, k, v = heads(16)
    k[:, 13:] *= 1e4
    for valid in (13, 5, 3, 1):
        results = run(world, request, (q, k, v), method=method, kv_length=valid)
        check(results, (q, k[:, :valid], v[:, :valid]))
        shard = 16 // len(results)
        if method == "ring":
            assert {stats.blocks for *_, stats in results} == {-(-valid // shard)}
            # Long pads are no part of the proof.
            assert {stats.bounded_heads for *_, stats in results} == {3}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_3645_tokens(size: int, method: str) -> None:
    """Wan2.2 at 240 × 432, 33 frames: 9 · 15 · 27 tokens, which no power of two divides."""
    q, k, v = heads(3645, 1)
    q, k, v = q[:1], k[:1], v[:1]
    single = context_attention(q, k, v, group=AxisGroup("cp"))
    [(output, _, stats), *_] = context_ranks.run_emulated(
        size, context_ranks.split_attention, q, k, v, {"method": method}
    )
    assert relative_error(output, single.double()) < 1e-5
    assert stats.clamped_rows == 0


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("method", METHODS)
def test_joint_tokens_count_once(world: str, method: str, request: pytest.FixtureRequest) -> None:
    q, k, v = heads()
    joint = (random(2, 7, 3, 16, seed=8), random(2, 7, 3, 16, seed=9))
    joint[0][:, :, 0] *= 100  # exp of these scores overflows without a maximum
    results = run(world, request, (q, k, v), method=method, joint_kv=joint)
    check(results, (q, torch.cat([k, joint[0]], 1), torch.cat([v, joint[1]], 1)))
    check(run(world, request, (q, k, v), method=method, joint_kv=joint, kv_length=0), (q, *joint))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("method", METHODS)
def test_masked_keys_take_no_part_whatever_they_hold(world: str, method: str, request: pytest.FixtureRequest) -> None:
    """No joint token is left for the first batch element, and the second has no key in the first half."""
    joint_mask = torch.tensor([[False] * 7, [True, False, True, True, False, False, True]])
    key_mask = random(2, 61, seed=5) > 0
    key_mask[1, :31] = False
    for gain, bounded in ((1, 3), (40, 0)):
        q, k, v = heads(gain=gain)
        joint = (random(2, 7, 3, 16, seed=8), random(2, 7, 3, 16, seed=9))
        for masks in ({"joint_mask": joint_mask}, {"joint_mask": joint_mask, "key_mask": key_mask}):
            chosen = torch.cat([masks.get("key_mask", torch.ones(2, 61, dtype=torch.bool)), joint_mask], 1)
            keys, values = torch.cat([k, joint[0]], 1), torch.cat([v, joint[1]], 1)
            one_by_one = [exact(q[b, None], keys[b, chosen[b]][None], values[b, chosen[b]][None])[:2] for b in range(2)]
            output, lse = (torch.cat(parts) for parts in zip(*one_by_one, strict=True))
            spoilt_k, spoilt_v = (t.masked_fill(~chosen[..., None, None], torch.nan) for t in (keys, values))
            results = run(
                world,
                request,
                (q, spoilt_k[:, :61], spoilt_v[:, :61]),
                method=method,
                joint_kv=(spoilt_k[:, 61:], spoilt_v[:, 61:]),
                **masks,
            )
            for result, result_lse, stats in results:
                assert relative_error(result, output) < 1e-5
                assert (result_lse - lse).abs().max() < 1e-4
                assert stats.clamped_rows == 0
                assert stats.bounded_heads == (bounded if method == "ring" else 0)


@pytest.mark.parametrize("world", [1, 2])
def test_a_mask_without_a_key_is_refused_on_every_rank(world: int) -> None:
    q, k, v = heads(8)
    key_mask = torch.ones(2, 8, dtype=torch.bool)
    key_mask[1] = False
    no_joint = torch.zeros(2, 8, dtype=torch.bool)
    for options in ({}, {"joint_kv": (k, v), "joint_mask": no_joint}, {"joint_kv": (k[:, :0], v[:, :0])}):
        messages = context_ranks.run_emulated(world, context_ranks.refusal, q, k, v, {"key_mask": key_mask, **options})
        assert (
            messages == ["key_mask leaves batch elements [1] without a key; valid is at least one key for each"] * world
        )
    assert (
        context_ranks.run_emulated(world, context_ranks.refusal, q, k, v, {"key_mask": key_mask, "joint_kv": (k, v)})
        == [""] * world
    )


@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_no_length_is_bit_identical_to_all_keys_valid(method: Any) -> None:
    q, k, v = heads(64)
    for size in (1, 4):
        unmasked = context_ranks.run_emulated(
            size, context_ranks.split_attention, q, k, v, {"method": method, "kv_length": None}
        )
        masked = context_ranks.run_emulated(size, context_ranks.split_attention, q, k, v, {"method": method})
        assert torch.equal(unmasked[0][0], masked[0][0])
    # On one rank it is torch's attention to the bit, whether lse and counters are asked for or not.
    if method != "ring":
        plain = F.scaled_dot_product_attention(*(tensor.transpose(1, 2) for tensor in (q, k, v))).transpose(1, 2)
        group = AxisGroup("cp")
        assert torch.equal(context_attention(q, k, v, group=group, method=method), plain)
        assert torch.equal(context_attention(q, k, v, group=group, method=method, return_lse=True)[0], plain)


def test_scale_and_own_query_count() -> None:
    q, k, v = heads(48)
    for method in METHODS:
        for output, lse, _ in context_ranks.run_emulated(
            4, context_ranks.split_attention, q[:, :5], k, v, {"method": method, "scale": -0.7}
        ):
            expected, expected_lse, _ = exact(q[:, :5], k, v, -0.7)
            assert relative_error(output, expected) < 1e-5
            assert (lse - expected_lse).abs().max() < 1e-4


def test_the_next_block_travels_before_this_one_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Recorded(context_ranks.EmulatedGroup):
        def start_rotate(self, tensor: torch.Tensor) -> Any:
            events.append(f"start {tuple(tensor.shape)}")
            return lambda: events.append("wait") or tensor

        def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
            return tensor

    add = softmax_sums.HeadSums.add
    monkeypatch.setattr(softmax_sums.HeadSums, "add", lambda self, *kv: events.append("compute") or add(self, *kv))
    q, k, v = heads(4)
    context_attention(q, k, v, group=Recorded("cp", (0, 1, 2), 1), method="ring")
    start = "start (2, 2, 4, 3, 16)"
    assert events == [start, "compute", "wait", start, "compute", "wait", "compute"]


def test_rotation_follows_the_order_of_the_group(four_ranks: RankPool) -> None:
    rotated = four_ranks.run(parallel_ranks.with_topology, Topology(cp=4), context_ranks.rotated_ranks)
    assert rotated == [[(rank + step) % 4 for step in (1, 2, 3, 4)] for rank in range(4)]
    rotated = four_ranks.run(parallel_ranks.with_topology, Topology(tp=2, cp=2), context_ranks.rotated_ranks)
    assert rotated == [[2, 0], [3, 1], [0, 2], [1, 3]]


def test_a_kernel_is_told_the_groups_of_the_whole_world(four_ranks: RankPool) -> None:
    for axis, groups in (("cp", ((0, 2), (1, 3))), ("tp", ((0, 1), (2, 3))), ("vae_patch", ((0,), (1,), (2,), (3,)))):
        partitions = four_ranks.run(
            parallel_ranks.with_topology, Topology(tp=2, cp=2), context_ranks.partition_of, axis
        )
        assert partitions == [groups] * 4
    assert get_partition(AxisGroup("cp", (3, 5), 1, object())) == ((3, 5),)  # type: ignore[arg-type]


def test_cross_attention_needs_no_other_rank(two_ranks: RankPool) -> None:
    q, k, v = heads(32)
    k, v = k[:, :9], v[:, :9]
    alone = context_attention(q, k, v, group=AxisGroup("cp"))
    for output in two_ranks.run(parallel_ranks.with_topology, Topology(cp=2), context_ranks.cross_attention, q, k, v):
        torch.testing.assert_close(output, alone, rtol=1e-6, atol=1e-7)


def test_the_counter_sees_what_is_not_finite() -> None:
    q, k, v = heads(8)
    q[0, 3, 1] = torch.nan
    k[1, 2, 0] = torch.inf
    for method in METHODS:
        stats = ContextAttentionStats()
        context_attention(q, k, v, group=AxisGroup("cp"), method=method, stats=stats)  # type: ignore[arg-type]
        assert (stats.rows, stats.clamped_rows) == (2 * 3 * 8, 1 + 8)


def test_errors() -> None:
    q, k, v = heads(8)
    group = AxisGroup("cp")
    with pytest.raises(ValueError, match="method = 'ulysses': valid are auto, gather, ring"):
        context_attention(q, k, v, group=group, method="ulysses")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"kv_length = 9: valid are 1\.\.8 \(1 ranks of 8 keys each\)"):
        context_attention(q, k, v, group=group, kv_length=9)
    with pytest.raises(ValueError, match=r"kv_length = 0: valid are 1\.\.8"):
        context_attention(q, k, v, group=group, kv_length=0)
    with pytest.raises(ValueError, match=r"are not of one shape \[B, S, N, D\]"):
        context_attention(q, k, v[:, :4], group=group)
    with pytest.raises(ValueError, match=r"q \(2, 8, 3, 16\) and joint k \(2, 8, 2, 16\) differ in more than"):
        context_attention(q, k, v, group=group, joint_kv=(k[:, :, :2], v[:, :, :2]))
    mask = torch.ones(2, 8, dtype=torch.bool)
    with pytest.raises(ValueError, match="joint_mask without joint_kv"):
        context_attention(q, k, v, group=group, joint_mask=mask)
    with pytest.raises(ValueError, match=r"joint_mask is torch\.int64 \(2, 8\); valid is torch\.bool \(2, 8\)"):
        context_attention(q, k, v, group=group, joint_kv=(k, v), joint_mask=mask.long())
    with pytest.raises(ValueError, match=r"key_mask is torch\.bool \(2, 4\); valid is torch\.bool \(2, 8\)"):
        context_attention(q, k, v, group=group, key_mask=mask[:, :4])
    # Unlike without a mask, joint keys alone might be none.
    with pytest.raises(ValueError, match=r"kv_length = 0: valid are 1\.\.8"):
        context_attention(q, k, v, group=group, kv_length=0, joint_kv=(k, v), joint_mask=mask)


FAKE_PROVIDER = """
import torch
from omni_neuron_kernels import Implementation, RingAttention

calls = []

def run(q, k, v, *, group, replica_groups, scale, key_length, return_lse, **options):
    calls.append((group.ranks, replica_groups, scale, key_length, return_lse))
    lse = torch.zeros(q.shape[0], q.shape[2], q.shape[1]) if return_lse else None
    return RingAttention(torch.full_like(q, 7.0), lse, torch.zeros((), dtype=torch.int64))

def refusal(q, k, v, **options):
    return "more than 16 channels" if q.shape[-1] > 16 else None

IMPLEMENTATIONS = {"ring_attention": Implementation(run, refusal, priority=90)}
"""

USES_FAKE = """
import fake_ring
import torch
from omni_neuron_parallel import AxisGroup, ContextAttentionStats, context_attention

class Group(AxisGroup):
    def __post_init__(self): pass
    def all_gather(self, tensor, dim): return torch.cat([tensor, tensor], dim)
    def start_rotate(self, tensor): return lambda: tensor

group, alone = Group("cp", (4, 6), 1), AxisGroup("cp")
q = torch.randn(1, 8, 2, 16)
stats = ContextAttentionStats()
for method, with_stats in (("auto", None), ("ring", stats)):
    output = context_attention(q, q, q, group=group, method=method, kv_length=11, stats=with_stats)
    assert bool((output == 7).all())
assert fake_ring.calls == [((4, 6), ((4, 6),), 0.25, 11, False), ((4, 6), ((4, 6),), 0.25, 11, True)]
assert (stats.rows, stats.clamped_rows, stats.blocks) == (16, 0, 2)
wide = torch.randn(1, 8, 2, 32)
for plain in (
    context_attention(q, q, q, group=group, method="gather"),
    context_attention(q, q, q, group=group, joint_kv=(q, q)),
    context_attention(q, q, q, group=alone),
    context_attention(wide, wide, wide, group=group),
):
    assert not bool((plain == 7).any())
torch.compiler.is_compiling = lambda: True
assert not bool((context_attention(q, q, q, group=group) == 7).any())
assert len(fake_ring.calls) == 2
"""


def test_auto_takes_the_ring_of_a_kernel_library_that_has_one(tmp_path: Path) -> None:
    """A distribution that declares a ring, in a process of its own: entry points are read once."""
    (tmp_path / "fake_ring.py").write_text(FAKE_PROVIDER)
    metadata = tmp_path / "fake_ring-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-ring\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[omni_neuron.kernels]\nfake = fake_ring:IMPLEMENTATIONS\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", USES_FAKE], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
