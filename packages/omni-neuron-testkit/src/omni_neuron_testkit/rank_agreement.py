# SPDX-License-Identifier: Apache-2.0
"""One tensor from the parts that the ranks of a layout hold, and whether the ranks agree.

A rank's part is the whole tensor, or a piece of one dim for context parallelism, for tensor parallelism (which splits
features, or tokens where it has sequence parallelism), or both. Pieces are equal, ceil(size / ranks) rows, with pads
after the last one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .pass_rule import as_array

Array = npt.NDArray[Any]


class Ranks(NamedTuple):
    """A process's rank in the tensor-parallel, context-parallel and CFG-parallel group."""

    tp: int = 0
    cp: int = 0
    cfg: int = 0


class Assembled(NamedTuple):
    """A tensor put together.

    Attributes:
        tensor: the whole, from the lowest of the ranks that hold each piece.
        disagreement: which ranks hold other bits than the ones they should equal; None where all agree.
    """

    tensor: Array
    disagreement: str | None


def assemble(parts: Mapping[tuple[int, int], Any], shape: Sequence[int]) -> Assembled:
    """Put a tensor together from the parts by (tp, cp) rank.

    How an axis splits the tensor follows from the sizes; where they leave a choice, ranks that hold equal bits decide.

    Args:
        parts: one a rank, of every rank of the layout.
        shape: of the whole.

    Raises:
        ValueError: a rank's part is missing, or the parts are no pieces of a tensor of that shape.
    """
    arrays = {key: as_array(part) for key, part in parts.items()}
    tp_size, cp_size = (1 + max((key[axis] for key in arrays), default=-1) for axis in (0, 1))
    missing = [f"tp{t} cp{c}" for c in range(cp_size) for t in range(tp_size) if (t, c) not in arrays]
    if missing or not arrays:
        raise ValueError(f"parts are missing, of {', '.join(missing) or 'all ranks'}")
    sizes = {tuple(array.shape) for array in arrays.values()}
    whole = tuple(shape)
    [part_shape] = sizes if len(sizes) == 1 else [()]
    first: Assembled | None = None
    for cp_dim, tp_dim in _ways(part_shape, whole, tp_size, cp_size):
        disagreement = _disagreement(arrays, cp_split=cp_dim is not None, tp_split=tp_dim is not None)
        found = Assembled(_join(arrays, whole, cp_dim, tp_dim, tp_size, cp_size), disagreement)
        if disagreement is None:
            return found
        first = first or found
    if first is None:
        listing = ", ".join(str(list(size)) for size in sorted(sizes))
        raise ValueError(
            f"parts of shape {listing} on tp {tp_size} × cp {cp_size} ranks are no pieces of a tensor {list(whole)}"
        )
    return first


def disagreeing(parts: Mapping[Any, Any]) -> list[Any]:
    """The keys whose part differs, in any bit, from the first key's."""
    keys = list(parts)
    bits = {key: _bits(parts[key]) for key in keys}
    return [key for key in keys if bits[key] != bits[keys[0]]]


def _bits(part: Any) -> tuple[Any, ...]:
    array = as_array(part)
    return array.shape, array.dtype.str, array.tobytes()


def _ways(
    part: tuple[int, ...], whole: tuple[int, ...], tp_size: int, cp_size: int
) -> list[tuple[int | None, int | None]]:
    """The dims that CP and TP may split, the fewest splits and CP's first; None for an axis that splits none."""
    if len(part) != len(whole):
        return []
    dims = range(len(whole))
    cp_dims = [None, *dims] if cp_size > 1 else [None]
    tp_dims = [None, *dims] if tp_size > 1 else [None]
    ways: list[tuple[int | None, int | None]] = []
    for cp_dim, tp_dim in itertools.product(cp_dims, tp_dims):
        expected, splits = list(whole), True
        # CP first: sequence parallelism splits a CP rank's tokens further.
        for dim, size in ((cp_dim, cp_size), (tp_dim, tp_size)):
            if dim is not None:
                splits &= expected[dim] > 1
                expected[dim] = -(-expected[dim] // size)
        if splits and tuple(expected) == part:
            ways.append((cp_dim, tp_dim))
    return sorted(ways, key=lambda way: ((way[0] is not None) + (way[1] is not None), way[0] is None))


def _disagreement(arrays: Mapping[tuple[int, int], Array], *, cp_split: bool, tp_split: bool) -> str | None:
    """Which ranks differ from the first of those that hold the same piece."""
    holders: dict[tuple[int, int], dict[tuple[int, int], Array]] = {}
    for (tp, cp), array in sorted(arrays.items()):
        holders.setdefault((tp if tp_split else 0, cp if cp_split else 0), {})[tp, cp] = array
    for group in holders.values():
        odd = disagreeing(group)
        if odd:
            tp, cp = next(iter(group))
            names = ", ".join(f"tp{t} cp{c}" for t, c in odd)
            return f"{names} {'holds' if len(odd) == 1 else 'hold'} other bits than tp{tp} cp{cp}"
    return None


def _join(
    arrays: Mapping[tuple[int, int], Array],
    whole: tuple[int, ...],
    cp_dim: int | None,
    tp_dim: int | None,
    tp_size: int,
    cp_size: int,
) -> Array:
    rows = []
    for cp in range(cp_size if cp_dim is not None else 1):
        if tp_dim is None:
            rows.append(arrays[0, cp])
            continue
        length = whole[tp_dim] if tp_dim != cp_dim else -(-whole[tp_dim] // cp_size)
        row = np.concatenate([arrays[tp, cp] for tp in range(tp_size)], axis=tp_dim)
        rows.append(row.take(range(length), axis=tp_dim))
    if cp_dim is None:
        return rows[0]
    return np.concatenate(rows, axis=cp_dim).take(range(whole[cp_dim]), axis=cp_dim)
