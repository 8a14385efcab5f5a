# SPDX-License-Identifier: Apache-2.0
"""Collectives in groups whose order c10d loses, groups by name, and ranks that die or stall inside a collective.

Importable by spawned processes.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from omni_neuron_parallel import (
    CollectiveError,
    Topology,
    broadcast_from_first,
    collective_step,
    context_attention,
    destroy_parallel,
    get_group,
    get_topology,
    initialize_parallel,
    register_group,
)


def in_group_order(axis: str) -> dict[str, Any]:
    """Every collective on one value a rank, next to what c10d itself gives for the same process group."""
    group = get_group(axis)
    own = torch.tensor([float(dist.get_rank())])
    raw = [torch.empty(1) for _ in group.ranks]
    dist.all_gather(raw, own, group=group.process_group)
    ranks = torch.tensor(group.ranks, dtype=torch.float32)
    gathered = group.gather_to_first(torch.stack([own, -own]))
    return {
        "group": group.ranks,
        "coordinate": get_topology().coordinates(dist.get_rank())[axis],  # type: ignore[index]
        "rank": group.rank,
        "raw gather": [int(part) for part in raw],
        "gather": group.all_gather(own, dim=0).tolist(),
        "gather of columns": group.all_gather(own.view(1, 1), dim=1).tolist(),
        "scatter": group.reduce_scatter(ranks, dim=0).tolist(),
        "scatter of columns": group.reduce_scatter(torch.stack([ranks, -ranks]), dim=1).tolist(),
        "rotate": group.start_rotate(own)().tolist(),
        "gather to first": None if gathered is None else [part.flatten().tolist() for part in gathered],
    }


def named_groups() -> list[Any]:
    """What registering, repeating and misnaming a group gives on a rank of four."""
    pairs = [[2, 0], [1, 3]]
    group = register_group("pairs", pairs)
    seen: list[Any] = [
        group.axis,
        group.ranks,
        group.rank,
        group.all_gather(torch.tensor([dist.get_rank()]), 0).tolist(),
    ]
    seen.append(register_group("pairs", ((2, 0), (1, 3))) is group is get_group("pairs"))
    for name, partition in (("pairs", [[0, 1], [2, 3]]), ("cp", [[0, 1], [2, 3]]), ("half", [[0, 1]])):
        try:
            register_group(name, partition)
        except (RuntimeError, ValueError) as error:
            seen.append(str(error))
    destroy_parallel()
    try:
        get_group("pairs")
    except ValueError as error:
        seen.append(str(error))
    return seen


def compiled_ring(backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, valid: int) -> list[torch.Tensor]:
    """This rank's output of the ring, eager and from one graph, and of every collective of a group in one graph."""
    group = get_group("cp")
    q, k, v = (tensor.chunk(group.size, dim=1)[group.rank] for tensor in (q, k, v))

    def ring(*tensors: torch.Tensor) -> torch.Tensor:
        return context_attention(*tensors, group=group, method="ring", kv_length=valid)

    def chain(tensor: torch.Tensor) -> torch.Tensor:
        wait = group.start_rotate(tensor)
        total = group.all_reduce(tensor.sin())
        return group.reduce_scatter(group.all_gather(wait() + total, dim=1), dim=1)

    results = []
    for function, arguments in ((ring, (q, k, v)), (chain, (q,))):
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        results += [function(*arguments), compiled(*arguments)]
    return results


def traced_ring() -> list[str]:
    """The collectives and the matrix products in the one graph of the ring, in order."""
    group, graphs = get_group("cp"), []

    def backend(module: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        graphs.append(module)
        return module

    def ring(tensor: torch.Tensor) -> torch.Tensor:
        return context_attention(tensor, tensor, tensor, group=group, method="ring")

    torch.compile(ring, fullgraph=True, backend=backend)(torch.ones(1, 2, 3, 4))
    (graph,) = graphs
    names = [getattr(node.target, "__name__", "") for node in graph.graph.nodes if node.op == "call_function"]
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    chosen = zip(names, targets, strict=True)
    return [
        "matmul" if name == "matmul" else target
        for name, target in chosen
        if name == "matmul" or target.startswith(("omni_neuron.", "_c10d_functional."))
    ]


def lose_a_rank(operation: str, failure: str, timeout: float) -> str:
    """Rank 1 dies, or waits until the others have given up, in the second step. Each rank returns its error."""
    topology = Topology(cp=dist.get_world_size())
    initialize_parallel(topology, timeout=timeout)
    group, block = get_group("cp"), torch.ones(1 << 16)

    def second_step_on_rank_1() -> None:
        if step != 2 or group.rank != 1:
            return
        if failure == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        store.wait([f"{operation} {rank}" for rank in group.ranks if rank != 1], timedelta(seconds=60))

    store = dist.distributed_c10d._get_default_store()
    message = "no error"
    try:
        for step in (1, 2):
            with collective_step("request 7"), collective_step(f"denoising step {step} of 2"):
                if operation == "rotate":
                    for _ in range(group.size - 1):
                        wait = group.start_rotate(block)
                        second_step_on_rank_1()
                        block = wait()
                else:
                    second_step_on_rank_1()
                    block = group.all_reduce(block)
    except CollectiveError as error:
        message = str(error)
    finally:
        destroy_parallel()
    store.set(f"{operation} {dist.get_rank()}", "has given up")
    return message


def absent_from_making(timeout: float) -> str:
    if dist.get_rank() == 1:
        return "absent"
    try:
        initialize_parallel(Topology(tp=dist.get_world_size()), timeout=timeout)
    except CollectiveError as error:
        return str(error)
    return "no error"


def left_making_early(topology: Topology) -> bool:
    """On rank 0: whether rank 1 was done with making the groups while rank 0 still made them."""
    store, rank, early = dist.distributed_c10d._get_default_store(), dist.get_rank(), []

    def slow(*arguments: Any, **options: Any) -> Any:
        groups = make(*arguments, **options)
        time.sleep(0.5)
        early.append(store.check(["rank 1 has left"]))
        return groups

    make = dist.new_subgroups_by_enumeration
    if rank == 0:
        dist.new_subgroups_by_enumeration = slow
    try:
        initialize_parallel(topology)
        if rank == 1:
            store.set("rank 1 has left", "")
    finally:
        dist.new_subgroups_by_enumeration = make
        destroy_parallel()
    return any(early)


def broadcast() -> torch.Tensor:
    """What every rank has of a tensor of rank 0's."""
    tensor = torch.arange(6, dtype=torch.bfloat16).view(2, 3).t() if dist.get_rank() == 0 else None
    return broadcast_from_first(tensor)
