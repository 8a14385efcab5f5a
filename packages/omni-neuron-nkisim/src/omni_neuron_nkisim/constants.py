# SPDX-License-Identifier: Apache-2.0
"""Enumerations of `nki.isa`."""

from __future__ import annotations

from enum import Enum


class engine(Enum):  # noqa: N801 - NKI's name
    """The engines of a core."""

    unknown = 0
    tensor = 1
    scalar = 2
    gpsimd = 3
    dma = 4
    vector = 5
    sync = 6


class reduce_cmd(Enum):  # noqa: N801 - NKI's name
    """What happens to an accumulator."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class dge_mode(Enum):  # noqa: N801 - NKI's name
    """Who makes DMA descriptors."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class oob_mode(Enum):  # noqa: N801 - NKI's name
    """What an indirect access out of bounds does."""

    error = 0
    skip = 1


class matmul_perf_mode(Enum):  # noqa: N801 - NKI's name
    """Modes of `nc_matmul`."""

    none = "none"
    double_row = "double_row"


class nc_version(Enum):  # noqa: N801 - NKI's name
    """Generations of the NeuronCore."""

    gen2 = 2
    gen3 = 3
    gen4 = 4


class dma_engine(Enum):  # noqa: N801 - NKI's name
    """Which DMA `sendrecv` uses."""

    dma = 1
    gpsimd_dma = 2
