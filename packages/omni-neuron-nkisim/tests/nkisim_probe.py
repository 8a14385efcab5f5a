# SPDX-License-Identifier: Apache-2.0
"""Short forms for tests: run a body as a kernel, load arrays into tiles, store tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nki.isa as nisa
import nki.language as nl
import numpy as np

from omni_neuron_nkisim import run_spmd, settings


def run(body: Callable[..., Any], *arrays: Any, lnc: int = 1, **changes: Any) -> Any:
    """The result of `body(*arrays)` on one rank, with changed settings."""
    with settings(**changes):
        return run_spmd(body, [arrays], lnc=lnc)[0]


def spmd(body: Callable[..., Any], per_rank: list[tuple[Any, ...]], lnc: int = 1, **changes: Any) -> list[Any]:
    """The results of `body` on every rank, with changed settings."""
    with settings(**changes):
        return run_spmd(body, per_rank, lnc=lnc)


def tile(shape: tuple[int, ...], dtype: str = "float32", buffer: Any = None) -> Any:
    """A fresh tile, in SBUF unless said."""
    return nl.ndarray(shape, dtype, buffer=nl.sbuf if buffer is None else buffer)


def load(source: Any, buffer: Any = None, dtype: str | None = None) -> Any:
    """An HBM tensor as a tile, cast if a dtype is given; through SBUF where it goes to PSUM."""
    staged = tile(source.shape, dtype or source.dtype)
    nisa.dma_copy(staged, source)
    if buffer is None:
        return staged
    result = tile(source.shape, staged.dtype, buffer)
    nisa.tensor_copy(result, staged)
    return result


def store(value: Any, shape: tuple[int, ...] | None = None) -> Any:
    """A tile as a shared HBM tensor."""
    if value.buffer == nl.psum:
        staged = tile(value.shape, value.dtype)
        nisa.tensor_copy(staged, value)
        value = staged
    out = nl.ndarray(shape or value.shape, value.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(out, value)
    return out


def through(
    instruction: Callable[..., None],
    *arrays: np.ndarray,
    shape: tuple[int, ...] | None = None,
    dtype: str | None = None,
    into: str = "sbuf",
    **changes: Any,
) -> np.ndarray:
    """`instruction(dst, *tiles)` on arrays in SBUF; dst has the first array's shape and dtype unless said."""

    def body(*sources: Any) -> Any:
        first = sources[0]
        dst = tile(shape or first.shape, dtype or first.dtype, getattr(nl, into))
        instruction(dst, *(load(source) for source in sources))
        return store(dst)

    return run(body, *arrays, **changes)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Standard normal float32."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
