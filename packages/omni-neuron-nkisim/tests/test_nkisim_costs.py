# SPDX-License-Identifier: Apache-2.0
"""Counters and the cost model: figures by hand, and real sizes without data."""

import json
import re

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import nkisim_kernels as kernels
import nkisim_probe as probe
import numpy as np
import pytest
from nkisim_probe import load, normal, tile

from omni_neuron_nkisim import NkiValidationError, TensorSpec, last_stats, report, settings
from omni_neuron_nkisim.costs import COST_RULES

BF16 = "bfloat16"


def cycles(body, engine, **changes):
    """Cycles that `body` adds on an engine, on shapes alone."""

    def kernel():
        body()

    probe.run(kernel, execute=False, **changes)
    return last_stats().slowest().cycles.get(engine, 0.0)


def b(*shape):
    return tile(shape, BF16)


def f(*shape):
    return tile(shape)


def ps(*shape):
    return tile(shape, "float32", nl.psum)


def mm(m, n, dtype=BF16, **options):
    nisa.nc_matmul(ps(m, n), tile((128, m), dtype), tile((128, n), dtype), accumulate=False, **options)


@pytest.mark.parametrize(
    ("body", "engine", "wanted"),
    [
        # The arithmetic of one 128 x 512 tile of attention: 512 TE cycles for each product, 512 SE cycles for exp.
        (lambda: mm(128, 512), "tensor", 512),
        (lambda: mm(128, 16), "tensor", 64),
        (lambda: mm(128, 512, "float32"), "tensor", 2048),
        (lambda: mm(128, 512, "float32", is_moving_onezero=True), "tensor", 1024),
        (lambda: nisa.nc_transpose(tile((128, 128), BF16, nl.psum), b(128, 128)), "tensor", 128),
        (lambda: nisa.nc_transpose(ps(128, 128), f(128, 128)), "tensor", 256),
        (lambda: nisa.activation(b(128, 512), nl.exp, ps(128, 512)), "scalar", 512),
        (lambda: nisa.activation_reduce(b(8, 16), nl.exp, f(8, 16), nl.add, f(8, 1)), "scalar", 128),
        (lambda: nisa.tensor_copy(b(128, 512), b(128, 512)), "vector", 128),
        (lambda: nisa.tensor_copy(b(128, 512), b(128, 1024)[:, ::2]), "vector", 256),
        (lambda: nisa.tensor_copy(b(128, 512), tile((128, 512), BF16, nl.psum)), "vector", 256),
        (lambda: nisa.tensor_copy(b(128, 512), ps(128, 512)), "vector", 512),
        (lambda: nisa.tensor_scalar(f(128, 512), f(128, 512), nl.add, 1.0), "vector", 512),
        (lambda: nisa.tensor_tensor(f(128, 512), f(128, 512), f(128, 512), nl.add), "vector", 1024),
        (lambda: nisa.tensor_tensor(b(128, 512), b(128, 512), b(128, 512), nl.add), "vector", 512),
        (
            lambda: nisa.scalar_tensor_tensor(b(128, 512), b(128, 512), nl.multiply, 2.0, nl.add, b(128, 512)),
            "vector",
            512,
        ),
        (
            lambda: nisa.tensor_tensor_scan(b(8, 512), b(8, 512), b(8, 512), 0.0, nl.multiply, nl.add),
            "vector",
            1024,
        ),
        (lambda: nisa.reciprocal(f(128, 4), f(128, 4)), "vector", 64),
        (lambda: nisa.reciprocal(f(128, 512), f(128, 512)), "vector", 4096),
        (lambda: nisa.tensor_reduce(f(128, 1), nl.maximum, ps(128, 512), 1), "vector", 512),
        (lambda: nisa.tensor_copy(f(128, 512), f(128, 512), engine=nisa.engine.scalar), "scalar", 512),
        (lambda: nisa.iota(f(128, 512), [[1, 512]]), "gpsimd", 512),
    ],
)
def test_cycles_of_trn2(body, engine, wanted):
    assert cycles(body, engine) == wanted


def test_cycles_that_differ_on_trn3():
    assert cycles(lambda: nisa.exponential(b(128, 512), ps(128, 512)), "vector", target="trn3") == 128
    copy = lambda: nisa.tensor_copy(b(128, 512), b(128, 512), engine=nisa.engine.scalar)  # noqa: E731
    assert (cycles(copy, "scalar", target="trn2"), cycles(copy, "scalar", target="trn3")) == (512, 256)
    fp8 = lambda: nisa.tensor_copy(tile((128, 512), "float8_e4m3"), b(128, 512))  # noqa: E731
    assert (cycles(fp8, "vector", target="trn2"), cycles(fp8, "vector", target="trn3")) == (512, 128)

    def mx():
        operand, scale = tile((128, 512), "float8_e4m3fn_x4"), tile((128, 512), "uint8")
        nisa.nc_matmul_mx(ps(128, 512), operand[:, 0:128], operand, scale[:, 0:128], scale, accumulate=False)

    assert cycles(mx, "tensor", target="trn3") == 512
    assert last_stats().slowest().flops == 2 * 512 * 128 * 512


def dma(dst, src):
    def kernel():
        nisa.dma_copy(dst(), src())

    probe.run(kernel, execute=False)
    return last_stats().slowest()


def hbm(*shape, dtype=BF16):
    return nl.ndarray(shape, dtype, buffer=nl.shared_hbm)


def test_dma_is_bound_by_descriptors_or_bytes_of_the_busiest_engine():
    small = dma(lambda: b(128, 64), lambda: hbm(128, 64))
    assert small.busy_ns["dma"] == 800  # 8 rows of 128 bytes on each engine, 100 ns each
    large = dma(lambda: b(128, 4096), lambda: hbm(128, 4096))
    assert large.busy_ns["dma"] == pytest.approx(8 * 8192 / 23)
    few = dma(lambda: b(4, 4096), lambda: hbm(4, 4096))
    assert few.busy_ns["dma"] == pytest.approx(4 * 8192 / 23)  # 1,425 ns; 1,416 were measured
    strided = dma(lambda: b(128, 64), lambda: hbm(128, 128)[:, ::2])
    assert strided.busy_ns["dma"] == 8 * 64 * 100
    assert large.hbm_read_bytes == 128 * 8192
    assert large.hbm_written_bytes == 0
    assert large.in_order_ns == pytest.approx(8 * 8192 / 23 + 1300)


def test_hops_of_collectives():
    def kernel():
        everyone = ncc.ReplicaGroup([list(range(8))])
        ncc.collective_permute_implicit([hbm(1024, 64)], [hbm(1024, 64)], everyone)

    probe.spmd(kernel, [()] * 8, lnc=2, execute=False)
    assert last_stats().slowest().busy_ns["collective"] == pytest.approx(1500 + 1024 * 128 / 128)

    def reduce():
        ncc.all_reduce([hbm(1024, 64)], [hbm(1024, 64)], ncc.ReplicaGroup([list(range(8))]), nl.add)

    probe.spmd(reduce, [()] * 8, lnc=2, execute=False)
    assert last_stats().slowest().busy_ns["collective"] == pytest.approx(14 * (1500 + 1024 * 128 / 8 / 128))


def test_one_rank_stands_for_equal_ones():
    def kernel(a):
        everyone, buffers = ncc.ReplicaGroup([list(range(4))]), [hbm(*a.shape), hbm(*a.shape)]
        nisa.dma_copy(buffers[0], a)
        for step in range(3):
            ncc.collective_permute_implicit([buffers[step % 2]], [buffers[(step + 1) % 2]], everyone)
            data = tile(a.shape, BF16)
            nisa.dma_copy(data, buffers[(step + 1) % 2])
            nisa.activation(data, nl.exp, data)

    spec = TensorSpec((128, 512), BF16)
    for lnc in (1, 2):
        probe.spmd(kernel, [(spec,)] * 4, lnc=lnc, execute=False)
        every = last_stats()
        probe.spmd(kernel, [(spec,)], lnc=lnc, execute=False, symmetric_ranks=4)
        one = last_stats()
        assert len(every.cores) == 4 * lnc and len(one.cores) == lnc
        assert one.cores[0, 0].as_dict() == every.cores[0, 0].as_dict() == every.cores[3, 0].as_dict() | {"rank": 0}
    with pytest.raises(NkiValidationError, match="symmetric_ranks is 4; it goes with execute=False and one entry"):
        probe.spmd(kernel, [(np.ones((128, 512), np.float32),)], symmetric_ranks=4)


def test_what_of_an_engine_is_exposed():
    def kernel(hidden):
        everyone, here, there = ncc.ReplicaGroup([[0, 1]]), hbm(4096, 64), hbm(4096, 64)
        data = b(128, 2048)
        ncc.collective_permute_implicit([here], [there], everyone)
        if not hidden:
            nisa.dma_copy(data, there)
        for _ in range(8):
            nisa.activation(data, nl.exp, data)

    def in_order(hidden, **changes):
        probe.spmd(kernel, [(hidden,)], execute=False, symmetric_ranks=2, **changes)
        stats = last_stats().slowest()
        assert stats.busy_ns["collective"] == pytest.approx(1500 + 4096 * 128 / 64)
        return stats.in_order_ns

    assert in_order(True) == in_order(True, free_engines=("collective",))
    exposed = in_order(False) - in_order(False, free_engines=("collective",))
    assert exposed == pytest.approx(1500 + 4096 * 128 / 64)


def test_counters_name_engine_and_instruction():
    kernels.rms_norm(normal(256, 64), normal(1, 64), 1e-6)
    stats = last_stats()
    assert stats.count("activation_reduce") == 2
    assert stats.count("tensor_reduce") == 0
    assert stats.count("activation", "scalar") == 2
    assert stats.count("activation", "vector") == 0
    assert stats.kernel == "rms_norm"


def test_shapes_alone_give_the_counters_of_a_run():
    arrays = normal(64, 256), normal(64, 256), normal(256, 64)
    kernels.attention(*arrays, 0.125)
    executed = last_stats().as_dict()
    with settings(execute=False):
        result = kernels.attention(*(TensorSpec(a.shape, "float32") for a in arrays), 0.125)
    assert result == TensorSpec((256, 64), "float32")
    assert last_stats().as_dict() == executed


def test_real_sizes_are_costed_without_their_memory():
    # The up projection of a 14B video DiT at 480p, one of four ranks: [32768, 5120] x [5120, 3456].
    with settings(execute=False):
        kernels.matmul(TensorSpec((5120, 4096), BF16), TensorSpec((5120, 3584), BF16))
    stats = last_stats().slowest()
    assert stats.flops == 2 * 5120 * 4096 * 3584
    assert stats.cycles["tensor"] == 32 * 7 * 40 * 512
    assert stats.roofline()["flops"] == stats.flops


def test_independent_streams_overlap_and_dependent_ones_wait():
    def dependent():
        x = f(128, 512)
        for _ in range(8):
            nisa.tensor_scalar(x, x, nl.add, 1.0)
            nisa.activation(x, nl.exp, x)

    def independent():
        x, y = f(128, 512), f(128, 512)
        for _ in range(8):
            nisa.tensor_scalar(x, x, nl.add, 1.0)
            nisa.activation(y, nl.exp, y)

    ends = []
    for body in (dependent, independent):
        cycles(body, "vector")
        stats = last_stats().slowest()
        ends.append((stats.bound_ns, stats.in_order_ns))
    assert ends[0][0] == ends[1][0] == pytest.approx(8 * 512 / 0.96)
    # A chain pays both engines, and 100 cycles at each hand-over.
    assert ends[0][1] == pytest.approx(8 * (612 / 0.96 + 612 / 1.2))
    assert ends[1][1] == pytest.approx(8 * 612 / 0.96)


def test_writers_wait_for_readers_of_another_engine():
    def body():
        x, y, z = f(128, 512), f(128, 512), f(128, 512)
        nisa.activation(y, nl.exp, x)
        nisa.tensor_scalar(x, z, nl.add, 1.0)

    cycles(body, "vector")
    assert last_stats().slowest().in_order_ns == pytest.approx(512 / 1.2 + 612 / 0.96)


def test_an_engine_adds_to_its_own_result_without_waiting():
    def body():
        operand, total = b(128, 512), ps(128, 512)
        for k in range(4):
            nisa.nc_matmul(total, operand[:, 0:128], operand, accumulate=k > 0)

    cycles(body, "tensor")
    assert last_stats().slowest().in_order_ns == pytest.approx((4 * 512 + 100) / 2.4)


def test_banks_of_one_psum_tile_are_told_apart():
    def body():
        operand, scores = b(128, 512), ps(128, 4, 512)
        for bank in range(4):
            nisa.nc_matmul(scores[:, bank], operand[:, 0:128], operand, accumulate=False)
            nisa.activation(b(128, 512), nl.exp, scores[:, bank])

    cycles(body, "tensor")
    stats = last_stats().slowest()
    # Four matmuls run ahead; the activations follow the first one back to back.
    assert stats.in_order_ns == pytest.approx((512 + 100) / 2.4 + (4 * 512 + 100) / 1.2)


def test_transfers_that_wait_do_not_hold_up_others():
    def body():
        x, out = f(128, 512), hbm(128, 512, dtype="float32")
        nisa.activation(x, nl.exp, f(128, 512))
        nisa.dma_copy(out, x)
        late = f(128, 512)
        nisa.dma_copy(late, hbm(128, 512, dtype="float32"))
        nisa.tensor_scalar(late, late, nl.add, 1.0)

    cycles(body, "vector")
    one = 8 * 100.0
    stats = last_stats().slowest()
    assert stats.busy_ns["dma"] == pytest.approx(2 * one)
    assert stats.in_order_ns == pytest.approx(2 * one + 1300 + 612 / 0.96)


def dma_after(compute, stores):
    """In-order time of 4096-element stores that are ready after some activations, and of one DMA."""

    def body():
        x, out = f(128, 4096), hbm(stores, 128, 4096, dtype="float32")
        for _ in range(compute):
            nisa.activation(x, nl.exp, x)
        for n in range(stores):
            nisa.dma_copy(out[n], x)

    cycles(body, "scalar")
    return last_stats().slowest().in_order_ns


def test_time_that_dma_was_idle_is_gone():
    one = 8 * 4096 * 4 / 23
    assert dma_after(0, 1) == pytest.approx(one + 1300)
    for stores in (1, 21, 41):
        assert dma_after(400, stores) == pytest.approx(400 * (4096 + 100) / 1.2 + stores * one + 1300)


def test_transfers_of_few_partitions_share_the_engines():
    """Sixteen of eight partitions each, on engines of their own, take as long as one of 128."""

    def body(parts):
        x, source = f(128, 4096), hbm(128, 4096, dtype="float32")
        for first in range(0, 128, 128 // parts):
            rows = slice(first, first + 128 // parts)
            nisa.dma_copy(x[rows], source[rows])

    for parts in (1, 16):
        cycles(lambda n=parts: body(n), "vector")
        stats = last_stats().slowest()
        assert stats.bound_ns == stats.busy_ns["dma"] == pytest.approx(8 * 4096 * 4 / 23)
        assert stats.in_order_ns == pytest.approx(8 * 4096 * 4 / 23 + 1300)


def test_the_last_of_two_transfers_into_a_tile_is_waited_for():
    """The first one waits for its data, and ends after the second."""

    def body(first):
        late, x, y = f(128, 4096), f(128, 512), f(128, 512)
        for _ in range(8):
            nisa.activation(late, nl.exp, late)
        loads = [(x[:, 0:256], late[:, 0:256]), (x[:, 256:512], hbm(128, 256, dtype="float32"))]
        for dst, src in loads if first else reversed(loads):
            nisa.dma_copy(dst, src)
        nisa.tensor_scalar(y, x, nl.multiply, 2.0)

    for first in (True, False):
        cycles(lambda order=first: body(order), "vector")
        wanted = 8 * (4096 + 100) / 1.2 + 8 * 100 + 1300 + 612 / 0.96
        assert last_stats().slowest().in_order_ns == pytest.approx(wanted)


def test_a_barrier_joins_the_clocks_of_both_cores():
    def kernel():
        flag, x = hbm(4, 4), f(128, 4096)
        if nl.program_id() == 0:
            nisa.activation(x, nl.exp, x)
            nisa.dma_copy(flag, x[0:4, 0:4])
        nisa.core_barrier(flag, (0, 1))
        y = tile((4, 4), BF16)
        nisa.dma_copy(y, flag)

    probe.run(kernel, lnc=2, execute=False)
    cores = last_stats().cores
    assert cores[0, 1].in_order_ns == pytest.approx(cores[0, 0].in_order_ns, rel=0.05)
    assert cores[0, 1].in_order_ns > 4096 / 1.2


def test_live_memory_is_an_upper_bound_by_python():
    def body():
        for _ in range(3):
            nisa.memset(f(128, 1024), 0.0)

    def held():
        kept = [f(128, 1024) for _ in range(3)]
        nisa.memset(kept[0], 0.0)

    cycles(body, "vector")
    assert last_stats().slowest().peak_live_bytes["sbuf"] == 4096
    cycles(held, "vector")
    assert last_stats().slowest().peak_live_bytes["sbuf"] == 3 * 4096


def test_the_table_and_the_json_say_the_same():
    kernels.attention(normal(64, 256), normal(64, 256), normal(256, 64), 0.125)
    table, data = report(), json.loads(report("json"))
    [core] = data["cores"]
    for engine, part in core["engines"].items():
        [row] = [line for line in table.splitlines() if line.startswith(engine)]
        assert f"{part['busy_fraction']:.1%}" in row
        assert str(sum(part["instructions"].values())) in row
    assert f"bound by {core['bound_by']}" in table
    assert "nothing was compiled or measured on a device" in table
    assert core["engines"][core["bound_by"]]["busy_fraction"] == 1.0
    assert core["in_order_ns"] >= core["bound_ns"]
    assert len(data["cost_rules"]) == len(COST_RULES)
    with pytest.raises(ValueError, match="form is 'csv'; table or json"):
        report("csv")


def test_every_cost_rule_names_a_source():
    for rule in COST_RULES:
        assert re.search(r"\[[A-Z0-9]+\]|assumed|not published", rule.source), rule


def test_roofline():
    x = np.ones((128, 512), np.float32)

    def kernel(a):
        data = load(a)
        nisa.nc_matmul(ps(128, 512), data[:, 0:128], data, accumulate=False)

    probe.run(kernel, x)
    roof = last_stats().slowest().roofline()
    assert roof["flops_per_byte"] == 2 * 128 * 128 * 512 / (128 * 512 * 4)
    assert roof["bound"] == "memory"
