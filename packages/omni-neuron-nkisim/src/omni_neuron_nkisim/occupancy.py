# SPDX-License-Identifier: Apache-2.0
"""When an engine that serves several queues is busy."""

from __future__ import annotations

from bisect import bisect_left


class Occupancy:
    """The busy times of one engine, as disjoint spans in order.

    A DMA engine takes turns between its queues, so a transfer that waits for its data holds up no other, and one that
    is ready uses whatever time is left between those before it in the program. Time that passed idle is gone.
    """

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []

    def place(self, ready: float, ns: float) -> float:
        """Take the first `ns` that are free from `ready` on, in parts where need be.

        Returns:
            When the last part ends.
        """
        if not ns:
            return ready
        first = last = bisect_left(self._ends, ready)
        at, left = ready, ns
        while last < len(self._starts) and self._starts[last] - at < left:
            left -= max(0.0, self._starts[last] - at)
            at = self._ends[last]
            last += 1
        end = at + left
        # From `ready` to `end` nothing is free any more: one span takes the place of those between.
        low = min(ready, self._starts[first]) if last > first else ready
        self._starts[first:last], self._ends[first:last] = [low], [end]
        return end
