# SPDX-License-Identifier: Apache-2.0
"""LNC 2: what one core sees of the other, and that a forgotten barrier is found, always."""

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import nkisim_probe as probe
import numpy as np
import pytest
from nkisim_probe import load, normal, tile

from omni_neuron_nkisim import NkiValidationError, last_stats
from omni_neuron_nkisim.memory import PRIVATE_HBM

REPEATS = 20  # a race that depends on timing would show both ways in so many runs


def shared(shape, name="", dtype="float32"):
    return nl.ndarray(shape, dtype, buffer=nl.shared_hbm, name=name)


def exchange(source, barrier):
    """Core 0 leaves a tensor in HBM, core 1 fetches it; `barrier` says what is between."""
    between, out = shared(source.shape, "between"), shared(source.shape, "out")
    if nl.program_id() == 0:
        nisa.dma_copy(between, source)
    if barrier == "between":
        nisa.core_barrier(between, (0, 1))
    elif barrier == "another tensor":
        nisa.core_barrier(out, (0, 1))
    if nl.program_id() == 1:
        nisa.dma_copy(out, between)
    return out


def test_a_barrier_makes_writes_visible():
    x = normal(8, 4)
    for _ in range(REPEATS):
        np.testing.assert_array_equal(probe.run(lambda a: exchange(a, "between"), x, lnc=2), x)


@pytest.mark.parametrize("barrier", ["none", "another tensor"])
def test_a_missing_barrier_is_found_every_time(barrier):
    x = normal(8, 4)
    for _ in range(REPEATS):
        with pytest.raises(NkiValidationError, match="race on shared HBM tensor between: core 0 wrote and core 1 read"):
            probe.run(lambda a: exchange(a, barrier), x, lnc=2)


def test_the_reader_without_a_barrier_gets_poison():
    seen = {}

    def kernel(a):
        between = shared(a.shape)
        if nl.program_id() == 0:
            nisa.dma_copy(between, a)
        nisa.sendrecv(load(a), tile(a.shape), 1 - nl.program_id(), 1 - nl.program_id(), 0)  # core 0 wrote by now
        if nl.program_id() == 1:
            seen["values"] = between.read_raw(1).copy()

    with pytest.raises(NkiValidationError, match="race"):
        probe.run(kernel, np.ones((4, 4), np.float32), lnc=2)
    assert np.isnan(seen["values"]).all()


def test_a_core_reads_its_own_writes_at_once():
    def kernel(a):
        scratch, out = shared((2, 4, 4)), shared((2, 4, 4))
        mine = scratch[nl.program_id()]
        nisa.dma_copy(mine, a)
        nisa.dma_copy(out[nl.program_id()], mine)
        return out

    x = normal(4, 4)
    np.testing.assert_array_equal(probe.run(kernel, x, lnc=2), np.stack([x, x]))


def test_a_read_before_an_own_write_is_a_race_all_the_same():
    def kernel(a):
        out, seen = shared((4, 4), "out"), shared((4, 4))
        if nl.program_id() == 1:
            nisa.dma_copy(seen, out)
        nisa.dma_copy(out, a)
        return out

    for _ in range(REPEATS):
        with pytest.raises(NkiValidationError, match="tensor out: core 0 wrote and core 1 read 64 bytes"):
            probe.run(kernel, normal(4, 4), lnc=2)


def test_a_read_of_what_both_cores_wrote_alike_is_none():
    def kernel(a):
        out, seen = shared((4, 4)), shared((2, 4, 4))
        nisa.dma_copy(out, a)
        nisa.dma_copy(seen[nl.program_id()], out.ap([[4, 4], [1, 4]], vector_offset=rows()))
        return seen

    def rows():
        index = tile((4, 1), "int32")
        nisa.iota(index, [[1, 1]], channel_multiplier=1)
        return index

    x = normal(4, 4)
    np.testing.assert_array_equal(probe.run(kernel, x, lnc=2), np.stack([x, x]))


def test_both_cores_writing_different_values_is_a_race():
    def kernel(a):
        out = shared((4, 4), "out")
        value = nl.full((4, 4), float(nl.program_id()), "float32")
        nisa.dma_copy(out, value)
        return out

    for _ in range(REPEATS):
        with pytest.raises(NkiValidationError, match=r"tensor out: both cores wrote 32 bytes"):
            probe.run(kernel, np.ones((4, 4), np.float32), lnc=2)


def test_both_cores_writing_the_same_is_none():
    def kernel(a):
        out = shared(a.shape)
        nisa.dma_copy(out, a)
        return out

    x = normal(4, 4)
    np.testing.assert_array_equal(probe.run(kernel, x, lnc=2), x)


def test_overwriting_what_the_other_core_still_reads_is_a_race():
    def kernel(a, fixed):
        buffer, out = shared((4, 4), "buffer"), shared((2, 4, 4), "out")
        if nl.program_id() == 0:
            nisa.dma_copy(buffer, a)
        nisa.core_barrier(buffer, (0, 1))
        if nl.program_id() == 1:
            nisa.dma_copy(out[1], buffer)
        if fixed:
            nisa.core_barrier(buffer, (0, 1))
        if nl.program_id() == 0:
            nisa.dma_copy(buffer, nl.zeros((4, 4), "float32"))
        return out

    x = normal(4, 4)
    np.testing.assert_array_equal(probe.run(lambda a: kernel(a, True), x, lnc=2)[1], x)
    with pytest.raises(NkiValidationError, match="tensor buffer: core 0 wrote and core 1 read"):
        probe.run(lambda a: kernel(a, False), x, lnc=2)


def test_arguments_written_in_place_by_both_cores_show():
    def kernel(a):
        half = a[4 * nl.program_id() : 4 * nl.program_id() + 4]
        data = load(half)
        nisa.tensor_scalar(data, data, nl.multiply, 2.0)
        nisa.dma_copy(half, data)

    x = np.ones((8, 4), np.float32)
    probe.run(kernel, x, lnc=2)
    assert (x == 2).all()


def test_a_race_through_a_gather_is_found():
    def kernel(a, rows):
        between, out = shared((4, 4), "between"), shared((1, 4), "out")
        if nl.program_id() == 0:
            nisa.dma_copy(between, a)
        else:
            picked = tile((1, 4))
            nisa.dma_copy(picked, between.ap([[4, 1], [1, 4]], vector_offset=load(rows)))
            nisa.dma_copy(out, picked)
        return out

    with pytest.raises(NkiValidationError, match="tensor between: core 0 wrote and core 1 read 16 bytes"):
        probe.run(kernel, normal(4, 4), np.array([[2]], np.uint32), lnc=2)


def test_sendrecv_swaps_tiles():
    def kernel(a):
        out, me = shared((2, 4, 4)), nl.program_id()
        mine, theirs = load(a), tile((4, 4))
        nisa.tensor_scalar(mine, mine, nl.add, float(me))
        nisa.sendrecv(mine, theirs, 1 - me, 1 - me, pipe_id=3)
        nisa.dma_copy(out[me], theirs)
        return out

    x = normal(4, 4)
    got = probe.run(kernel, x, lnc=2)
    np.testing.assert_allclose(got, np.stack([x + 1, x]), rtol=1e-6)


def test_private_hbm_is_each_cores_own():
    def kernel(a):
        scratch, out, me = nl.ndarray((4, 4), "float32", buffer=nl.private_hbm), shared((2, 4, 4)), nl.program_id()
        assert scratch.buffer == PRIVATE_HBM
        nisa.dma_copy(scratch, nl.full((4, 4), float(me), "float32"))
        nisa.dma_copy(out[me], scratch)
        return out

    got = probe.run(kernel, normal(4, 4), lnc=2)
    assert (got[0] == 0).all()
    assert (got[1] == 1).all()


def test_a_collective_orders_both_cores_traffic():
    def kernel(a):
        part, total = shared((8, 4), "part"), shared((8, 4), "total")
        rows = slice(4 * nl.program_id(), 4 * nl.program_id() + 4)
        nisa.dma_copy(part[rows], a[rows])
        ncc.all_reduce([part], [total], ncc.ReplicaGroup([[0, 1]]), nl.add)
        out = shared((2, 8, 4))
        nisa.dma_copy(out[nl.program_id()], total)
        return out

    x = normal(8, 4)
    for got in probe.spmd(kernel, [(x,), (x,)], lnc=2):
        np.testing.assert_allclose(got, np.stack([2 * x, 2 * x]), rtol=1e-6)


def test_the_wrong_peer_and_too_much_for_gpsimd_dma_are_refused():
    def to_myself(a):
        nisa.sendrecv(load(a), tile((4, 4)), nl.program_id(), 1 - nl.program_id(), 0)

    with pytest.raises(NkiValidationError, match="send_to_rank is 0; has to be 1, the other core, on core 0"):
        probe.run(to_myself, normal(4, 4), lnc=2)

    def too_much(a):
        me = nl.program_id()
        nisa.sendrecv(load(a), tile((4, 257)), 1 - me, 1 - me, 0, dma_engine=nisa.dma_engine.gpsimd_dma)

    with pytest.raises(NkiValidationError, match="1028 bytes per partition; at most 1024"):
        probe.run(too_much, normal(4, 257), lnc=2)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda a: nisa.core_barrier(tile((4, 4)), (0, 1)), "data is in sbuf; has to be in shared_hbm"),
        (lambda a: nisa.core_barrier(a, (0,)), r"cores is \(0,\); has to be \(0, 1\)"),
        (
            lambda a: nisa.core_barrier(a, (0, 1)) if nl.program_id() else None,
            r"rank 0 core 1 waits in core_barrier 0, but rank 0 core 0 ended without it",
        ),
        (
            lambda a: nisa.core_barrier(a if nl.program_id() else shared((4, 4)), (0, 1)),
            "the cores name different tensors",
        ),
        (lambda a: shared((4, 4 + nl.program_id())), "both allocate the same ones in order"),
        (lambda a: shared((4, 4)) if nl.program_id() else None, "core 0 allocated 0 shared_hbm tensors, core 1 1"),
        (
            lambda a: [shared((4, 4)), shared((4, 4))][nl.program_id()],
            "the two cores of rank 0 return different tensors",
        ),
        (
            lambda a: (
                nisa.core_barrier(a, (0, 1)) if nl.program_id() else nisa.sendrecv(tile((4, 4)), tile((4, 4)), 1, 1, 0)
            ),
            "every core waits for another one: rank 0 core 0 in sendrecv 0 of pipe 0; rank 0 core 1 in core_barrier 0",
        ),
    ],
)
def test_cores_that_do_not_agree_are_told(body, message):
    def kernel(a):
        return body(a)

    for _ in range(3):
        with pytest.raises(NkiValidationError, match=message):
            probe.run(kernel, np.ones((4, 4), np.float32), lnc=2)


def test_an_error_on_one_core_ends_the_other():
    def kernel(a):
        if nl.program_id() == 1:
            raise KeyError("mine")
        nisa.core_barrier(a, (0, 1))

    with pytest.raises(KeyError, match="mine") as error:
        probe.run(kernel, np.ones((4, 4), np.float32), lnc=2)
    assert any("rank 0 core 1" in note for note in error.value.__notes__)


def test_both_cores_are_counted():
    def kernel(a):
        nisa.tensor_copy(tile((4, 4)), load(a))

    probe.run(kernel, np.ones((4, 4), np.float32), lnc=2)
    assert last_stats().count("tensor_copy") == 2
