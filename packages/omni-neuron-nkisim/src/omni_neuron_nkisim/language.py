# SPDX-License-Identifier: Apache-2.0
"""What `nki.language` holds: dtypes, memory, operator tokens, the grid.

The convenience functions that return new tiles (`nl.load`, `nl.add(x, y)`, …) are not simulated: the kernels this is
for use `nki.isa`. The tokens exist and are passed as `op`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from omni_neuron_nkisim.configuration import current_settings
from omni_neuron_nkisim.context import current_core
from omni_neuron_nkisim.dtypes import DTYPES, INTEGER, cast, dtype_of, name_of
from omni_neuron_nkisim.errors import fail
from omni_neuron_nkisim.isa.elementwise import memset
from omni_neuron_nkisim.memory import HBM, ON_CHIP, PSUM, SBUF, SHARED_HBM, MemoryRegion
from omni_neuron_nkisim.operators import OPS
from omni_neuron_nkisim.target import PARTITIONS, PSUM_BANK_BYTES, PSUM_BANKS
from omni_neuron_nkisim.tensors import NkiTensor


def _region(where: str, buffer: object) -> MemoryRegion:
    if not isinstance(buffer, MemoryRegion):
        fail(where, "buffer", repr(buffer), "has to be nl.sbuf, nl.psum, nl.private_hbm or nl.shared_hbm")
    return buffer


def ndarray(
    shape: tuple[int, ...],
    dtype: str,
    buffer: MemoryRegion = SBUF,
    name: str = "",
    address: tuple[int, int] | None = None,
) -> NkiTensor:
    """A fresh tensor, poisoned.

    `address` is (partition, byte): it is checked, but tiles at one address do not share memory here. The migration text
    counts elements, its examples bytes; bytes were chosen.
    """
    element = dtype_of(dtype, "nl.ndarray")
    region = _region("nl.ndarray", buffer)
    return current_core("nl.ndarray").allocate(tuple(int(size) for size in shape), element, region, name, address)


def full(
    shape: tuple[int, ...], fill_value: float, dtype: str, buffer: MemoryRegion = SBUF, name: str = ""
) -> NkiTensor:
    """An on-chip tensor filled by `nisa.memset`."""
    if _region("nl.full", buffer) not in ON_CHIP:
        fail("nl.full", "buffer", buffer, "has to be nl.sbuf or nl.psum; fill HBM with dma_copy")
    result = ndarray(shape, dtype, buffer, name)
    memset(result, int(fill_value) if result.element.kind == INTEGER else float(fill_value))
    return result


def zeros(shape: tuple[int, ...], dtype: str, buffer: MemoryRegion = SBUF, name: str = "") -> NkiTensor:
    """An on-chip tensor of zeros."""
    return full(shape, 0, dtype, buffer, name)


def ones(shape: tuple[int, ...], dtype: str, buffer: MemoryRegion = SBUF, name: str = "") -> NkiTensor:
    """An on-chip tensor of ones."""
    return full(shape, 1, dtype, buffer, name)


def zeros_like(x: NkiTensor, dtype: str | None = None, buffer: MemoryRegion | None = None, name: str = "") -> NkiTensor:
    """Zeros of a tensor's shape."""
    return zeros(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def empty_like(x: NkiTensor, dtype: str | None = None, buffer: MemoryRegion | None = None, name: str = "") -> NkiTensor:
    """A fresh tensor of a tensor's shape."""
    return ndarray(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def shared_constant(constant: np.ndarray) -> NkiTensor:
    """A NumPy array as a shared HBM tensor; the same on both cores. Paths of .npy files are not simulated."""
    if not isinstance(constant, np.ndarray):
        fail("nl.shared_constant", "constant", repr(constant), "has to be a NumPy array")
    core = current_core("nl.shared_constant")
    element = DTYPES[name_of(constant.dtype, "nl.shared_constant")]
    result = core.allocate(constant.shape, element, SHARED_HBM, "")
    if result.storage.base is not None:
        result.strided(result.storage.base)[...] = constant
    return result


def shared_identity_matrix(n: int, dtype: str = "uint8", dst: NkiTensor | None = None) -> NkiTensor:
    """An `[n, n]` identity in SBUF, n ≤ 128."""
    if not 1 <= n <= PARTITIONS:
        fail("nl.shared_identity_matrix", "n", n, f"1 to {PARTITIONS}")
    result = ndarray((n, n), dtype) if dst is None else dst
    core = current_core("nl.shared_identity_matrix")
    if core.executes:
        result.write_raw(core.core, cast(np.eye(n, dtype=np.float32), result.element, "identity"))
    return result


def ds(start: int, size: int) -> slice:
    """`size` elements from `start`, as an index."""
    return slice(start, start + size)


def program_id(axis: int = 0) -> int:
    """Which core of the launch this is."""
    return current_core("nl.program_id").core


def num_programs(axes: int = 0) -> int:
    """Cores of the launch: 1 or 2."""
    return current_core("nl.num_programs").launch.lnc


def program_ndim() -> int:
    """Dims of the grid."""
    return 1


def affine_range(start: int, stop: int | None = None, step: int = 1) -> range:
    """A deprecated alias of range."""
    return range(start) if stop is None else range(start, stop, step)


sequential_range = affine_range
static_range = affine_range


@contextmanager
def no_reorder() -> Iterator[None]:
    """Program order, which is the only one here."""
    yield


def is_hbm(buffer: MemoryRegion) -> bool:
    """HBM, private or shared."""
    return buffer in HBM


def is_sbuf(buffer: MemoryRegion) -> bool:
    """SBUF."""
    return buffer == SBUF


def is_psum(buffer: MemoryRegion) -> bool:
    """PSUM."""
    return buffer == PSUM


def is_on_chip(buffer: MemoryRegion) -> bool:
    """SBUF or PSUM."""
    return buffer in ON_CHIP


class NKIObject:
    """Base of classes that kernels may use: annotated names and class attributes are fields; missing ones are None.

    `__post_init__` runs after them, if there is one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        fields: dict[str, Any] = {}
        for part in reversed(type(self).__mro__[:-1]):
            for name in inspect.get_annotations(part):
                fields.setdefault(name, None)
            for name, value in part.__dict__.items():
                if not name.startswith("__") and not callable(value) and not isinstance(value, property):
                    fields[name] = value
        names = list(fields)
        unknown = set(kwargs) - set(names)
        if len(args) > len(names) or unknown:
            raise TypeError(f"{type(self).__name__} has the fields {', '.join(names)}; got {args} and {kwargs}")
        fields |= dict(zip(names, args, strict=False)) | kwargs
        self.__dict__.update(fields)
        post = getattr(self, "__post_init__", None)
        if post is not None:
            post()


class _TileSize:
    """Sizes of tiles on the target; what the documentation gives no value for is not here."""

    pmax = PARTITIONS
    psum_bank_fmax = PSUM_BANK_BYTES // 4
    psum_bank_fmax_bytes = PSUM_BANK_BYTES
    psum_num_banks = PSUM_BANKS
    gemm_stationary_fmax = 128
    gemm_moving_fmax = 512
    bn_stats_fmax = 512

    @property
    def sbuf_size_bytes(self) -> int:
        """All of SBUF, 128 partitions."""
        return PARTITIONS * current_settings().resolved_target().sbuf_bytes


tile_size = _TileSize()
sbuf, psum = SBUF, PSUM
private_hbm = hbm = MemoryRegion.private_hbm
shared_hbm = SHARED_HBM

_FUNCTIONS = (
    ndarray, full, zeros, ones, zeros_like, empty_like, shared_constant, shared_identity_matrix, ds, program_id,
    num_programs, program_ndim, no_reorder, is_hbm, is_sbuf, is_psum, is_on_chip,
)  # fmt: skip
NAMES: dict[str, Any] = {
    **{name: name for name in DTYPES},
    **OPS,
    **{function.__name__: function for function in _FUNCTIONS},
    **dict.fromkeys(("affine_range", "sequential_range", "static_range"), affine_range),
    "MemoryRegion": MemoryRegion,
    "NKIObject": NKIObject,
    "NkiTensor": NkiTensor,
    "hbm": hbm,
    "private_hbm": private_hbm,
    "psum": psum,
    "sbuf": sbuf,
    "shared_hbm": shared_hbm,
    "tile_size": tile_size,
}
