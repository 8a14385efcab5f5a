# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni's groups taken over as they are, and built anew in the order of a physical mesh; below the engine."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # spawned ranks inherit it

import adopted_group_ranks

from omni_neuron_parallel import RankPool


def test_adopted_and_rebuilt() -> None:
    with RankPool(2, timeout=300, preload=("vllm_omni_neuron.worker",)) as pool:
        for axis in ("tp", "cp", "cfg"):
            for placement in (None, (1, 0)):
                order = list(placement or (0, 1))
                for rank, seen in enumerate(pool.run(adopted_group_ranks.adopted, axis, placement)):
                    values = [float(member) for member in order]
                    assert seen == {
                        "ranks": (order, order),
                        "place": (order.index(rank),) * 3,
                        "shared": True,
                        "separate": [[[value]] for value in values],
                        "joined": [values],
                        "ours": [values],
                        "degrees": (2 if axis == "cp" else 1, 1),
                        "others": [1, 1],
                        "decode": (0, 1),
                    }
