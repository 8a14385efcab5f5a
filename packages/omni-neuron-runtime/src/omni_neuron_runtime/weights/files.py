# SPDX-License-Identifier: Apache-2.0
"""Safetensors files by their headers alone: which tensors they hold, where, and whether the files are whole.

Format (the safetensors specification): 8 bytes, little-endian, length N of the header; N bytes of JSON, tensor name to
`{"dtype", "shape", "data_offsets": [begin, end]}` relative to the end of the header, plus an optional `__metadata__`;
then the data, which the tensors fill without gaps and to the last byte.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# The limit that safetensors itself sets.
_MAX_HEADER_BYTES = 100_000_000
_GIT_LFS_POINTER = b"version https://git-lfs"

# Bits of one element, and the torch dtype where there is one.
_DTYPES: Mapping[str, tuple[int, torch.dtype | None]] = {
    "BOOL": (8, torch.bool),
    "F4": (4, None),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "U8": (8, torch.uint8),
    "I8": (8, torch.int8),
    "F8_E5M2": (8, torch.float8_e5m2),
    "F8_E4M3": (8, torch.float8_e4m3fn),
    "F8_E8M0": (8, torch.float8_e8m0fnu),
    "F8_E4M3FNUZ": (8, torch.float8_e4m3fnuz),
    "F8_E5M2FNUZ": (8, torch.float8_e5m2fnuz),
    "U16": (16, torch.uint16),
    "I16": (16, torch.int16),
    "F16": (16, torch.float16),
    "BF16": (16, torch.bfloat16),
    "U32": (32, torch.uint32),
    "I32": (32, torch.int32),
    "F32": (32, torch.float32),
    "U64": (64, torch.uint64),
    "I64": (64, torch.int64),
    "F64": (64, torch.float64),
    "C64": (64, torch.complex64),
}


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or is not the one that the model needs."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a safetensors file: its bytes are `[start, end)` of `file`; `dtype` is as safetensors writes it."""

    key: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype in torch (CheckpointError where torch has none)."""
        dtype = _DTYPES[self.dtype][1]
        if dtype is None:
            raise CheckpointError(f"{self.file}: tensor {self.key!r} has dtype {self.dtype}, which torch cannot hold")
        return dtype

    def __str__(self) -> str:
        return f"{self.key!r} {self.dtype} {list(self.shape)} in {self.file}"


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of `file`, in the order of the header. Reads the header only.

    Raises:
        CheckpointError: the file cannot be read, is cut short, or its header is damaged; says which, with the sizes.
    """
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            header_length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            text = stream.read(header_length if header_length <= _MAX_HEADER_BYTES else len(_GIT_LFS_POINTER))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
    if (prefix + text).startswith(_GIT_LFS_POINTER):
        raise CheckpointError(f"{file}: is a git-lfs pointer, not the weights; fetch them with `git lfs pull`")
    if len(prefix) < 8:
        raise CheckpointError(f"{file}: is {size} bytes long; a safetensors file begins with an 8-byte header length")
    if header_length > _MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file}: header length {header_length} is above the format's limit of {_MAX_HEADER_BYTES}: "
            f"not a safetensors file, or its first bytes are corrupt"
        )
    if len(text) < header_length:
        raise CheckpointError(
            f"{file}: the header is {header_length} bytes long, but the file ends after {size} bytes: truncated"
        )
    return _entries(file, size, 8 + header_length, text)


def _entries(file: Path, size: int, data_start: int, text: bytes) -> dict[str, TensorEntry]:
    try:
        header = json.loads(text, object_pairs_hook=_unique_keys)
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise CheckpointError(f"{file}: corrupt header: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: corrupt header: it is not a JSON object")
    header.pop("__metadata__", None)
    entries = {key: _entry(file, data_start, key, value) for key, value in header.items()}
    end = data_start
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.end)):
        if entry.start != end:
            what = "overlaps the one before it" if entry.start < end else "leaves a gap before it"
            raise CheckpointError(
                f"{file}: tensor {entry.key!r} at bytes {entry.start}–{entry.end} {what}: corrupt header"
            )
        end = entry.end
    if size < end:
        cut = [entry for entry in entries.values() if entry.end > size]
        first = min(cut, key=lambda entry: entry.start)
        raise CheckpointError(
            f"{file}: truncated: expected {end} bytes, found {size} ({end - size} missing); {len(cut)} tensor(s) are "
            f"cut, the first is {first.key!r} at bytes {first.start}–{first.end}"
        )
    if size > end:
        raise CheckpointError(f"{file}: expected {end} bytes, found {size}: {size - end} bytes follow the last tensor")
    return entries


def _entry(file: Path, data_start: int, key: str, value: Any) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        well_formed = all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        well_formed = False
    if not well_formed:
        raise CheckpointError(f"{file}: corrupt header: tensor {key!r} has no valid dtype, shape and data_offsets")
    if dtype not in _DTYPES:
        raise CheckpointError(f"{file}: tensor {key!r} has unknown dtype {dtype!r}; known: {', '.join(_DTYPES)}")
    needed = math.ceil(math.prod(shape) * _DTYPES[dtype][0] / 8)
    if end - begin != needed:
        raise CheckpointError(
            f"{file}: tensor {key!r} {dtype} {list(shape)} takes {needed} bytes, but the header gives it {end - begin}"
        )
    return TensorEntry(key, file, dtype, shape, data_start + begin, data_start + end)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique: dict[str, Any] = {}
    for key, value in pairs:
        if key in unique:
            raise ValueError(f"{key!r} stands in it twice")
        unique[key] = value
    return unique


def find_files(folder: Path) -> tuple[tuple[Path, ...], dict[str, Path] | None]:
    """The safetensors files of a folder, sorted, and where its index says each key is (None without an index).

    An index (`*.safetensors.index.json`) is authoritative: files that it does not name are not part of the checkpoint.

    Raises:
        CheckpointError: no files, more than one index, a damaged index, or one that names a file that is not there.
    """
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if len(indexes) > 1:
        names = ", ".join(index.name for index in indexes)
        raise CheckpointError(f"{folder}: has more than one index ({names}); keep the one that is meant")
    if not indexes:
        files = tuple(sorted(folder.glob("*.safetensors")))
        if not files:
            raise CheckpointError(f"{folder}: has no *.safetensors file; it holds: {_listing(folder)}")
        return files, None
    [index] = indexes
    weight_map = _weight_map(index)
    absent = sorted({name for name in weight_map.values() if not (folder / name).is_file()})
    if absent:
        keys = sum(name in absent for name in weight_map.values())
        raise CheckpointError(f"{index}: names files that are not there: {', '.join(absent)} ({keys} tensors)")
    where = {key: folder / name for key, name in weight_map.items()}
    return tuple(sorted(set(where.values()))), where


def _weight_map(index: Path) -> dict[str, str]:
    try:
        content = json.loads(index.read_bytes(), object_pairs_hook=_unique_keys)
        weight_map = content["weight_map"]
        valid = bool(weight_map) and all(isinstance(name, str) for name in weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: is not a safetensors index: {error!r}") from error
    if not valid:
        raise CheckpointError(
            f"{index}: is not a safetensors index: weight_map does not map tensor names to file names"
        )
    outside = sorted(name for name in set(weight_map.values()) if Path(name).name != name)
    if outside:
        raise CheckpointError(f"{index}: names files outside its own folder: {', '.join(outside)}")
    return dict(weight_map)


def _listing(folder: Path) -> str:
    names = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir())
    return ", ".join(names[:8]) + (" …" if len(names) > 8 else "") if names else "nothing"
