# SPDX-License-Identifier: Apache-2.0
"""The state of one simulated core: whose thread this is, its accumulators, its counters and its clock."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from omni_neuron_nkisim import costs
from omni_neuron_nkisim.configuration import Settings
from omni_neuron_nkisim.dtypes import DType
from omni_neuron_nkisim.errors import NkiValidationError, fail
from omni_neuron_nkisim.layout import Dims, last_element, row_major
from omni_neuron_nkisim.memory import (
    ON_CHIP,
    PSUM,
    SBUF,
    SHARED_HBM,
    MemoryRegion,
    Storage,
    Timeline,
    fresh_bytes,
)
from omni_neuron_nkisim.occupancy import Occupancy
from omni_neuron_nkisim.stats import CoreStats
from omni_neuron_nkisim.target import PARTITIONS, PSUM_BANK_BYTES, PSUM_BYTES_PER_PARTITION, Target
from omni_neuron_nkisim.tensors import NkiTensor

if TYPE_CHECKING:
    from omni_neuron_nkisim.launch import Launch

_thread = threading.local()
# Parts of a storage whose reads and writes the clock tells apart: a PSUM bank, or a 64th of a large tensor.
_PARTS = 64


class Core:
    """One core of one rank, while it runs a kernel.

    Attributes:
        launch: the launch it belongs to.
        rank, core: its place.
        settings, target: of the launch.
        stats: its counters.
        vector_accumulator: VE's register per partition, shared by the reducing instructions; NaN where unknown.
        scalar_accumulator: SE's registers, which survive between activations.
    """

    def __init__(self, launch: Launch, rank: int, core: int, settings: Settings, target: Target) -> None:
        self.launch, self.rank, self.core = launch, rank, core
        self.settings, self.target = settings, target
        self.executes = settings.execute
        self.stats = CoreStats(rank, core, target)
        self.vector_accumulator: NDArray[np.float32] = np.full((PARTITIONS, 1), np.nan, np.float32)
        self.scalar_accumulator: NDArray[np.float32] = np.full((PARTITIONS, 1), np.nan, np.float32)
        self.calls: dict[object, int] = {}
        self.engine_free = dict.fromkeys(costs.ENGINES, 0.0)  # of DMA and collectives the two below instead
        self._dma = [Occupancy() for _ in range(costs.DMA_ENGINES)]
        self._links = Occupancy()
        self.live: dict[str, int] = dict.fromkeys(ON_CHIP, 0)

    def next_call(self, key: object) -> int:
        """How often this core came to `key` before: cores meet at equal numbers."""
        number = self.calls.get(key, 0)
        self.calls[key] = number + 1
        return number

    # Memory

    def allocate(
        self, shape: Dims, element: DType, region: MemoryRegion, name: str, address: tuple[int, int] | None = None
    ) -> NkiTensor:
        """A fresh tensor, poisoned.

        Raises:
            NkiValidationError: a shape or address that the region cannot hold.
        """
        where = "nl.ndarray"
        if not shape or min(shape) < 1:
            fail(where, "shape", shape, "every dim has at least 1 element")
        name = name or f"{element.name}{list(shape)}"
        if region == SHARED_HBM:
            return self.launch.allocate_shared(self, shape, element, name)
        if region in ON_CHIP:
            return self._allocate_on_chip(where, shape, element, region, name, address)
        storage = self._storage(region, name, element, shape, 0)
        storage.row_bytes = storage.nbytes
        return NkiTensor(storage, element, shape, row_major(shape))

    def _allocate_on_chip(
        self, where: str, shape: Dims, element: DType, region: MemoryRegion, name: str, address: tuple[int, int] | None
    ) -> NkiTensor:
        if len(shape) < 2:
            fail(where, "shape", shape, f"a tile in {region} has at least 2 dims, partitions first")
        if shape[0] > PARTITIONS:
            fail(where, "shape", shape, f"dim 0 of a tile in {region} is at most {PARTITIONS} partitions")
        limit = self.target.sbuf_bytes if region == SBUF else PSUM_BYTES_PER_PARTITION
        start_partition, start_byte = address or (0, 0)
        row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * element.itemsize
        if row_bytes + start_byte > limit:
            fail(where, f"{region} bytes per partition", row_bytes + start_byte,
                 f"{self.target.name} has {limit}")  # fmt: skip
        if region == PSUM and start_byte % PSUM_BANK_BYTES:
            fail(where, "address", address, f"a PSUM tensor begins at a multiple of {PSUM_BANK_BYTES} bytes")
        if start_partition + shape[0] > PARTITIONS:
            fail(where, "address", address, f"{shape[0]} partitions from there exceed {PARTITIONS}")
        storage = self._storage(region, name, element, shape, start_partition)
        storage.row_bytes = row_bytes
        if region == PSUM and self.executes:
            storage.psum_writers = np.zeros(storage.nbytes, np.uint8)
        self._count_live(storage, limit)
        return NkiTensor(storage, element, shape, row_major(shape))

    def _storage(self, region: MemoryRegion, name: str, element: DType, shape: Dims, start_partition: int) -> Storage:
        nbytes = int(np.prod(shape, dtype=np.int64)) * element.itemsize
        base = fresh_bytes(nbytes, element) if self.executes else None
        return Storage(region, name, nbytes, 0, start_partition, base)

    def _count_live(self, storage: Storage, limit: int) -> None:
        region, size = storage.region, storage.row_bytes
        self.live[region] += size
        self.stats.see_live(region, self.live[region])
        if self.settings.check_live_capacity and self.live[region] > limit:
            fail("nl.ndarray", f"live {region} bytes per partition", self.live[region],
                 f"{self.target.name} has {limit}")  # fmt: skip
        weakref.finalize(storage, _release, self.live, region, size)

    # Counters and clock

    def count(
        self,
        instruction: str,
        engine: str,
        *,
        reads: Sequence[NkiTensor] = (),
        writes: Sequence[NkiTensor] = (),
        cycles: float = 0.0,
        ns: float = 0.0,
        dma_loads: Sequence[float] = (),
        latency_ns: float | None = None,
        flops: float = 0.0,
        not_before: float = 0.0,
    ) -> None:
        """Count one instruction and advance the clock of its engine, by `cycles`, `ns` or `dma_loads` (ns of each)."""
        if cycles:
            ns = costs.cycles_to_ns(self.target, engine, cycles)
        self.stats.add(instruction, engine, cycles, ns, flops, dma_loads)
        latency = latency_ns
        if latency is None:
            clock = self.target.clock_ghz.get(engine)
            latency = costs.DEPENDENT_CYCLES / clock if clock else 0.0
        if engine in self.settings.free_engines:
            ns, latency, dma_loads = 0.0, 0.0, ()
        places = self._places(reads, writes)
        start = max(self._ready(engine, places), self.engine_free[engine], not_before)
        if engine == costs.DMA:
            end = max((one.place(start, load) for one, load in zip(self._dma, dma_loads, strict=False)), default=start)
        elif engine == costs.COLLECTIVE:
            end = self._links.place(start, ns)
        else:
            end = self.engine_free[engine] = start + ns
        self.stats.in_order_ns = max(self.stats.in_order_ns, end + latency)
        for line, low, high, writing in places:
            for part in range(low, high):
                if writing:
                    # Transfers overtake each other: what reads this waits for the last of them.
                    if end + latency >= line.write_end[part]:
                        line.write_end[part], line.write_engine[part] = end + latency, engine
                elif end > line.read_end[part]:
                    line.read_end[part], line.read_engine[part] = end, engine

    def ready(self, engine: str, reads: Sequence[NkiTensor], writes: Sequence[NkiTensor]) -> float:
        """When `engine` could begin to read and write these, in ns of simulated time."""
        return max(self._ready(engine, self._places(reads, writes)), self.engine_free[engine])

    def _places(self, reads: Sequence[NkiTensor], writes: Sequence[NkiTensor]) -> list[tuple[Timeline, int, int, bool]]:
        return [(*self._parts(t), False) for t in reads] + [(*self._parts(t), True) for t in writes]

    def _ready(self, engine: str, places: list[tuple[Timeline, int, int, bool]]) -> float:
        ready = 0.0
        for line, low, high, writing in places:
            for part in range(low, high):
                # The same engine works in order: only what it reads of its own results makes it wait.
                if not writing or line.write_engine[part] != engine:
                    ready = max(ready, line.write_end[part])
                if writing and line.read_engine[part] != engine:
                    ready = max(ready, line.read_end[part])
        return ready

    def _parts(self, tensor: NkiTensor) -> tuple[Timeline, int, int]:
        storage = tensor.storage
        line = storage.timelines.get(self.core)
        part_bytes = max(PSUM_BANK_BYTES, -(-storage.row_bytes // _PARTS))
        if line is None:
            parts = -(-storage.row_bytes // part_bytes)
            line = Timeline([0.0] * parts, [""] * parts, [0.0] * parts, [""] * parts)
            storage.timelines[self.core] = line
        if tensor.gather is not None or tensor.scalar is not None:
            return line, 0, len(line.write_end)
        size = tensor.element.itemsize
        if tensor.on_chip:
            low = tensor.offset * size % storage.row_bytes
            high = low + (last_element(tensor.shape[1:], tensor.strides[1:], 0) + 1) * size
        else:
            low = tensor.offset * size
            high = (last_element(tensor.shape, tensor.strides, tensor.offset) + 1) * size
        return line, low // part_bytes, min(-(-high // part_bytes), len(line.write_end))


def _release(live: dict[str, int], region: str, size: int) -> None:
    live[region] -= size


def current_core(where: str) -> Core:
    """The core whose thread this is.

    Raises:
        NkiValidationError: no kernel is running in this thread.
    """
    core: Core | None = getattr(_thread, "core", None)
    if core is None:
        raise NkiValidationError(f"{where}: called outside of a kernel; launch one with nki.jit or run_spmd")
    return core


def running_core() -> Core | None:
    """The core whose thread this is, or None outside of kernels."""
    return getattr(_thread, "core", None)


def enter_core(core: Core | None) -> None:
    """Make this thread run as `core`."""
    _thread.core = core
