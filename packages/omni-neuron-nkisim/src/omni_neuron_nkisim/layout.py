# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on shapes and strides: which reshapes are views, how a rearrangement is written, what a view touches."""

from __future__ import annotations

import math
from collections.abc import Sequence

Dims = tuple[int, ...]


def row_major(shape: Sequence[int]) -> Dims:
    """Strides, in elements, of a dense tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def reshaped_strides(shape: Dims, strides: Dims, new_shape: Dims) -> Dims | None:
    """Strides of the same elements in `new_shape`, or None where that needs a copy."""
    old = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1]
    result: list[int] = []
    at = 0
    room, step = 1, 1  # what is left of the current run of old dims, and the stride of its last one
    for size in reversed(new_shape):
        if size == 1:
            result.append(step)
            continue
        if room == 1:
            if at == len(old):
                return None
            at += 1
            room, step = old[-at]
        while room % size and at < len(old):
            # The run continues over an older dim only where both lie evenly in memory.
            outer, outer_stride = old[-at - 1]
            if outer_stride != step * room:
                return None
            room *= outer
            at += 1
        if room % size:
            return None
        result.append(step)
        room //= size
        step *= size
    return tuple(reversed(result))


def last_element(shape: Dims, strides: Dims, offset: int) -> int:
    """Largest element index that a view with strides of at least 0 touches."""
    return offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def contiguous_run(shape: Dims, strides: Dims) -> int:
    """Elements that lie next to each other at the innermost end of a view, 1 where the innermost stride is not 1."""
    run = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 1:
            continue
        if stride != run:
            break
        run *= size
    return run


def parse_axes(pattern: Sequence[object], where: str) -> list[tuple[str, ...]]:
    """A side of `rearrange`: names, or tuples of names that are one dim together.

    Raises:
        ValueError: something else.
    """
    groups = []
    for part in pattern:
        names = (part,) if isinstance(part, str) else tuple(part) if isinstance(part, tuple | list) else None
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{where} has {part!r} where a name or a tuple of names belongs")
        groups.append(names)
    return groups


def axis_sizes(groups: list[tuple[str, ...]], shape: Dims, fixed: dict[str, int]) -> dict[str, int]:
    """The size of every name of the left side of `rearrange`.

    Raises:
        ValueError: sizes that do not multiply to the shape, or more than one unknown in a group.
    """
    if len(groups) != len(shape):
        raise ValueError(f"src_pattern has {len(groups)} dims, the tensor {len(shape)}")
    sizes: dict[str, int] = {}
    for names, size in zip(groups, shape, strict=True):
        unknown = [name for name in names if name not in fixed]
        known = math.prod(fixed[name] for name in names if name in fixed)
        if len(unknown) > 1:
            raise ValueError(f"sizes of {', '.join(unknown)} are unknown; fixed_sizes has to name all but one")
        if size % known or (not unknown and known != size):
            raise ValueError(f"{names} has {known} elements in a dim of {size}")
        sizes |= {name: fixed.get(name, size // known) for name in names}
    return sizes
