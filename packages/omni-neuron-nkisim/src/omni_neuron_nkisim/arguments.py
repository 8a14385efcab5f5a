# SPDX-License-Identifier: Apache-2.0
"""What goes into a kernel and comes out: NumPy arrays, torch tensors and, where nothing is executed, shapes alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_neuron_nkisim.dtypes import DTYPES, DType, dtype_of, name_of
from omni_neuron_nkisim.errors import NkiValidationError
from omni_neuron_nkisim.layout import row_major
from omni_neuron_nkisim.memory import SHARED_HBM, Storage, bytes_of
from omni_neuron_nkisim.tensors import NkiTensor


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of an HBM tensor, for launches with `execute=False`.

    Attributes:
        shape: its dims.
        dtype: an `nki.language` name.
    """

    shape: tuple[int, ...]
    dtype: str


def is_torch(value: Any) -> bool:
    """Whether `value` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def any_torch(values: Any) -> bool:
    """Whether a (nested) argument holds a torch tensor."""
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, tuple | list):
        return any(any_torch(value) for value in values)
    return is_torch(values)


def import_argument(value: Any, name: str, executes: bool, where: str) -> Any:
    """A kernel argument as the kernel sees it: tensors as `NkiTensor` in shared HBM over the caller's own memory.

    Raises:
        NkiValidationError: a list, an array that is not contiguous, or a dtype that NKI does not have.
    """
    if isinstance(value, list):
        raise NkiValidationError(f"{where}: argument {name} is a list; kernels take tuples")
    if isinstance(value, tuple):
        return tuple(import_argument(part, f"{name}[{n}]", executes, where) for n, part in enumerate(value))
    if isinstance(value, dict):
        return {key: import_argument(part, f"{name}[{key!r}]", executes, where) for key, part in value.items()}
    if isinstance(value, TensorSpec):
        if executes:
            raise NkiValidationError(f"{where}: argument {name} is a TensorSpec; those go with settings(execute=False)")
        return _tensor(name, value.shape, dtype_of(value.dtype, f"{where}: argument {name}"), None)
    if is_torch(value):
        return _from_torch(value, name, executes, where)
    if isinstance(value, np.ndarray):
        element = DTYPES[name_of(value.dtype, f"{where}: argument {name}")]
        return _from_numpy(value, name, element, executes, where)
    return value


def _from_torch(value: Any, name: str, executes: bool, where: str) -> NkiTensor:
    torch = sys.modules["torch"]
    if value.device.type != "cpu" or not value.is_contiguous():
        raise NkiValidationError(
            f"{where}: argument {name} is a tensor on {value.device} with strides {value.stride()}; "
            "the simulator takes contiguous CPU tensors"
        )
    dtype = str(value.dtype).removeprefix("torch.")
    element = dtype_of("bool_" if dtype == "bool" else dtype, f"{where}: argument {name}")
    data = value.detach().reshape(-1).view(torch.uint8).numpy().view(element.storage).reshape(tuple(value.shape))
    return _from_numpy(data, name, element, executes, where)


def _from_numpy(array: NDArray, name: str, element: DType, executes: bool, where: str) -> NkiTensor:
    if not array.flags.c_contiguous:
        raise NkiValidationError(f"{where}: argument {name} has strides {array.strides}; arguments are C-contiguous")
    if array.ndim == 0 or array.size == 0:
        raise NkiValidationError(f"{where}: argument {name} has shape {array.shape}; tensors have at least one element")
    if not executes:
        return _tensor(name, array.shape, element, None)
    if not array.flags.writeable:
        raise NkiValidationError(f"{where}: argument {name} is read-only; kernels may write their arguments in place")
    return _tensor(name, array.shape, element, array)


def _tensor(name: str, shape: tuple[int, ...], element: DType, array: NDArray | None) -> NkiTensor:
    nbytes = int(np.prod(shape, dtype=np.int64)) * element.itemsize
    base = None if array is None else bytes_of(array)
    return NkiTensor(Storage(SHARED_HBM, name, nbytes, nbytes, 0, base), element, tuple(shape), row_major(shape))


def program_of(value: Any) -> Any:
    """What of a (nested) argument decides which program is compiled: shapes and dtypes of tensors, all else itself."""
    if isinstance(value, NkiTensor):
        return TensorSpec(value.shape, value.dtype)
    if isinstance(value, tuple):
        return tuple(program_of(part) for part in value)
    if isinstance(value, dict):
        return {key: program_of(part) for key, part in value.items()}
    return value


def tensors_in(value: Any) -> list[NkiTensor]:
    """The tensors of a (nested) argument or result."""
    if isinstance(value, NkiTensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def export_result(value: Any, to_torch: bool, where: str) -> Any:
    """A kernel's result for its caller: arrays (torch tensors if any argument was one), or `TensorSpec`.

    Raises:
        NkiValidationError: a tensor that is not in shared HBM.
    """
    if isinstance(value, tuple | list):
        return tuple(export_result(part, to_torch, where) for part in value)
    if not isinstance(value, NkiTensor):
        return value
    if value.buffer != SHARED_HBM:
        raise NkiValidationError(f"{where}: returns {value!r}; returned tensors are in shared_hbm")
    if value.storage.base is None:
        return TensorSpec(value.shape, value.dtype)
    array = np.ascontiguousarray(value.strided(value.storage.base))
    convert: Callable[[NDArray, DType], Any] = _to_torch if to_torch else lambda array, element: array
    return convert(array.view(np.bool_) if value.dtype == "bool_" else array, value.element)


def _to_torch(array: NDArray, element: DType) -> Any:
    # Bits that torch has no type for (legacy E4M3, packed values) come back as unsigned integers.
    torch = sys.modules["torch"]
    names = {"bool_": "bool", "tfloat32": "float32"}
    dtype = getattr(torch, names.get(element.name, element.name), None)
    if dtype is None:
        dtype = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[element.itemsize]
    return torch.from_numpy(array.reshape(-1).view(np.uint8)).view(dtype).reshape(array.shape)
