# SPDX-License-Identifier: Apache-2.0
"""`NkiTensor`: a strided view of a storage.

On chip dim 0 is the partition: it stays when indexed, and is neither permuted nor reshaped. A view that leaves its
storage raises. Where the documentation disagrees about `.ap(offset=)` on a view that does not begin at its storage's
start (the interface adds the offsets, the deep dive ignores the view's), this raises; on whole tensors both readings
agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from omni_neuron_nkisim.configuration import current_settings
from omni_neuron_nkisim.dtypes import INTEGER, PACKED, DType, dtype_of
from omni_neuron_nkisim.errors import NkiValidationError
from omni_neuron_nkisim.layout import (
    Dims,
    axis_sizes,
    contiguous_run,
    last_element,
    parse_axes,
    reshaped_strides,
)
from omni_neuron_nkisim.memory import ON_CHIP, MemoryRegion, Storage
from omni_neuron_nkisim.registers import VirtualRegister, register_value

MAX_DIMS = 5


class NkiTensor:
    """A view of (part of) a tile or HBM tensor.

    Attributes:
        shape, strides, offset: of the view, in elements.
        dtype: name of the dtype.
        storage: what it views.
    """

    __slots__ = ("dtype", "element", "gather", "offset", "scalar", "shape", "storage", "strides")

    def __init__(
        self,
        storage: Storage,
        element: DType,
        shape: Dims,
        strides: Dims,
        offset: int = 0,
        scalar: tuple[VirtualRegister | NkiTensor, int] | None = None,
        gather: tuple[NkiTensor, int] | None = None,
    ) -> None:
        self.storage, self.element, self.dtype = storage, element, element.name
        self.shape, self.strides, self.offset = shape, strides, offset
        self.scalar = scalar  # a runtime offset and its stride in elements
        self.gather = gather  # an index per row of dim 0 and its stride in elements

    def __getattr__(self, name: str) -> NoReturn:
        known = ", ".join(sorted(part for part in dir(type(self)) if not part.startswith("_")))
        raise AttributeError(f"NkiTensor has no {name!r} in this simulator; it has {known}")

    def __repr__(self) -> str:
        return f"NkiTensor({self.name}, {self.dtype}{list(self.shape)} in {self.buffer})"

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.storage.name

    @property
    def buffer(self) -> MemoryRegion:
        """sbuf, psum, private_hbm or shared_hbm."""
        return self.storage.region

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def on_chip(self) -> bool:
        """In SBUF or PSUM."""
        return self.storage.region in ON_CHIP

    @property
    def partitions(self) -> int:
        """P: size of dim 0."""
        return self.shape[0]

    @property
    def free(self) -> int:
        """F: elements per partition."""
        return math.prod(self.shape[1:])

    @property
    def start_partition(self) -> int:
        """Partition of the tile, or of the chip where the tile has an address, at which an on-chip view begins."""
        return self.storage.start_partition + self.offset * self.element.itemsize // self.storage.row_bytes

    def _fail(self, method: str, problem: str) -> NoReturn:
        raise NkiValidationError(f"NkiTensor.{method}: {self!r}: {problem}")

    def _since_5(self, method: str) -> None:
        """Refuse a method that NKI has from 0.5 on."""
        settings = current_settings()
        if settings.version() < (0, 5):
            self._fail(method, f"exists from NKI 0.5 on, this is {settings.nki_version}; use ap or an index")

    def _derive(self, shape: Sequence[int], strides: Sequence[int], offset: int) -> NkiTensor:
        if self.gather is not None:
            self._fail("view", "an indirect view is used as it is")
        view = NkiTensor(self.storage, self.element, tuple(shape), tuple(strides), offset, self.scalar)
        if len(view.shape) > MAX_DIMS and self.on_chip:
            self._fail("view", f"shape {view.shape} has more than {MAX_DIMS} dims")
        return view

    def _dim(self, method: str, dim: int, partition: bool = False) -> int:
        """`dim` counted from the front; dim 0 of an on-chip view only where `partition`."""
        if not -self.ndim <= dim < self.ndim:
            self._fail(method, f"dim is {dim}; there are {self.ndim}")
        if dim % self.ndim == 0 and self.on_chip and not partition:
            self._fail(method, "dim is 0, the partition dim, which stays as it is on chip")
        return dim % self.ndim

    # Indexing

    def __getitem__(self, index: Any) -> NkiTensor:
        parts = list(index) if isinstance(index, tuple) else [index]
        if parts.count(Ellipsis) > 1:
            self._fail("[...]", "more than one Ellipsis")
        if Ellipsis in parts:
            at = parts.index(Ellipsis)
            parts[at : at + 1] = [slice(None)] * (self.ndim - len(parts) + 1)
        if len(parts) > self.ndim:
            self._fail("[...]", f"{len(parts)} indices for {self.ndim} dims")
        parts += [slice(None)] * (self.ndim - len(parts))
        shape, strides, offset = [], [], self.offset
        for dim, (part, size, stride) in enumerate(zip(parts, self.shape, self.strides, strict=True)):
            start, count, step, keep = self._index(part, dim, size)
            offset += start * stride
            if keep:
                shape.append(count)
                strides.append(stride * step)
        least = 2 if self.on_chip else 1
        while len(shape) < least:
            shape.append(1)
            strides.append(1)
        return self._derive(shape, strides, offset)

    def _index(self, part: Any, dim: int, size: int) -> tuple[int, int, int, bool]:
        """Start, count, step of one index, and whether its dim stays."""
        if isinstance(part, slice):
            bounds = [size if end else 0 for end in (False, True)]
            given = [part.start, part.stop]
            for position, value in enumerate(given):
                if value is not None:
                    bounds[position] = self._whole(value, dim)
                    bounds[position] += size if bounds[position] < 0 else 0
            step = 1 if part.step is None else self._whole(part.step, dim)
            start, end = bounds
            if not 0 <= start < end <= size or step < 1:
                self._fail("[...]", f"dim {dim} has size {size}, index is {part.start}:{part.stop}:{part.step}")
            return start, -(-(end - start) // step), step, True
        position = self._whole(part, dim)
        if not -size <= position < size:
            self._fail("[...]", f"dim {dim} has size {size}, index is {position}")
        return position % size, 1, 1, self.on_chip and dim == 0

    def _whole(self, value: Any, dim: int) -> int:
        if isinstance(value, int | np.integer) and not isinstance(value, bool):
            return int(value)
        return self._fail("[...]", f"index of dim {dim} is {value!r}; trace-time ints and slices only")

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> NkiTensor:
        """Elements `start:end:step` of a dim."""
        self._since_5("slice")
        index: list[Any] = [slice(None)] * self.ndim
        index[self._dim("slice", dim, partition=True)] = slice(start, end, step)
        return self[tuple(index)]

    def select(self, dim: int, index: int | VirtualRegister | NkiTensor) -> NkiTensor:
        """Drop a dim at a position; a register or `[1, 1]` tensor selects at run time."""
        self._since_5("select")
        dim = self._dim("select", dim, partition=isinstance(index, int))
        if isinstance(index, int):
            parts: list[Any] = [slice(None)] * self.ndim
            parts[dim] = index
            return self[tuple(parts)]
        if self.scalar is not None or self.gather is not None:
            self._fail("select", "the view is dynamic already; one runtime index per view")
        rest = [number for number in range(self.ndim) if number != dim]
        shape, strides = [self.shape[n] for n in rest], [self.strides[n] for n in rest]
        if self.on_chip and len(shape) < 2:
            shape, strides = [*shape, 1], [*strides, 1]
        self._check_index("select", "index", index, 1)
        view = self._derive(shape, strides, self.offset)
        view.scalar = (index, self.strides[dim])
        return view

    # Shapes

    def permute(self, dims: Sequence[int]) -> NkiTensor:
        """Reorder the dims."""
        self._since_5("permute")
        if sorted(dims) != list(range(self.ndim)):
            self._fail("permute", f"dims is {tuple(dims)}; a permutation of 0 to {self.ndim - 1}")
        if self.on_chip and dims[0] != 0:
            self._fail("permute", f"dims is {tuple(dims)}; dims[0] is 0 on chip")
        return self._derive([self.shape[d] for d in dims], [self.strides[d] for d in dims], self.offset)

    def broadcast(self, dim: int, size: int) -> NkiTensor:
        """Repeat a dim of size 1 `size` times, with stride 0."""
        self._since_5("broadcast")
        dim = self._dim("broadcast", dim)
        if self.shape[dim] != 1:
            self._fail("broadcast", f"dim {dim} has size {self.shape[dim]}; only size 1 is broadcast")
        shape, strides = list(self.shape), list(self.strides)
        shape[dim], strides[dim] = size, 0
        return self._derive(shape, strides, self.offset)

    def expand_dim(self, dim: int) -> NkiTensor:
        """A new dim of size 1 before `dim`."""
        self._since_5("expand_dim")
        if not 0 <= dim <= self.ndim or (dim == 0 and self.on_chip):
            self._fail("expand_dim", f"dim is {dim}; {1 if self.on_chip else 0} to {self.ndim}")
        stride = self.strides[dim] * self.shape[dim] if dim < self.ndim else 1
        return self._derive(
            (*self.shape[:dim], 1, *self.shape[dim:]), (*self.strides[:dim], stride, *self.strides[dim:]), self.offset
        )

    def squeeze_dim(self, dim: int) -> NkiTensor:
        """Drop a dim of size 1."""
        self._since_5("squeeze_dim")
        dim = self._dim("squeeze_dim", dim)
        if self.shape[dim] != 1 or self.ndim <= (2 if self.on_chip else 1):
            self._fail("squeeze_dim", f"dim {dim} has size {self.shape[dim]} of {self.ndim} dims")
        return self._derive(
            self.shape[:dim] + self.shape[dim + 1 :], self.strides[:dim] + self.strides[dim + 1 :], self.offset
        )

    def reshape_dim(self, dim: int, shape: Sequence[int]) -> NkiTensor:
        """Split a dim; one part may be -1."""
        self._since_5("reshape_dim")
        dim = self._dim("reshape_dim", dim)
        sizes = list(shape)
        if sizes.count(-1) == 1:
            sizes[sizes.index(-1)] = self.shape[dim] // -math.prod(sizes)
        if math.prod(sizes) != self.shape[dim] or min(sizes) < 1:
            self._fail("reshape_dim", f"shape is {tuple(shape)}; dim {dim} has {self.shape[dim]} elements")
        strides, step = [], self.strides[dim]
        for size in reversed(sizes):
            strides.append(step)
            step *= size
        return self._derive(
            (*self.shape[:dim], *sizes, *self.shape[dim + 1 :]),
            (*self.strides[:dim], *reversed(strides), *self.strides[dim + 1 :]),
            self.offset,
        )

    def flatten_dims(self, start_dim: int, end_dim: int) -> NkiTensor:
        """Dims `start_dim` to `end_dim`, both inclusive, as one."""
        self._since_5("flatten_dims")
        start, end = self._dim("flatten_dims", start_dim), self._dim("flatten_dims", end_dim)
        size = math.prod(self.shape[start : end + 1])
        strides = reshaped_strides(self.shape[start : end + 1], self.strides[start : end + 1], (size,))
        if strides is None or start > end:
            self._fail("flatten_dims", f"dims {start} to {end} do not lie evenly in memory")
        return self._derive(
            (*self.shape[:start], size, *self.shape[end + 1 :]),
            (*self.strides[:start], *strides, *self.strides[end + 1 :]),
            self.offset,
        )

    def reshape(self, shape: Sequence[int]) -> NkiTensor:
        """The same elements in another shape, without a copy; on chip dim 0 keeps its size."""
        sizes = list(shape)
        if sizes.count(-1) == 1:
            sizes[sizes.index(-1)] = self.size // -math.prod(sizes)
        if math.prod(sizes) != self.size or min(sizes) < 1:
            self._fail("reshape", f"shape is {tuple(shape)}; there are {self.size} elements")
        if not self.on_chip:
            strides = reshaped_strides(self.shape, self.strides, tuple(sizes))
        elif sizes[0] != self.shape[0] or len(sizes) < 2:
            self._fail("reshape", f"shape is {tuple(shape)}; on chip dim 0 keeps its {self.shape[0]} partitions")
        else:
            inner = reshaped_strides(self.shape[1:], self.strides[1:], tuple(sizes[1:]))
            strides = None if inner is None else (self.strides[0], *inner)
        if strides is None:
            self._fail("reshape", f"to {tuple(sizes)} needs a copy: strides are {self.strides}")
        return self._derive(sizes, strides, self.offset)

    def rearrange(
        self, src_pattern: Sequence[Any], dst_pattern: Sequence[Any], fixed_sizes: dict[str, int] | None = None
    ) -> NkiTensor:
        """einops with tuples of names: `t.rearrange(("p", ("a", "b")), ("p", "b", "a"), {"a": 2})`."""
        self._since_5("rearrange")
        try:
            source = parse_axes(src_pattern, "src_pattern")
            target = parse_axes(dst_pattern, "dst_pattern")
            sizes = axis_sizes(source, self.shape, fixed_sizes or {})
        except ValueError as error:
            self._fail("rearrange", str(error))
        names = [name for group in source for name in group]
        if sorted(names) != sorted(name for group in target for name in group) or len(set(names)) != len(names):
            self._fail("rearrange", f"{src_pattern} and {dst_pattern} do not hold the same names, each once")
        if self.on_chip and (len(source[0]) > 1 or target[0] != source[0]):
            self._fail("rearrange", "dim 0, the partition dim, stays as it is on chip")
        strides: dict[str, int] = {}
        for group, stride in zip(source, self.strides, strict=True):
            for name in reversed(group):
                strides[name] = stride
                stride *= sizes[name]
        shape_out, strides_out = [], []
        for group in target:
            size = math.prod(sizes[name] for name in group)
            merged = reshaped_strides(
                tuple(sizes[name] for name in group), tuple(strides[name] for name in group), (size,)
            )
            if merged is None:
                self._fail("rearrange", f"{group} does not lie evenly in memory")
            shape_out.append(size)
            strides_out.append(merged[0])
        return self._derive(shape_out, strides_out, self.offset)

    def view(self, dtype: str) -> NkiTensor:
        """The same bits as another dtype; the last dim, which has to be contiguous, scales with the sizes."""
        element = dtype_of(dtype, "NkiTensor.view")
        old, new = self.element.itemsize, element.itemsize
        if old == new:
            return NkiTensor(self.storage, element, self.shape, self.strides, self.offset, self.scalar, self.gather)
        if self.strides[-1] != 1 and self.shape[-1] != 1:
            self._fail("view", f"the last dim has stride {self.strides[-1]}; another size needs a contiguous one")
        outer = [stride * old for stride in self.strides[:-1]]
        numbers = [self.shape[-1] * old, self.offset * old, *outer]
        if any(number % new for number in numbers):
            self._fail("view", f"as {dtype}: {new} bytes divide not all of its last dim, offset and strides")
        strides = (*(stride // new for stride in outer), 1)
        shape = (*self.shape[:-1], self.shape[-1] * old // new)
        scalar = self.scalar and (self.scalar[0], self.scalar[1] * old // new)
        gather = self.gather and (self.gather[0], self.gather[1] * old // new)
        return NkiTensor(self.storage, element, shape, strides, self.offset * old // new, scalar, gather)

    def reinterpret_cast(self, dtype: str) -> NkiTensor:
        """Alias of `view`."""
        return self.view(dtype)

    def ap(
        self,
        pattern: Sequence[Sequence[int]],
        offset: int | None = None,
        scalar_offset: VirtualRegister | NkiTensor | None = None,
        vector_offset: NkiTensor | None = None,
        indirect_dim: int = 0,
        dtype: str | None = None,
    ) -> NkiTensor:
        """A raw access pattern `[[stride, count], ...]` over the storage, in elements.

        Args:
            pattern: on chip the first pair is the partitions, with the storage's elements per partition as stride.
            offset: first element; None is this view's.
            scalar_offset: a register or a `[1, 1]` tensor of integers, whose value times the size of an index of
                `indirect_dim` is added at run time.
            vector_offset: `[n, 1]` indices of dim 0 in SBUF, integers, one per count of the first pair; its stride is
                ignored.
            indirect_dim: the dim that `scalar_offset` counts.
            dtype: read the storage as this; pattern and offset count its elements.
        """
        element = self.element if dtype is None else dtype_of(dtype, "NkiTensor.ap")
        if offset is not None and offset != 0 and self.offset != 0:
            self._fail("ap", f"offset is {offset} on a view that starts at {self.offset}: documented in two ways")
        start = self.offset * self.element.itemsize // element.itemsize if offset is None else offset + self.offset
        counts = tuple(int(pair[1]) for pair in pattern)
        strides = tuple(int(pair[0]) for pair in pattern)
        if not counts or min(counts) < 1 or min(strides) < 0:
            self._fail("ap", f"pattern is {pattern}; counts from 1, strides from 0")
        if self.on_chip:
            row = self.storage.row_bytes // element.itemsize
            if len(counts) < 2 or (strides[0] != row and counts[0] != 1):
                self._fail("ap", f"pattern is {pattern}; on chip it begins with [{row}, partitions]")
            strides = (row, *strides[1:])
            if last_element(counts[1:], strides[1:], start % row) >= row:
                self._fail("ap", f"pattern {pattern} from {start} runs past a partition's {row} elements")
        if scalar_offset is not None and vector_offset is not None:
            self._fail("ap", "scalar_offset and vector_offset are both given; at most one")
        view = NkiTensor(self.storage, element, counts, strides, start)
        if scalar_offset is not None:
            self._check_index("ap", "scalar_offset", scalar_offset, 1)
            view.scalar = (scalar_offset, math.prod(self.shape[indirect_dim + 1 :]))
        if vector_offset is not None:
            if indirect_dim != 0 or self.on_chip:
                self._fail("ap", "vector_offset: indices of dim 0 of an HBM tensor")
            self._check_index("ap", "vector_offset", vector_offset, counts[0])
            if vector_offset.buffer != MemoryRegion.sbuf:
                self._fail("ap", f"vector_offset is in {vector_offset.buffer}; has to be in sbuf")
            view.gather = (vector_offset, math.prod(self.shape[1:]))
        else:
            view.check_bounds("ap")
        return view

    def _check_index(self, method: str, argument: str, index: VirtualRegister | NkiTensor, count: int) -> None:
        """Refuse an index tensor that is not `[count, 1]` integers; a register is one."""
        if isinstance(index, VirtualRegister):
            return
        if index.shape != (count, 1):
            self._fail(method, f"{argument} is of shape {index.shape}; has to be [{count}, 1]")
        if index.element.kind != INTEGER or index.dtype == "bool_":
            self._fail(method, f"{argument} is of {index.dtype}; has to be of an integer dtype")

    # Queries

    def get_pattern(self) -> list[list[int]]:
        """`[[stride, count], ...]` of the view."""
        return [[stride, size] for stride, size in zip(self.strides, self.shape, strict=True)]

    def is_contiguous(self) -> bool:
        """Elements lie next to each other; on chip within a partition."""
        shape, strides = (self.shape[1:], self.strides[1:]) if self.on_chip else (self.shape, self.strides)
        return contiguous_run(shape, strides) == math.prod(shape)

    def is_indirect(self) -> bool:
        """Whether an index tensor picks the elements."""
        return self.gather is not None

    # Access, for the instructions

    def check_bounds(self, where: str, extra: int = 0) -> None:
        """Refuse a view that leaves its storage; `extra` is a runtime offset in elements."""
        end = (last_element(self.shape, self.strides, self.offset + extra) + 1) * self.element.itemsize
        if end > self.storage.nbytes or self.offset + extra < 0:
            self._fail(where, f"touches byte {end - 1} of {self.storage.nbytes}")

    def runtime_offset(self, core: int) -> int:
        """Elements that a runtime offset adds, 0 without one."""
        if self.scalar is None:
            return 0
        source, stride = self.scalar
        if isinstance(source, VirtualRegister):
            value = register_value(source, "scalar_offset")
        elif source.storage.base is None:
            return 0  # nothing is executed, so nobody knows
        else:
            value = int(source.read_raw(core).reshape(-1)[0])
        self.check_bounds("scalar_offset", value * stride)
        return value * stride

    def strided(self, memory: NDArray[np.uint8], extra: int = 0, element: np.dtype | None = None) -> NDArray:
        """This view over `memory`, bytes laid out as the storage's are."""
        size = self.element.itemsize
        return np.ndarray(
            self.shape if element is None else (*self.shape, size),
            element or self.element.storage,
            memory.data,
            (self.offset + extra) * size,
            tuple(stride * size for stride in self.strides) + ((1,) if element is not None else ()),
        )

    def read_raw(self, core: int) -> NDArray:
        """The elements in their storage dtype, as a view where they are not gathered."""
        if self.gather is not None:
            indices, valid = self.gathered_elements(core)
            if not valid.all():
                self._fail("vector_offset", "an index leaves the tensor; oob_mode.skip drops such accesses")
            if self.storage.cores is not None:
                read, written = (mask.reshape(-1, self.element.itemsize) for mask in self.storage.cores[core].masks())
                read[indices] |= ~written[indices]
            return self._flat(self.storage.bytes_to_read(core))[indices]
        extra = self.runtime_offset(core)
        if self.storage.cores is not None:
            read, written = (self._mask(mask, extra) for mask in self.storage.cores[core].masks())
            read |= ~written
        return self.strided(self.storage.bytes_to_read(core), extra)

    def write_raw(self, core: int, values: NDArray, psum_writer: int = 2) -> None:
        """Write elements, already of the storage dtype, in this view's shape."""
        if self.gather is not None:
            indices, valid = self.gathered_elements(core)
            if not valid.all():
                self._fail("vector_offset", "an index leaves the tensor; oob_mode.skip drops such accesses")
            self.write_elements(core, indices, values)
            return
        extra = self.runtime_offset(core)
        self.strided(self.storage.bytes_to_write(core), extra)[...] = values
        if self.storage.cores is not None:
            self._mask(self.storage.cores[core].written, extra)[...] = True
        if self.storage.psum_writers is not None:
            self.strided(self.storage.psum_writers, extra, np.dtype(np.uint8))[...] = psum_writer

    def gathered_elements(self, core: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Element numbers of an indirect view in its shape, and which of them are inside the storage."""
        assert self.gather is not None
        index, stride = self.gather
        rows = index.read_raw(core).reshape(-1).astype(np.int64)
        elements = self.offset + (rows * stride).reshape(-1, *(1,) * (self.ndim - 1))
        for dim in range(1, self.ndim):
            steps = np.arange(self.shape[dim], dtype=np.int64) * self.strides[dim]
            elements = elements + steps.reshape(-1, *(1,) * (self.ndim - 1 - dim))
        elements = np.broadcast_to(elements, self.shape)
        return elements, (elements >= 0) & (elements < self.storage.nbytes // self.element.itemsize)

    def write_elements(self, core: int, elements: NDArray[np.int64], values: NDArray) -> None:
        """Write elements of the storage by number; where a number repeats, the last value stays."""
        self._flat(self.storage.bytes_to_write(core))[elements] = values
        if self.storage.cores is not None:
            self.storage.cores[core].written.reshape(-1, self.element.itemsize)[elements] = True

    def _mask(self, mask: NDArray[np.bool_], extra: int) -> NDArray[np.bool_]:
        """This view of a mask of the storage's bytes, with a last dim for those of an element."""
        return self.strided(mask.view(np.uint8), extra, np.dtype(np.bool_))

    def _flat(self, memory: NDArray[np.uint8]) -> NDArray:
        count = self.storage.nbytes // self.element.itemsize
        return memory[: count * self.element.itemsize].view(self.element.storage)

    @property
    def packed(self) -> bool:
        """A packed x4 type."""
        return self.element.kind == PACKED
