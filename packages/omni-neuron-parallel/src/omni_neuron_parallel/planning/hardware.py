# SPDX-License-Identifier: Apache-2.0
"""Every hardware figure and every figure that others measured on a device, each with its source.

One rank runs on one logical core: two physical NeuronCores (LNC 2), a quarter of a chip. Figures that the vendor gives
for a chip are divided by four here, and the text says so. Nothing in this table was measured by the authors.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30
MIB = 2**20
PHYSICAL_PER_LOGICAL_CORE = 2

_HW = "AWS Neuron documentation 2.32, hardware pages (about-neuron/arch/neuron-hardware)"
_ARCH2 = "AWS Neuron documentation 2.32, NKI guide 'Trainium2 architecture'"
_ARCH3 = "AWS Neuron documentation 2.32, NKI guide 'Trainium3 architecture'"
_COLLECTIVES = "AWS Neuron documentation 2.32, Neuron runtime pages on collectives"
_FORK = "public fork reecedantin/vllm-omni-neuron of AWS's plugin"


@dataclass(frozen=True)
class Figure:
    """A number, its unit and where it comes from."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True)
class Target:
    """What the planner must know of one logical core.

    Attributes:
        name: as in NEURON_PLATFORM_TARGET_OVERRIDE.
        devices: logical cores of the instance that is assumed where none is given.
        hbm_bytes: device memory.
        hbm_bandwidth: of that memory.
        matmul_flops: TensorE, dense bfloat16.
        exponentials: ScalarE, one exponential a lane and cycle: what bounds softmax where matrix products do not.
        link_bandwidth: NeuronLink, received by one logical core.
        hop_seconds: fixed cost of one hop of a collective.
    """

    name: str
    devices: Figure
    hbm_bytes: Figure
    hbm_bandwidth: Figure
    matmul_flops: Figure
    exponentials: Figure
    link_bandwidth: Figure
    hop_seconds: Figure


_HOP = Figure(
    2e-6,
    "s",
    f"{_COLLECTIVES}: 1–2 µs a hop of Ring and KangaRing inside a node; the upper end. The cost of launching a "
    "collective is not documented and not in it",
)

TARGETS: dict[str, Target] = {
    "trn2": Target(
        "trn2",
        devices=Figure(64, "logical cores", f"{_HW}: trn2.48xlarge has 16 chips of 4 logical cores"),
        hbm_bytes=Figure(24 * GIB, "B", f"{_HW}: 96 GiB a chip in 4 banks of 24 GiB, each shared by 2 physical cores"),
        hbm_bandwidth=Figure(2.9e12 / 4, "B/s", f"{_HW}: 2.9 TB/s a chip, divided by 4"),
        matmul_flops=Figure(
            667e12 / 4, "FLOP/s", f"{_HW}: 667 TFLOPS a chip, divided by 4 (2 × 128² PEs × 2.4 GHz × 2 gives 157e12)"
        ),
        exponentials=Figure(
            128 * 1.2e9 * PHYSICAL_PER_LOGICAL_CORE, "1/s", f"{_ARCH2}: ScalarE, 128 lanes at 1.2 GHz, 2 physical cores"
        ),
        link_bandwidth=Figure(
            1024e9 / 4,
            "B/s",
            f"{_HW}: 1024 GB/s a chip inside the instance, divided by 4; also used between cores of one chip, for "
            "which no figure is documented",
        ),
        hop_seconds=_HOP,
    ),
    "trn3": Target(
        "trn3",
        devices=Figure(
            64, "logical cores", "no instance size assumed: as many as trn2.48xlarge, to compare; give yours"
        ),
        hbm_bytes=Figure(36 * GIB, "B", f"{_HW}: 144 GiB a chip in 4 stacks, divided by 4"),
        hbm_bandwidth=Figure(4.9e12 / 4, "B/s", f"{_HW}: 4.9 TB/s a chip, divided by 4 (the NKI guide says 4.7)"),
        matmul_flops=Figure(671e12 / 4, "FLOP/s", f"{_HW}: 671 TFLOPS a chip, divided by 4"),
        exponentials=Figure(
            256 * 1.2e9 * PHYSICAL_PER_LOGICAL_CORE,
            "1/s",
            f"{_ARCH3}: ScalarE, 256 lanes for 16-bit floats at 1.2 GHz, 2 physical cores",
        ),
        link_bandwidth=Figure(
            2560e9 / 4,
            "B/s",
            f"{_HW}: 2560 GB/s a chip, divided by 4; the same pages give 256 GB/s in a sled and 320 GB/s in a rack, "
            "and do not explain the difference",
        ),
        hop_seconds=_HOP,
    ),
}

# Bytes of a message at which the runtime changes its algorithm, documented for 64 ranks at LNC 2 (_COLLECTIVES): Mesh
# with one hop, then RDH with log2 n hops, then KangaRing with n / 2 hops.
MESH_BELOW = 1 * MIB
KANGARING_ABOVE = 56 * MIB


@dataclass(frozen=True)
class MeasuredMemory:
    """The only published account of device memory of a Wan2.2 layout, in bytes a logical core.

    The source adds up "14.7 GB weights + 1.5 scratch + 0.55 + 3.7 GB DMA spill per DiT graph × 2 ≈ 24.4 of 24 GB". A
    core's 24 GB are a bank of 24 GiB, so its GB are read as GiB; 0.55 is read as counted once, which gives 24.15 (per
    graph, it would give 24.7).

    Attributes:
        source: who measured.
        tp, cp, cfg: the layout.
        tokens: S of 720×1280×81.
        hidden: width of the model's token stream.
        weights: both experts' shards, the text encoder's over all 64 ranks, the VAE's.
        scratch: the runtime's scratchpad, which holds the intermediate tensors of a graph.
        unnamed: 0.55; the source does not say of what.
        dma_spill: DMA rings of one resident DiT graph that gathers K and V.
        graphs: resident DiT graphs, one an expert.
        total: the sum that the source prints.
    """

    source: str
    tp: int
    cp: int
    cfg: int
    tokens: int
    hidden: int
    weights: float
    scratch: float
    unnamed: float
    dma_spill: float
    graphs: int
    total: float

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of one context-parallel rank."""
        return self.tokens // self.cp

    @property
    def gathered_values(self) -> int:
        """Values of K that one rank gathers in a layer; what the DMA spill is scaled by."""
        return self.tokens * self.hidden // self.tp


MEASURED = MeasuredMemory(
    source=f"{_FORK}: trn2.48xlarge, Wan2.2 A14B, 720×1280×81, TP4×CP8×CFG2, K and V by all-gather",
    tp=4,
    cp=8,
    cfg=2,
    tokens=75_600,
    hidden=5120,
    weights=14.7 * GIB,
    scratch=1.5 * GIB,
    unnamed=0.55 * GIB,
    dma_spill=3.7 * GIB,
    graphs=2,
    total=24.4 * GIB,
)
