# SPDX-License-Identifier: Apache-2.0
"""Weights of a sleeping worker whose device is the CPU: in files, so that memory is really free."""

from __future__ import annotations

import ctypes
import gc
import shutil
import tempfile
from pathlib import Path

from torch import nn

from vllm_omni_neuron.offload import take_weights


class SleepingWeights:
    """The weights of `pipeline`, taken out of memory into a temporary folder when this is made.

    Attributes:
        folder: where they are; TMPDIR names the folder that it is in.
        nbytes: bytes that left the memory.

    Raises:
        RuntimeError: no room for them; the pipeline is as it was.
    """

    def __init__(self, pipeline: nn.Module) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="omni-neuron-sleep-"))
        try:
            self._stored = take_weights([pipeline], self.folder)
        except OSError as error:
            free = shutil.disk_usage(self.folder).free
            self.discard()
            raise RuntimeError(
                f"sleep: the weights do not fit into {self.folder.parent} ({free / 2**20:.0f} MiB free): {error}; set "
                "TMPDIR to a folder on a disk with room for them"
            ) from error
        self.nbytes = self._stored.nbytes
        _return_freed_memory()

    def wake(self) -> None:
        """Have them back in memory, and remove the folder."""
        self._stored.restore()
        self.discard()

    def discard(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder)


def _return_freed_memory() -> None:
    """Have the C library give pages back that it keeps for later allocations (glibc's `malloc_trim`)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
