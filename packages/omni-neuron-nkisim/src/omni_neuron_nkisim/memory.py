# SPDX-License-Identifier: Apache-2.0
"""Storage: bytes that views address, poisoned while fresh; what the two cores of an LNC 2 see of shared HBM.

At LNC 2 each core sees of a shared HBM tensor what was there at the last barrier or collective on that tensor, plus its
own writes. Which bytes a core read and wrote since is recorded, and a barrier, a collective or the kernel's end
raises if one core wrote what the other read before writing it itself, or if both wrote different values; equal ones
are no race, since their order shows nowhere. A forgotten barrier is therefore found whatever the threads' timing: the
reader gets poison (or the old value), and the kernel fails.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_neuron_nkisim.dtypes import DType, poison
from omni_neuron_nkisim.errors import NkiValidationError


class MemoryRegion(StrEnum):
    """Where a tensor lies (`nki.language.MemoryRegion`)."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"


SBUF, PSUM = MemoryRegion.sbuf, MemoryRegion.psum
PRIVATE_HBM, SHARED_HBM = MemoryRegion.private_hbm, MemoryRegion.shared_hbm
ON_CHIP = (SBUF, PSUM)
HBM = (PRIVATE_HBM, SHARED_HBM)

# What wrote a byte of PSUM last; accumulation depends on it.
PSUM_UNWRITTEN, PSUM_BY_MATMUL, PSUM_BY_OTHER = 0, 1, 2

Bytes = NDArray[np.uint8]


@dataclass
class _CoreView:
    """What one of two cores has done to a shared tensor since the last synchronisation.

    Attributes:
        read: bytes that it read before it had written them itself.
        written: bytes that it wrote.
        copy: the bytes as it sees them, once it has written any.
    """

    read: NDArray[np.bool_]
    written: NDArray[np.bool_]
    copy: Bytes | None = None

    def masks(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """`read` and `written`."""
        return self.read, self.written


@dataclass(eq=False)
class Timeline:
    """When the parts of a storage are written and read in the cost model, in ns of simulated time, per core."""

    write_end: list[float]
    write_engine: list[str]
    read_end: list[float]
    read_engine: list[str]


@dataclass(eq=False)
class Storage:
    """A tile or an HBM tensor.

    Attributes:
        region: one of sbuf, psum, private_hbm, shared_hbm.
        name: what the kernel called it, or its dtype and shape.
        nbytes: its size.
        row_bytes: bytes per partition, on chip; all bytes, in HBM.
        start_partition: where it begins, if the kernel gave an address.
        base: the bytes; None where nothing is executed.
        psum_writers: of PSUM, who wrote each byte.
        cores: of shared HBM at LNC 2, what each core did since the last synchronisation.
        timelines: by core, for the cost model.
    """

    region: MemoryRegion
    name: str
    nbytes: int
    row_bytes: int
    start_partition: int = 0
    base: Bytes | None = None
    psum_writers: Bytes | None = None
    cores: list[_CoreView] | None = None
    timelines: dict[int, Timeline] = field(default_factory=dict)

    def share(self) -> None:
        """From here on two cores see it, each its own writes until they synchronise."""
        if self.base is not None:
            self.cores = [_CoreView(np.zeros(self.nbytes, np.bool_), np.zeros(self.nbytes, np.bool_)) for _ in range(2)]

    def bytes_to_read(self, core: int) -> Bytes:
        """What `core` sees."""
        assert self.base is not None
        copy = self.cores[core].copy if self.cores is not None else None
        return self.base if copy is None else copy

    def bytes_to_write(self, core: int) -> Bytes:
        """Where `core` writes."""
        assert self.base is not None
        if self.cores is None:
            return self.base
        view = self.cores[core]
        if view.copy is None:
            view.copy = self.base.copy()
        return view.copy

    def synchronise(self, where: str) -> None:
        """Make both cores' writes visible to both; only while neither runs.

        Raises:
            NkiValidationError: one core wrote what the other read, or both wrote different values, since the last time.
        """
        if self.cores is None:
            return
        assert self.base is not None
        first, second = self.cores
        if first.copy is not None and second.copy is not None:
            both = first.written & second.written
            self._refuse(both & (first.copy != second.copy), "both cores wrote", where)
        for writer, reader, number in ((first, second, 0), (second, first, 1)):
            if writer.copy is not None:
                what = f"core {number} wrote and core {1 - number} read"
                self._refuse(writer.written & reader.read, what, where)
        for view in self.cores:
            if view.copy is not None:
                self.base[view.written] = view.copy[view.written]
        self.share()

    def _refuse(self, racing: NDArray[np.bool_], what: str, where: str) -> None:
        if racing.any():
            position = np.flatnonzero(racing)
            raise NkiValidationError(
                f"race on shared HBM tensor {self.name}: {what} {position.size} bytes (first {position[0]}, last "
                f"{position[-1]} of {self.nbytes}) without a core_barrier or collective on it between; found at {where}"
            )


def fresh_bytes(nbytes: int, dtype: DType) -> Bytes:
    """Poisoned bytes for elements of `dtype`."""
    return np.tile(poison(dtype), nbytes // dtype.itemsize)


def bytes_of(array: Any) -> Bytes:
    """The memory of a C-contiguous NumPy array as bytes, without a copy."""
    return array.reshape(-1).view(np.uint8)
