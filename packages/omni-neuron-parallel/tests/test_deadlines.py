# SPDX-License-Identifier: Apache-2.0
"""A rank that dies or stalls inside a collective: every other rank says where, within its deadline."""

from __future__ import annotations

import re
import signal

import group_ranks
import pytest

from omni_neuron_parallel import RankPool

TIMEOUT = 4.0  # seconds; how long the test waits where a deadline is at work


def check(operation: str, rank: int, message: str) -> None:
    where = rf"{operation} of the cp group \[0, 1, 2\] failed on rank {rank} in request 7, denoising step 2 of 2: \S"
    assert re.match(where, message), message
    assert "OMNI_NEURON_COLLECTIVE_TIMEOUT_S" in message


@pytest.mark.parametrize("operation", ["rotate", "all_reduce"])
def test_a_dead_rank(operation: str) -> None:
    with RankPool(3, timeout=60) as pool:
        processes = list(pool._processes)
        # `run` would stop at the dead rank; what counts is what each of the others says.
        for connection in pool._connections:
            connection.send((group_ranks.lose_a_rank, (operation, "die", TIMEOUT)))
        for rank in (0, 2):
            assert pool._connections[rank].poll(60), f"rank {rank} hangs"
            ok, message = pool._connections[rank].recv()
            assert ok, message
            check(operation, rank, message)
    assert [process.exitcode for process in processes] == [-signal.SIGKILL] * 3


def test_a_rank_that_is_late() -> None:
    with RankPool(3, timeout=60) as pool:
        for operation in ("rotate", "all_reduce"):
            messages = pool.run(group_ranks.lose_a_rank, operation, "stall", TIMEOUT)
            for rank, message in enumerate(messages):
                check(operation, rank, message)
            # The late rank comes to a collective that the others have left.
            assert all(f"{TIMEOUT * 1000:.0f}ms" in messages[rank] for rank in (0, 2)), messages
        # The groups are made by all ranks too.
        for rank, message in enumerate(pool.run(group_ranks.absent_from_making, 1.0)):
            assert message.startswith(
                "absent" if rank == 1 else f"making of the tp group [0, 1, 2] failed on rank {rank}"
            )
