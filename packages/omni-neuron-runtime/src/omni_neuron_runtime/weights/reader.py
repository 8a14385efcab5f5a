# SPDX-License-Identifier: Apache-2.0
"""Slices of mapped safetensors files, and parameters made from them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from omni_neuron_runtime.weights.files import CheckpointError, TensorEntry
from omni_neuron_runtime.weights.plan import ParameterRead

# Reads go file by file, so two cover a parameter whose tensors lie in two files. A file that is closed is unmapped,
# which keeps the pages of a large checkpoint from adding up in this process's resident set.
_OPEN_FILES = 2


class SliceReader:
    """Reads slices for one load, and counts what the slices hold. For one thread."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self._open: OrderedDict[Any, Any] = OrderedDict()

    def read(self, entry: TensorEntry, index: Any) -> Tensor:
        """The part `index` of a tensor: a view of the mapped file, whose pages are read when they are touched."""
        whole = self._handle(entry).get_slice(entry.key)
        # safetensors takes no slice of a tensor without dims, for which `[:]` can only mean all of it.
        part: Tensor = whole[...] if not entry.shape and isinstance(index, slice) else whole[index]
        self.bytes_read += part.numel() * part.element_size()
        return part

    def make_parameter(self, read: ParameterRead, rank: int) -> Tensor:
        """This rank's parameter on the CPU: right shape and dtype, contiguous, in memory of its own.

        Raises:
            CheckpointError: with parameter, keys, files, and what was expected and found.
        """
        slices = [_FileSlice(self, entry) for entry in read.entries]
        try:
            value = read.loader.load(slices, rank)
        except CheckpointError:
            raise
        except Exception as error:  # A loader may be anybody's; the reader needs to know which parameter it was for.
            what = str(error) if isinstance(error, ValueError) else repr(error)
            raise CheckpointError(f"{read}, rank {rank}: {what}") from error
        if value.shape != read.shape:
            raise CheckpointError(
                f"{read}, rank {rank}: expected shape {list(read.shape)}, found {list(value.shape)}: the checkpoint is "
                f"not of this model's configuration"
            )
        if value.dtype.is_floating_point != read.dtype.is_floating_point or value.is_complex() != read.dtype.is_complex:
            raise CheckpointError(f"{read}, rank {rank}: {value.dtype} cannot be cast to {read.dtype} without loss")
        alone = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        if value.dtype == read.dtype and alone and not any(part.lent(value) for part in slices):
            return value
        # One pass that reads the pages, copies and casts; also frees a larger tensor that this is a part of.
        return torch.empty(read.shape, dtype=read.dtype, device="cpu").copy_(value)

    def _handle(self, entry: TensorEntry) -> Any:
        if entry.file not in self._open:
            try:
                self._open[entry.file] = safe_open(entry.file, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{entry.file}: cannot be opened: {error}") from error
            while len(self._open) > _OPEN_FILES:
                self._open.popitem(last=False)
        self._open.move_to_end(entry.file)
        return self._open[entry.file]


class _FileSlice:
    """A `TensorSlice` of a file that remembers which storage it handed out."""

    def __init__(self, reader: SliceReader, entry: TensorEntry) -> None:
        self._reader = reader
        self._entry = entry
        self._storages: set[int] = set()

    def get_shape(self) -> list[int]:
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        return self._entry.dtype

    def __getitem__(self, index: Any) -> Tensor:
        part = self._reader.read(self._entry, index)
        self._storages.add(part.untyped_storage().data_ptr())
        return part

    def lent(self, value: Tensor) -> bool:
        """Whether `value` still lies in the file's mapping."""
        return value.untyped_storage().data_ptr() in self._storages
