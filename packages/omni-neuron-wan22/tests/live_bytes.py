# SPDX-License-Identifier: Apache-2.0
"""How many bytes the tensors of a computation take at its peak, on any device, the meta device included."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Within the block, `peak` is the most bytes that storages made in it held at a time.

    Args:
        given: tensors from before, which are not counted.
    """

    def __init__(self, given: Iterable[torch.Tensor] = ()):
        super().__init__()
        self.peak = self._live = 0
        self._sizes: dict[int, int] = {}
        for tensor in given:
            self._add(tensor, counted=False)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._add(value, counted=True)
        return result

    def _add(self, tensor: torch.Tensor, *, counted: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes() if counted else 0
            self._live += self._sizes[key]
            self.peak = max(self.peak, self._live)
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self._live -= self._sizes.pop(key)
