# SPDX-License-Identifier: Apache-2.0
"""Collectives on 1, 2, 4 and 8 ranks, one and two cores each, in HBM and SBUF."""

import time

import ml_dtypes
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import nkisim_probe as probe
import numpy as np
import pytest
from nkisim_probe import load, store, tile

from omni_neuron_nkisim import NkiValidationError
from omni_neuron_nkisim.context import current_core

RANKS = [1, 2, 4, 8]


def data(ranks, rows=8, columns=4):
    generator = np.random.default_rng(ranks)
    return [generator.standard_normal((rows, columns)).astype(np.float32) for _ in range(ranks)]


def everyone(ranks):
    return ncc.ReplicaGroup([list(range(ranks))])


def hbm(shape, dtype="float32"):
    return nl.ndarray(shape, dtype, buffer=nl.shared_hbm)


def my_rank():
    """What no kernel knows when it is traced, for programs that differ."""
    return current_core("the test").rank


def staged(source):
    """A copy in shared HBM that both cores wrote a part of."""
    copy, rows = hbm(source.shape), source.shape[0] // nl.num_programs()
    mine = slice(rows * nl.program_id(), rows * (nl.program_id() + 1))
    nisa.dma_copy(copy[mine], source[mine])
    return copy


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("ranks", RANKS)
def test_reductions_and_gathers_in_hbm(ranks, lnc):
    def kernel(a):
        source = staged(a)
        total, largest, gathered = hbm(a.shape), hbm(a.shape), hbm((ranks * a.shape[0], a.shape[1]))
        part, swapped = hbm((a.shape[0] // ranks, a.shape[1])), hbm(a.shape)
        ncc.all_reduce([source], [total], everyone(ranks), nl.add)
        ncc.all_reduce([source], [largest], everyone(ranks), nl.maximum)
        ncc.all_gather([source], [gathered], everyone(ranks), 0)
        ncc.reduce_scatter([source], [part], everyone(ranks), 0, nl.add)
        ncc.all_to_all([source], [swapped], everyone(ranks), 0)
        return total, largest, gathered, part, swapped

    inputs = data(ranks)
    results = probe.spmd(kernel, [(a,) for a in inputs], lnc=lnc)
    total = np.sum(inputs, axis=0, dtype=np.float64)
    for rank, (got, largest, gathered, part, swapped) in enumerate(results):
        np.testing.assert_allclose(got, total, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(largest, np.max(inputs, axis=0))
        np.testing.assert_array_equal(gathered, np.concatenate(inputs))
        np.testing.assert_allclose(part, np.split(total, ranks)[rank], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(swapped, np.concatenate([np.split(a, ranks)[rank] for a in inputs]))
    assert len({result[0].tobytes() for result in results}) == 1, "every rank holds the same bits"


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("ranks", RANKS)
def test_collectives_in_sbuf_pair_equal_cores(ranks, lnc):
    def kernel(a):
        mine, me = load(a), nl.program_id()
        nisa.tensor_scalar(mine, mine, nl.add, 100.0 * me)
        gathered, received = tile((a.shape[0], ranks * a.shape[1])), tile(a.shape)
        ncc.all_gather([mine], [gathered], everyone(ranks), 1)
        ncc.collective_permute_implicit([mine], [received], everyone(ranks))
        both, hops = hbm((nl.num_programs(), *gathered.shape)), hbm((nl.num_programs(), *a.shape))
        nisa.dma_copy(both[me], gathered)
        nisa.dma_copy(hops[me], received)
        return both, hops

    inputs = data(ranks)
    for rank, (gathered, received) in enumerate(probe.spmd(kernel, [(a,) for a in inputs], lnc=lnc)):
        for core in range(lnc):
            moved = [a + np.float32(100 * core) for a in inputs]
            np.testing.assert_allclose(gathered[core], np.concatenate(moved, axis=1), rtol=1e-6)
            np.testing.assert_allclose(received[core], moved[rank - 1], rtol=1e-6)


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("permuted", [False, True])
def test_a_ring_brings_every_rank_s_data_once_and_says_whose(ranks, lnc, permuted):
    ring = tuple(np.random.default_rng(7).permutation(ranks).tolist()) if permuted else None

    def kernel(a):
        buffers, out = [staged(a), hbm(a.shape)], hbm((ranks, *a.shape))
        if lnc == 2:
            nisa.core_barrier(buffers[0], (0, 1))  # with one rank no collective follows to order the cores
        for step in range(ranks):
            here, there = buffers[step % 2], buffers[(step + 1) % 2]
            owner = ncc.collective_permute_implicit_current_processing_rank_id(step, everyone(ranks))
            if step < ranks - 1:
                ncc.collective_permute_implicit([here], [there], everyone(ranks))
            if nl.program_id() == 0:
                rows, columns = a.shape
                slot = out.ap([[columns, rows], [1, columns]], scalar_offset=owner)
                nisa.dma_copy(slot, here)
            if lnc == 2:
                nisa.core_barrier(here, (0, 1))
        return out

    inputs = data(ranks)
    for got in probe.spmd(kernel, [(a,) for a in inputs], lnc=lnc, ring=ring):
        np.testing.assert_array_equal(got, np.stack(inputs))


def test_the_ring_is_the_settings():
    def kernel(a):
        out = hbm(a.shape)
        ncc.collective_permute_implicit([a], [out], everyone(4))
        return out

    inputs = data(4)
    got = probe.spmd(kernel, [(a,) for a in inputs], ring=(0, 2, 1, 3))
    for source, target in ((0, 2), (2, 1), (1, 3), (3, 0)):
        np.testing.assert_array_equal(got[target], inputs[source])
    with pytest.raises(NkiValidationError, match=r"settings.ring is \(0, 1\); has to be a permutation of 0 to 3"):
        probe.spmd(kernel, [(a,) for a in inputs], ring=(0, 1))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_explicit_permutes_reach_named_ranks_only(ranks):
    pairs = [(0, ranks - 1), (ranks - 1, 0)]

    def kernel(a):
        out = hbm(a.shape)
        nisa.dma_copy(out, nl.zeros(a.shape, "float32"))
        ncc.collective_permute([a], [out], pairs)
        return out

    inputs = data(ranks)
    results = probe.spmd(kernel, [(a,) for a in inputs])
    np.testing.assert_array_equal(results[0], inputs[-1])
    np.testing.assert_array_equal(results[-1], inputs[0])
    assert all((result == 0).all() for result in results[1:-1])


def test_a_ring_of_reductions():
    def kernel(a, b):
        out = hbm(a.shape)
        ncc.collective_permute_implicit_reduce([a], [b], [out], everyone(2), nl.add)
        return out

    first, second = data(2), data(2, rows=8)
    got = probe.spmd(kernel, list(zip(first, second, strict=True)))
    np.testing.assert_allclose(got[0], first[1] + second[1], rtol=1e-6)


def test_two_channels_and_coalesced_tensors():
    def kernel(a, b):
        x, y, sums = hbm(a.shape), hbm(b.shape), [hbm(a.shape), hbm(b.shape)]
        ncc.collective_permute_implicit([a, b], [x, y], everyone(2), channel_ids=[0, 1])
        ncc.all_reduce([a, b], sums, everyone(2), nl.add)
        return x, y, sums[0], sums[1]

    one, two = data(2), data(2, rows=2)
    x, y, first, second = probe.spmd(kernel, list(zip(one, two, strict=True)))[0]
    np.testing.assert_array_equal(x, one[1])
    np.testing.assert_array_equal(y, two[1])
    np.testing.assert_allclose(first, one[0] + one[1], rtol=1e-6)
    np.testing.assert_allclose(second, two[0] + two[1], rtol=1e-6)


def test_groups_are_apart_and_in_their_own_order():
    def kernel(a):
        out = hbm((2 * a.shape[0], a.shape[1]))
        ncc.all_gather([a], [out], ncc.ReplicaGroup([[3, 0], [1, 2]]), 0)
        return out

    inputs = data(4)
    results = probe.spmd(kernel, [(a,) for a in inputs])
    for rank, order in enumerate(([3, 0], [1, 2], [1, 2], [3, 0])):
        np.testing.assert_array_equal(results[rank], np.concatenate([inputs[r] for r in order]))


def test_rank_id():
    def kernel():
        number = tile((1, 1), "int32")
        nisa.register_store(number, ncc.rank_id())
        return store(number)

    assert [got.item() for got in probe.spmd(kernel, [()] * 4)] == [0, 1, 2, 3]


def test_narrow_types_are_reduced_in_float32_and_integers_exactly():
    def kernel(a, b):
        x, y = hbm(a.shape, a.dtype), hbm(b.shape, b.dtype)
        ncc.all_reduce([a], [x], everyone(4), nl.add)
        ncc.all_reduce([b], [y], everyone(4), nl.add)
        return x, y

    small = np.array([256.0], ml_dtypes.bfloat16), np.array([1.0], ml_dtypes.bfloat16)
    inputs = [(small[0] if rank == 0 else small[1], np.array([2**24 + rank], np.int32)) for rank in range(4)]
    x, y = probe.spmd(kernel, inputs)[0]
    assert float(x[0]) == 260.0  # 259, rounded once; in bfloat16 256 + 1 is 256
    assert y[0] == 4 * 2**24 + 6


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            lambda rank, a: (
                ncc.all_reduce([a], [hbm(a.shape)], everyone(2), nl.add)
                if rank
                else ncc.all_gather([a], [hbm((16, 4))], everyone(2), 0)
            ),
            r"calls all_.* where rank . core 0 called all_",
        ),
        (
            lambda rank, a: ncc.all_reduce([a], [hbm(a.shape)], everyone(2), nl.add) if rank else None,
            r"rank 1 core 0 waits in all_reduce of float32\[8, 4\] .* of group \[0, 1\], but rank 0 core 0 ended",
        ),
        (
            lambda rank, a: ncc.all_reduce([a], [hbm(a.shape)], ncc.ReplicaGroup([[0]]), nl.add) if rank else None,
            "has to hold the calling rank 1",
        ),
    ],
)
def test_ranks_that_do_not_agree_are_told(body, message):
    def kernel(a):
        body(my_rank(), a)

    with pytest.raises(NkiValidationError, match=message):
        probe.spmd(kernel, [(a,) for a in data(2)])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (("unshifted", 0), r"way is running_maximum on rank 1 and unshifted on rank 0; all ranks run one program"),
        (("running_maximum", 1), r"tables is \(TensorSpec.* on rank 1 and \(\) on rank 0"),
    ],
)
def test_arguments_that_make_other_programs_are_told(other, message):
    def kernel(a, way, tables):
        return staged(a)

    first, second = data(2)
    way, tables = other
    probe.spmd(kernel, [(first, way, ()), (second, way, ())])
    with pytest.raises(NkiValidationError, match=message):
        probe.spmd(kernel, [(first, way, ()), (second, "running_maximum", (first.copy(),) * tables)])


def test_the_cores_of_a_rank_pass_the_same_shared_tensor():
    def kernel(a):
        both = [hbm(a.shape), hbm(a.shape)]
        ncc.all_reduce([a], [both[nl.program_id()]], everyone(1), nl.add)

    with pytest.raises(NkiValidationError, match="the cores of rank 0 pass different tensors"):
        probe.spmd(kernel, [(data(1)[0],)], lnc=2)


def test_a_late_rank_is_named_after_the_deadline():
    def kernel(a):
        if my_rank():
            time.sleep(1.0)
        ncc.all_reduce([a], [hbm(a.shape)], everyone(2), nl.add)

    with pytest.raises(NkiValidationError, match=r"rank 0 core 0 waited 0.1 s in all_reduce .* for rank 1 core 0"):
        probe.spmd(kernel, [(a,) for a in data(2)], timeout_s=0.1)


def test_an_error_on_one_rank_ends_the_others():
    def kernel(a):
        if my_rank() == 2:
            raise ZeroDivisionError("rank 2's own")
        ncc.all_reduce([a], [hbm(a.shape)], everyone(4), nl.add)

    with pytest.raises(ZeroDivisionError, match="rank 2's own"):
        probe.spmd(kernel, [(a,) for a in data(4)])
