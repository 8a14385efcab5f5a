# SPDX-License-Identifier: Apache-2.0
"""Ranks that disagree, fail, die or stall: always an error that names them, never a hang."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys

import parallel_ranks
import pytest
from torch import arange

from omni_neuron_parallel import RankError, RankPool, Topology, check_rank_agreement, tensor_digest


def test_agreement(two_ranks: RankPool) -> None:
    topology = Topology(tp=2)
    assert two_ranks.run(parallel_ranks.with_topology, topology, parallel_ranks.agree, True) == ["agreed"] * 2
    messages = two_ranks.run(parallel_ranks.with_topology, topology, parallel_ranks.agree, False)
    for message in messages:
        assert message.startswith("latents after step 3 differs between ranks: ranks [0]: ")
        assert "ranks [1]: " in message


def test_agreement_alone_is_trivial() -> None:
    check_rank_agreement(arange(3), "anything")
    assert tensor_digest(arange(4)) != tensor_digest(arange(4).view(2, 2))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (parallel_ranks.fail_on_rank_1, r"fail_on_rank_1: rank 1 of 2 raised[\s\S]*this rank is broken"),
        (parallel_ranks.die_on_rank_1, r"die_on_rank_1: rank 1 of 2 died \(exit code -9\)"),
    ],
)
def test_failures_name_the_rank(function: object, message: str) -> None:
    with RankPool(2) as pool:
        with pytest.raises(RankError, match=message):
            pool.run(function)  # type: ignore[arg-type]
        assert not multiprocessing.active_children() or all(
            child not in pool._processes for child in multiprocessing.active_children()
        )
        with pytest.raises(RankError, match="closed"):
            pool.run(function)  # type: ignore[arg-type]


def test_a_stalled_rank_hits_the_deadline() -> None:
    with RankPool(2, timeout=60) as pool:
        pool.timeout = 1.0
        with pytest.raises(RankError, match=r"stall_on_rank_1: ranks \[1\] of 2 did not answer in 1 s"):
            pool.run(parallel_ranks.stall_on_rank_1)


def test_import_needs_neither_vllm_nor_neuron() -> None:
    code = (
        "import sys, omni_neuron_parallel\n"
        "loaded = {'vllm', 'vllm_omni', 'vllm_neuron', 'libtorch_neuronx_lite', 'nki'} & set(sys.modules)\n"
        "sys.exit(f'imported: {loaded}' if loaded else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
