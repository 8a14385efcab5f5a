# SPDX-License-Identifier: Apache-2.0
"""Which bytes of which files a parameter will read, and asking the kernel to read them ahead."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from omni_neuron_runtime.weights.files import TensorEntry
from omni_neuron_runtime.weights.plan import ParameterRead

logger = logging.getLogger(__name__)

# Gaps below this are read through: reading on costs less than another request, and a fault in a mapped file reads at
# least this much around it anyway (Linux's default readahead window).
READ_THROUGH_BYTES = 128 * 1024


@dataclass(frozen=True)
class ByteRange:
    """`length` bytes from `start` of `file`."""

    file: Path
    start: int
    length: int


def planned_ranges(read: ParameterRead, rank: int) -> list[ByteRange]:
    """The bytes that `read` takes on `rank`, found by running its loader on meta tensors until each was indexed once.

    Not to its end: the first concatenation on meta tensors would make torch import hundreds of modules. A loader that
    takes a tensor in several parts therefore gets the first one prefetched. Where it cannot run so, nothing is; a
    fault of the loader itself is reported when it runs in earnest.
    """
    slices: list[_MetaSlice] = []
    slices += [_MetaSlice(entry, slices) for entry in read.entries]
    try:
        read.loader.load(slices, rank)
    except _AllTaken:
        pass
    except Exception as error:
        logger.debug("no full prefetch for %s: its loader does not run on meta tensors: %r", read, error)
    return [run for part in slices if part.taken is not None for run in _ranges(part.entry, part.taken)]


def _ranges(entry: TensorEntry, view: Tensor) -> Iterator[ByteRange]:
    """The runs of bytes that a strided view of a stored tensor touches, small gaps included."""
    if view.numel() == 0:
        return
    itemsize = view.element_size()
    run, outer = 1, []
    for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size == 1:
            continue
        if (stride - run) * itemsize <= READ_THROUGH_BYTES:
            run += stride * (size - 1)
        else:
            outer.append(range(0, stride * size, stride))
    for offsets in itertools.product(*outer):
        start = entry.start + (int(view.storage_offset()) + sum(offsets)) * itemsize
        yield ByteRange(entry.file, start, run * itemsize)


class _AllTaken(BaseException):
    """Every tensor was indexed: the loader need not go on."""


class _MetaSlice:
    """A `TensorSlice` without data that notes the first part that is taken."""

    def __init__(self, entry: TensorEntry, all_slices: list[_MetaSlice]) -> None:
        self.entry = entry
        self.taken: Tensor | None = None
        self._all_slices = all_slices

    def get_shape(self) -> list[int]:
        return list(self.entry.shape)

    def get_dtype(self) -> str:
        return self.entry.dtype

    def __getitem__(self, index: Any) -> Tensor:
        whole = torch.empty(self.entry.shape, dtype=self.entry.torch_dtype, device="meta")
        part = whole if not self.entry.shape else whole[index]
        self.taken = part if self.taken is None else self.taken
        if all(other.taken is not None for other in self._all_slices):
            raise _AllTaken
        return part


class PageCache:
    """Asks the kernel to read byte ranges ahead (`posix_fadvise(WILLNEED)`); one open file at a time."""

    def __init__(self) -> None:
        self.bytes_requested = 0
        self._file: Path | None = None
        self._descriptor = -1

    def request(self, byte_range: ByteRange) -> None:
        """Start reading a range into the page cache; returns before the data is there."""
        if byte_range.file != self._file:
            self.close()
            self._descriptor, self._file = os.open(byte_range.file, os.O_RDONLY), byte_range.file
        os.posix_fadvise(self._descriptor, byte_range.start, byte_range.length, os.POSIX_FADV_WILLNEED)
        self.bytes_requested += byte_range.length

    def close(self) -> None:
        """Close the open file."""
        if self._file is not None:
            os.close(self._descriptor)
            self._file = None
