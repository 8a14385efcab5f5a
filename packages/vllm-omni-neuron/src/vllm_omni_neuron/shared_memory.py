# SPDX-License-Identifier: Apache-2.0
"""How much of `/dev/shm` an engine needs, for the engine and for `doctor`; imports nothing heavy."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

PATH = Path("/dev/shm")

# Each worker's queue to the engine touches a few MiB; a video goes through in one piece (81×720×1280×3 bytes are
# 224 MB in uint8 and four times that in float32), and AWS's documentation asks containers for 2 GiB in all.
MINIMUM_FREE_BYTES = 16 << 20
ADVISED_FREE_BYTES = 1 << 30
REMEDY = "remove stale files from it, or start the container with --shm-size=2g"


class Space(NamedTuple):
    """Bytes of `/dev/shm`."""

    free: int
    total: int

    def __str__(self) -> str:
        return f"{PATH} has {self.free / 2**20:.0f} MiB free of {self.total / 2**20:.0f} MiB"

    @property
    def too_small(self) -> str:
        """Why workers cannot exchange messages, else ""."""
        if self.free >= MINIMUM_FREE_BYTES:
            return ""
        return f"{self}, at least {MINIMUM_FREE_BYTES >> 20} MiB are needed for workers to exchange messages: {REMEDY}"

    @property
    def tight(self) -> str:
        """Why a large video may be refused, else ""."""
        if self.free >= ADVISED_FREE_BYTES:
            return ""
        return (
            f"{self}, {ADVISED_FREE_BYTES >> 20} MiB are advised: a large video may not fit on its way from the worker "
            f"and is refused then; {REMEDY}"
        )

    def lacks(self, needed: int, what: str) -> str:
        """Why `what`, of `needed` bytes, does not fit, else ""."""
        if self.free >= needed:
            return ""
        return f"{what} needs {needed / 2**20:.0f} MiB of shared memory, {self}: {REMEDY}"


def space() -> Space:
    """What `/dev/shm` has now."""
    usage = shutil.disk_usage(PATH)
    return Space(usage.free, usage.total)
