# SPDX-License-Identifier: Apache-2.0
"""NKI's data types over NumPy storage: names, casts, fresh memory's poison.

A dtype is a plain string, as in `nki.language`. Arithmetic reads float32 and casts once on write: floats to nearest
even (overflow becomes infinity, or NaN where the type has none: the documentation is silent for FP8, and this shows a
missed clip), integers to nearest even with saturation (NaN to 0, which is our choice).
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from omni_neuron_nkisim.errors import NkiValidationError

FLOAT, INTEGER, PACKED = "float", "integer", "packed"


@dataclass(frozen=True)
class DType:
    """One dtype.

    Attributes:
        name: as in `nki.language`.
        storage: the NumPy dtype that holds an element.
        kind: float, integer or packed (four elements in one).
        largest: the largest finite value; of one element where packed.
        element: NumPy dtype of one of the four packed elements.
    """

    name: str
    storage: np.dtype
    kind: str
    largest: float
    element: np.dtype | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.storage.itemsize


def _float(name: str, storage: type) -> DType:
    dtype = np.dtype(storage)
    return DType(name, dtype, FLOAT, float(ml_dtypes.finfo(dtype).max))


def _integer(name: str) -> DType:
    dtype = np.dtype(name)
    return DType(name, dtype, INTEGER, float(np.iinfo(dtype).max))


def _packed(name: str, element: type, storage: type) -> DType:
    return DType(name, np.dtype(storage), PACKED, float(ml_dtypes.finfo(element).max), np.dtype(element))


DTYPES = {
    dtype.name: dtype
    for dtype in (
        DType("bool_", np.dtype(np.uint8), INTEGER, 1.0),
        *(_integer(name) for name in ("int8", "int16", "int32", "uint8", "uint16", "uint32")),
        _float("float16", np.float16),
        _float("bfloat16", ml_dtypes.bfloat16),
        DType("tfloat32", np.dtype(np.float32), FLOAT, 3.4011621342146535e38),
        _float("float32", np.float32),
        _float("float8_e4m3", ml_dtypes.float8_e4m3),
        _float("float8_e4m3fn", ml_dtypes.float8_e4m3fn),
        _float("float8_e5m2", ml_dtypes.float8_e5m2),
        _float("float8_e8m0fnu", ml_dtypes.float8_e8m0fnu),
        _packed("float8_e4m3fn_x4", ml_dtypes.float8_e4m3fn, np.uint32),
        _packed("float8_e5m2_x4", ml_dtypes.float8_e5m2, np.uint32),
        _packed("float4_e2m1fn_x4", ml_dtypes.float4_e2m1fn, np.uint16),
    )
}
FP8 = ("float8_e4m3", "float8_e4m3fn", "float8_e5m2")
FLOAT16S = ("float16", "bfloat16")
_NAME_OF_STORAGE = {dtype.storage: name for name, dtype in reversed(DTYPES.items()) if dtype.kind != PACKED}
_NAME_OF_STORAGE |= {np.dtype(np.float32): "float32", np.dtype(np.uint8): "uint8", np.dtype(np.bool_): "bool_"}


def dtype_of(name: str, where: str) -> DType:
    """The dtype called `name`; `where` begins the message if there is none.

    Raises:
        NkiValidationError: no such dtype.
    """
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise NkiValidationError(f"{where}: dtype is {name!r}; the dtypes are {', '.join(DTYPES)}")
    return dtype


def name_of(storage: np.dtype, where: str) -> str:
    """The NKI name of a NumPy dtype.

    Raises:
        NkiValidationError: NKI has no such type, for example one of 64 bits.
    """
    name = _NAME_OF_STORAGE.get(np.dtype(storage))
    if name is None:
        raise NkiValidationError(f"{where}: dtype is {storage}; NKI has {', '.join(DTYPES)} and no type of 64 bits")
    return name


def poison(dtype: DType) -> NDArray[np.uint8]:
    """The bytes of one element of memory that nothing has written: NaN, or 4 in integers (and in FP4, without NaN)."""
    if dtype.kind == INTEGER:
        value = np.array([4], dtype.storage)
    elif dtype.kind == FLOAT:
        value = np.array([np.nan], np.float32).astype(dtype.storage)
    elif dtype.name == "float4_e2m1fn_x4":
        value = np.array([0x6666], np.uint16)
    else:
        assert dtype.element is not None
        value = np.full(4, np.nan, np.float32).astype(dtype.element)
    return value.view(np.uint8)


def round_to_tf32(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Float32 with 10 bits of mantissa, to nearest even; infinities and NaN stay."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(values), rounded.view(np.float32), values)


def to_float32(raw: NDArray, dtype: DType, where: str) -> NDArray[np.float32]:
    """Elements as float32, exact but for 32-bit integers.

    Raises:
        NkiValidationError: a packed type, which only MX instructions read.
    """
    if dtype.kind == PACKED:
        raise NkiValidationError(f"{where}: dtype is {dtype.name}; packed types go to MX instructions and copies only")
    return raw.astype(np.float32)


def cast(values: NDArray, dtype: DType, where: str) -> NDArray:
    """`values` (float32, or integers of up to 64 bits) as elements of `dtype`.

    Raises:
        NkiValidationError: a packed type, to which nothing casts.
    """
    if dtype.kind == PACKED:
        raise NkiValidationError(f"{where}: dtype is {dtype.name}; nothing casts to packed types")
    if dtype.kind == INTEGER:
        if dtype.name == "bool_":
            return (values != 0).astype(np.uint8)
        limits = np.iinfo(dtype.storage)
        if np.issubdtype(values.dtype, np.integer):
            return np.clip(values.astype(np.int64), limits.min, limits.max).astype(dtype.storage)
        rounded = np.nan_to_num(np.rint(values.astype(np.float64)), nan=0.0, posinf=np.inf, neginf=-np.inf)
        return np.clip(rounded, limits.min, limits.max).astype(dtype.storage)
    if dtype.name == "tfloat32":
        return round_to_tf32(values.astype(np.float32))
    return values.astype(np.float32).astype(dtype.storage)


def unpack(raw: NDArray, dtype: DType) -> NDArray[np.float32]:
    """The four elements of each packed value, `[..., 4]` float32; the lowest bits come first."""
    assert dtype.element is not None
    if dtype.name == "float4_e2m1fn_x4":
        nibbles = (raw[..., None] >> np.arange(0, 16, 4, dtype=np.uint16)) & np.uint16(0xF)
        return nibbles.astype(np.uint8).view(dtype.element).astype(np.float32)
    octets = np.ascontiguousarray(raw).view(np.uint8).reshape(*raw.shape, 4)
    return octets.view(dtype.element).astype(np.float32)


def pack(elements: NDArray, dtype: DType) -> NDArray:
    """Elements `[..., 4]` of the packed type's element dtype as packed values `[...]`."""
    return np.ascontiguousarray(elements).view(np.uint8).view(dtype.storage).reshape(elements.shape[:-1])
