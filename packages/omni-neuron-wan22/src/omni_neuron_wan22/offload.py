# SPDX-License-Identifier: Apache-2.0
"""Weights off the device for a while: the DiT's, while the VAE decodes on the same core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class _Storage:
    """One storage of the modules: a flat tensor of it on the host, its device, and all that lies in it."""

    host: torch.Tensor
    device: torch.device
    owners: list[tuple[torch.Tensor, torch.Size, tuple[int, ...], int]]

    @property
    def nbytes(self) -> int:
        """Bytes of its owners; the storage itself may be larger (a mapped file) or smaller (tied weights)."""
        return min(self.host.nbytes, sum(size.numel() * self.host.itemsize for _, size, _, _ in self.owners))


@contextmanager
def weights_on_host(modules: Sequence[nn.Module]) -> Iterator[int]:
    """Within the block, the modules' parameters and buffers are empty and hold no memory on their device.

    Their bytes wait on the host, in a copy, or as they are if the device is the CPU (then no memory is freed).
    Afterwards, also if the block raises, they are back on their device bit for bit: the same `Parameter` objects with
    the same strides, and those of one dtype that shared a storage share one again. Tensors outside the modules that
    view the same storages keep them alive. Do not call the modules, nor move or cast them, within the block.

    Args:
        modules: may overlap or share tensors.

    Yields:
        The bytes taken off the modules, shared ones counted once.
    """
    storages = _take(modules)
    try:
        yield sum(storage.nbytes for storage in storages)
    finally:
        _give_back(storages)


# The decorators: weights are ordinary tensors, and must stay so when a request runs in inference mode.
@torch.inference_mode(False)
@torch.no_grad()
def _take(modules: Sequence[nn.Module]) -> list[_Storage]:
    shared: dict[tuple[torch.device, int, torch.dtype], list[torch.Tensor]] = {}
    for tensor in {t: None for module in modules for t in (*module.parameters(), *module.buffers()) if t.numel()}:
        shared.setdefault((tensor.device, tensor.untyped_storage().data_ptr(), tensor.dtype), []).append(tensor)
    storages = []
    for (device, _, _), tensors in shared.items():
        first = tensors[0].detach()
        # The whole storage, by views alone: whatever strides and gaps its owners have, one plain copy moves it.
        flat = first.as_strided((first.untyped_storage().nbytes() // first.itemsize,), (1,), 0)
        owners = [(tensor, tensor.size(), tensor.stride(), int(tensor.storage_offset())) for tensor in tensors]
        storages.append(_Storage(flat.to("cpu"), device, owners))
    # Emptied only now that every copy exists: a copy that fails leaves the modules as they were.
    for tensors in shared.values():
        for tensor in tensors:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return storages


@torch.inference_mode(False)
@torch.no_grad()
def _give_back(storages: list[_Storage]) -> None:
    for storage in storages:
        flat = storage.host.to(storage.device)
        for tensor, size, stride, offset in storage.owners:
            tensor.data = flat.as_strided(size, stride, offset)
