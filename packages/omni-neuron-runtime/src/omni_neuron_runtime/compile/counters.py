# SPDX-License-Identifier: Apache-2.0
"""Counts of what the compile backends of this process did; a warm start shows as zeros."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass
class CompileCounters:
    """Since the process started, or since the last `reset`.

    Attributes:
        graphs: graphs that a backend was given: what torch.compile captured anew.
        lowerings: graphs lowered to StableHLO by this process.
        compilations: StableHLO modules compiled by this process.
        artifact_hits: graphs whose StableHLO came from the cache.
        executable_hits: modules whose executable came from the cache.
        waits: times this process waited for another one that compiled the same.
        corrupted: cache entries that were damaged, and rebuilt.
        seconds: spent in checking, lowering, compiling and loading.
    """

    graphs: int = 0
    lowerings: int = 0
    compilations: int = 0
    artifact_hits: int = 0
    executable_hits: int = 0
    waits: int = 0
    corrupted: int = 0
    seconds: float = 0.0

    def reset(self) -> None:
        """Everything back to zero."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, field.default)

    def as_dict(self) -> dict[str, float]:
        """The counts by name."""
        return dataclasses.asdict(self)


COUNTERS = CompileCounters()
