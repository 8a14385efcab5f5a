# SPDX-License-Identifier: Apache-2.0
"""What an instruction costs its engine, from the figures that AWS publishes; every rule names its source.

Pages of the Neuron documentation, SDK 2.32: [A2], [A3], [A4] architecture guides of trainium/inferentia2, trainium2 and
trainium3; [PG] nki_perf_guide; [SH] nki.api.shared; [ISA] nki.isa pages; [BW] nki-dma-bandwidth-guide; [DMA]
nki-dma-overview; [MX] mxfp-matmul; [CC] runtime collectives. "assumed" marks what no page says.

Cycles are those of steady, independent streams. `DEPENDENT_CYCLES` is what a result takes to reach whoever waits for
it; only the in-order estimate of the report adds it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from omni_neuron_nkisim.dtypes import FLOAT16S, FP8
from omni_neuron_nkisim.layout import contiguous_run
from omni_neuron_nkisim.memory import HBM, SBUF
from omni_neuron_nkisim.target import PARTITIONS, Target
from omni_neuron_nkisim.tensors import NkiTensor

TENSOR, VECTOR, SCALAR, GPSIMD = "tensor", "vector", "scalar", "gpsimd"
DMA, COLLECTIVE, SYNC = "dma", "collective", "sync"
ENGINES = (TENSOR, VECTOR, SCALAR, GPSIMD, DMA, COLLECTIVE, SYNC)

LEAST_CYCLES = 64
DEPENDENT_CYCLES = 100
DMA_LATENCY_NS = 1300.0
DMA_ROW_NS = 100.0
DMA_ENGINES = 16
COLLECTIVE_HOP_NS = 1500.0


@dataclass(frozen=True)
class CostRule:
    """How the cost of some instructions is computed.

    Attributes:
        instructions: their names.
        formula: cycles or time, in words.
        source: the pages it was taken from, or what was assumed.
    """

    instructions: str
    formula: str
    source: str


COST_RULES = (
    CostRule(
        "nc_matmul",
        "max(max(N, 64) * w, M/4 * w) TE cycles; w = 4 for float32 inputs (2 if one is one/zero), else 1",
        "[A2][PG] issue interval and background LoadStationary; [A2][A3][A4] float32 peak; [ISA] one/zero "
        "hint. The interval of 64 is published for gen2 only and assumed for trn2 and trn3",
    ),
    CostRule("nc_matmul with double_row", "as the same instruction in bfloat16", "[A3]"),
    CostRule("nc_matmul_mx", "max(N, 64) TE cycles, M/4 in the background", "[A4][MX]"),
    CostRule(
        "nc_transpose on TE",
        "max(P, 64) TE cycles, twice that for float32",
        "[A2] identity stream; [A3] transpose mode",
    ),
    CostRule("nc_transpose on VE", "F VE cycles", "assumed: one input"),
    CostRule(
        "tensor_copy, tensor_scalar on VE",
        "F cycles; F/4 for 16-bit floats from SBUF to SBUF, contiguous; F/2 if not contiguous, or contiguous "
        "with one side in PSUM; FP8 counts as 16-bit on trn3",
        "[A2] one input; [A3] fast modes; [A4] FP8",
    ),
    CostRule(
        "tensor_tensor on VE, scalar_tensor_tensor",
        "2F cycles; F if both inputs are in SBUF and all are 16-bit floats",
        "[A2] two inputs; [A3] fast mode; [ISA] cost of tensor_tensor for the second",
    ),
    CostRule(
        "tensor_tensor_scan, select_reduce, tensor_copy_predicated",
        "2F VE cycles",
        "[A2] two inputs; [A3] no fast mode",
    ),
    CostRule(
        "tensor_reduce, tensor_scalar_reduce, range_select, bn_stats, bn_aggr, memset, nc_stream_shuffle",
        "F VE cycles",
        "[A2] one input; assumed for memset and nc_stream_shuffle",
    ),
    CostRule("reciprocal", "max(64, 8F) VE cycles", "[SH]"),
    CostRule("exponential, quantize_mx", "F/4 VE cycles", "[A4]; for exponential derived from 4 x the ScalarE rate"),
    CostRule("activation, activation_reduce", "max(64, F) SE cycles, 64 more if the registers are read", "[SH]; [A2]"),
    CostRule("tensor_copy, tensor_scalar on SE", "F cycles; F/2 for 16-bit floats on trn3", "[A2]; [A4]"),
    CostRule("every instruction above", "at least 64 cycles, whatever P is", "[SH]; [A2]"),
    CostRule(
        "anything on GpSimd", "F cycles, 2F with two inputs, 4F for rsqrt", "assumed, except the factor of rsqrt [ISA]"
    ),
    CostRule(
        "dma_copy, dma_transpose, dma_compute, sendrecv",
        "busiest of 16 engines (partition p on engine p//8): runs x max(100 ns, bytes of a run / rate); 1,300"
        " ns until the data is there; dma_compute at half the rate on trn2; dma_transpose at 0.9 of it from "
        "HBM, 0.5 from SBUF",
        "[BW][DMA]; the 100 ns are derived from the curve in [DMA]; [A3] transposes; HBM to HBM spreads "
        "evenly (assumed)",
    ),
    CostRule(
        "collectives",
        "hops x (1,500 ns + bytes of a hop / link rate); hops: 1 for a permute, n-1 for gather, scatter and "
        "all_to_all, 2(n-1) for all_reduce",
        "[CC] ring, 1 to 2 us per hop; the rate is an equal share of the chip's links [HW]",
    ),
    CostRule("core_barrier, registers, rank_id", "0", "not published"),
)


def cycles_to_ns(target: Target, engine: str, cycles: float) -> float:
    """Time of `cycles` on an engine."""
    return cycles / target.clock_ghz[engine]


def matmul_cycles(stationary: NkiTensor, moving: NkiTensor, m: int, n: int, onezero: bool) -> float:
    """TE cycles of one matmul, LoadStationary included where it is the longer part."""
    weight = 1.0
    if stationary.dtype == "float32" or moving.dtype == "float32":
        weight = 2.0 if onezero else 4.0
    return max(max(n, LEAST_CYCLES) * weight, m / 4 * weight)


def _short(target: Target, *tensors: NkiTensor) -> bool:
    narrow = FLOAT16S + (FP8 if target.generation >= 4 else ())
    return all(tensor.dtype in narrow for tensor in tensors)


def copy_cycles(target: Target, engine: str, dst: NkiTensor, data: NkiTensor) -> float:
    """Cycles of tensor_copy and tensor_scalar with its one tensor input."""
    free = float(dst.free)
    if engine == SCALAR and target.generation >= 4 and _short(target, dst, data):
        free /= 2
    if engine == VECTOR and _short(target, dst, data):
        in_sbuf = dst.buffer == SBUF and data.buffer == SBUF
        contiguous = all(contiguous_run(t.shape[1:], t.strides[1:]) > 1 or t.free == 1 for t in (dst, data))
        if in_sbuf and contiguous:
            free /= 4
        elif in_sbuf or (contiguous and (dst.buffer == SBUF or data.buffer == SBUF)):
            free /= 2
    return max(LEAST_CYCLES, free)


def two_input_cycles(target: Target, engine: str, dst: NkiTensor, first: NkiTensor, second: NkiTensor) -> float:
    """Cycles of tensor_tensor and scalar_tensor_tensor."""
    fast = engine == VECTOR and first.buffer == SBUF and second.buffer == SBUF and _short(target, dst, first, second)
    return max(LEAST_CYCLES, dst.free * (1.0 if fast else 2.0))


def one_input_cycles(free: float) -> float:
    """Cycles of an instruction that streams `free` elements per partition."""
    return max(LEAST_CYCLES, free)


def dma_loads(target: Target, dst: NkiTensor, src: NkiTensor) -> tuple[float, ...]:
    """Time, in ns, that each of the 16 DMA engines needs for its part of a transfer, after the latency."""
    run = min(contiguous_run(*_dma_dims(t)) * t.element.itemsize for t in (dst, src))
    total = max(dst.size * dst.element.itemsize, src.size * src.element.itemsize)
    on_chip = next((t for t in (dst, src) if t.buffer not in HBM), None)
    if on_chip is None and run > 4096:
        # A long run between HBM tensors is cut and spread.
        return (max(DMA_ROW_NS, total / DMA_ENGINES / target.dma_bytes_per_ns),) * DMA_ENGINES
    descriptors = math.ceil(total / run)
    descriptor_ns = max(DMA_ROW_NS, run / target.dma_bytes_per_ns)
    if on_chip is None:
        engines = min(DMA_ENGINES, descriptors)
        return (math.ceil(descriptors / DMA_ENGINES) * descriptor_ns,) * engines + (0.0,) * (DMA_ENGINES - engines)
    # Partition p is served by engine p // 8, so a transfer of few partitions uses few engines.
    loads = [0.0] * DMA_ENGINES
    step = on_chip.strides[0] * on_chip.element.itemsize // on_chip.storage.row_bytes
    for n in range(on_chip.partitions):
        engine = (on_chip.start_partition + n * step) // (PARTITIONS // DMA_ENGINES)
        loads[engine] += math.ceil(descriptors / on_chip.partitions) * descriptor_ns
    return tuple(loads)


def _dma_dims(tensor: NkiTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    on_chip = tensor.on_chip and tensor.ndim > 1
    return (tensor.shape[1:], tensor.strides[1:]) if on_chip else (tensor.shape, tensor.strides)


def transpose_rate(src: NkiTensor) -> float:
    """Part of the DMA rate that a transpose reaches."""
    return 0.9 if src.buffer in HBM else 0.5


def collective_ns(target: Target, lnc: int, hops: int, bytes_per_hop: float) -> float:
    """Time of a collective on its ring, for the bytes that a rank of `lnc` cores sends per hop."""
    return hops * (COLLECTIVE_HOP_NS + bytes_per_hop / (target.link_gb_s * lnc))
