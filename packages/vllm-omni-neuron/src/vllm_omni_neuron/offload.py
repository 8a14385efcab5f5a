# SPDX-License-Identifier: Apache-2.0
"""Weights out of their modules for a while: a DiT's, while the VAE decodes on the same core, or all of them, asleep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn


@dataclass(frozen=True)
class _Storage:
    """One storage of the modules: a flat tensor of it on the host or its file, its device, and all that lies in it."""

    contents: torch.Tensor | Path
    dtype: torch.dtype
    device: torch.device
    owners: list[tuple[torch.Tensor, torch.Size, tuple[int, ...], int]]

    def read(self) -> torch.Tensor:
        """The flat tensor on its device."""
        if isinstance(self.contents, torch.Tensor):
            return self.contents.to(self.device)
        return torch.from_numpy(np.fromfile(self.contents, dtype=np.uint8)).view(self.dtype).to(self.device)


@dataclass(frozen=True)
class StoredWeights:
    """What `take_weights` took out of modules.

    Attributes:
        nbytes: bytes taken off the modules, shared ones counted once.
    """

    nbytes: int
    _storages: list[_Storage]

    # The decorators: weights are ordinary tensors, and must stay so when a request runs in inference mode.
    @torch.inference_mode(False)
    @torch.no_grad()
    def restore(self) -> None:
        """Back on their device bit for bit: the same `Parameter` objects with the same strides.

        Those of one dtype that shared a storage share one again.
        """
        for storage in self._storages:
            flat = storage.read()
            for tensor, size, stride, offset in storage.owners:
                tensor.data = flat.as_strided(size, stride, offset)


@contextmanager
def weights_on_host(modules: Sequence[nn.Module]) -> Iterator[int]:
    """Within the block, the modules' parameters and buffers are empty and hold no memory on their device.

    Afterwards, also if the block raises, they are back (`StoredWeights.restore`). Do not call the modules, nor move or
    cast them, within the block.

    Args:
        modules: may overlap or share tensors.

    Yields:
        The bytes taken off the modules, shared ones counted once.
    """
    stored = take_weights(modules)
    try:
        yield stored.nbytes
    finally:
        stored.restore()


@torch.inference_mode(False)
@torch.no_grad()
def take_weights(modules: Sequence[nn.Module], folder: Path | None = None) -> StoredWeights:
    """Empty the modules' parameters and buffers, until `restore` is called on what this returns.

    Args:
        modules: may overlap or share tensors. Tensors outside them that view the same storages keep these alive.
        folder: empty, for one file a storage. None for the host's memory: a copy, or the bytes as they are if the
            device is the CPU (then no memory is freed).

    Raises:
        OSError: the folder is full; the modules are as they were.
    """
    shared: dict[tuple[torch.device, int, torch.dtype], list[torch.Tensor]] = {}
    for tensor in {t: None for module in modules for t in (*module.parameters(), *module.buffers()) if t.numel()}:
        shared.setdefault((tensor.device, tensor.untyped_storage().data_ptr(), tensor.dtype), []).append(tensor)
    storages, nbytes = [], 0
    for number, ((device, _, dtype), tensors) in enumerate(shared.items()):
        first = tensors[0].detach()
        # The whole storage, by views alone: whatever strides and gaps its owners have, one plain copy moves it.
        flat = first.as_strided((first.untyped_storage().nbytes() // first.itemsize,), (1,), 0)
        owners = [(tensor, tensor.size(), tensor.stride(), int(tensor.storage_offset())) for tensor in tensors]
        # The storage itself may be larger than its owners (a mapped file) or smaller (tied weights).
        nbytes += min(flat.nbytes, sum(tensor.nbytes for tensor in tensors))
        contents: torch.Tensor | Path = flat.to("cpu")
        if folder is not None:
            assert isinstance(contents, torch.Tensor)
            contents.view(torch.uint8).numpy().tofile(folder / str(number))
            contents = folder / str(number)
        storages.append(_Storage(contents, dtype, device, owners))
    # Emptied only now that every copy exists: a copy that fails leaves the modules as they were.
    for tensors in shared.values():
        for tensor in tensors:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return StoredWeights(nbytes, storages)
