# SPDX-License-Identifier: Apache-2.0
"""The two chip generations that are simulated: sizes, clocks and rates of one NeuronCore.

Sources are pages of the AWS Neuron documentation, SDK 2.32: [A3] trainium2_arch, [A4] trainium3_arch
(guides/architecture), [BW] nki-dma-bandwidth-guide, [HW] about-neuron/arch/neuron-hardware, [CC] runtime collectives.
"""

from __future__ import annotations

from dataclasses import dataclass

from omni_neuron_nkisim.errors import NkiValidationError

PARTITIONS = 128
PSUM_BANK_BYTES = 2048
PSUM_BANKS = 8
PSUM_BYTES_PER_PARTITION = PSUM_BANK_BYTES * PSUM_BANKS


@dataclass(frozen=True)
class Target:
    """One chip generation, as far as the simulator needs it.

    Attributes:
        name: as in NEURON_PLATFORM_TARGET_OVERRIDE.
        generation: `nisa.nc_version` number, 3 for trn2 and 4 for trn3.
        sbuf_bytes: bytes of SBUF per partition ([A3], [A4]); what the compiler reserves of it is not published.
        matmul_fp32_columns: largest N of a matmul with a float32 destination.
        clock_ghz: per engine ([A3], [A4]).
        dma_bytes_per_ns: sustained, of one of the 16 DMA engines of a core ([BW]).
        hbm_gb_s: a core's equal share of the chip's HBM ([A3] 2.9 TB/s and [A4] 4.7 TB/s over 8 cores).
        link_gb_s: a core's share of its chip's links inside the node, one direction ([HW]: 1,024 GB/s of trn2 and 2,560
            GB/s of trn3 for both directions of 8 cores). The pages give no figure per core.
        bf16_tflops: peak of TensorE ([A3], [A4]).
    """

    name: str
    generation: int
    sbuf_bytes: int
    matmul_fp32_columns: int
    clock_ghz: dict[str, float]
    dma_bytes_per_ns: float
    hbm_gb_s: float
    link_gb_s: float
    bf16_tflops: float


TARGETS = {
    "trn2": Target(
        name="trn2",
        generation=3,
        sbuf_bytes=224 * 1024,
        matmul_fp32_columns=512,
        clock_ghz={"tensor": 2.4, "vector": 0.96, "scalar": 1.2, "gpsimd": 1.2},
        dma_bytes_per_ns=23.0,
        hbm_gb_s=362.0,
        link_gb_s=64.0,
        bf16_tflops=79.0,
    ),
    "trn3": Target(
        name="trn3",
        generation=4,
        sbuf_bytes=256 * 1024,
        matmul_fp32_columns=4096,
        clock_ghz={"tensor": 2.4, "vector": 1.2, "scalar": 1.2, "gpsimd": 1.2},
        dma_bytes_per_ns=33.0,
        hbm_gb_s=587.0,
        link_gb_s=160.0,
        bf16_tflops=79.0,
    ),
}
_ALIASES = {"gen3": "trn2", "gen4": "trn3"}


def resolve_target(name: str) -> Target:
    """The target of a name (`trn2`/`gen3`, `trn3`/`gen4`).

    Raises:
        NkiValidationError: another name; generations before trn2 are not simulated.
    """
    target = TARGETS.get(_ALIASES.get(name, name))
    if target is None:
        raise NkiValidationError(f"platform target {name!r} is not simulated; trn2 (gen3) and trn3 (gen4) are")
    return target
