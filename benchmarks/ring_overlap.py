# SPDX-License-Identifier: Apache-2.0
"""Context attention by ring against gather on gloo processes: what is hidden, received and held, and how long it takes.

Both methods of `context_attention` on the same random tensors `[1, S / cp, N, D]`. Bytes are those of the rank with the
most; `ms` is the slowest rank's time for the whole call, median over the rounds, in which the two methods take turns.

    ./dev run python benchmarks/ring_overlap.py --json benchmarks/ring_overlap.json

Overlap: of every step of the ring but the last, from timestamps around `AxisGroup.start_rotate`, around what it returns
(the wait) and around `HeadSums.add` (the compute of one block of keys); medians over all ranks, rounds and steps.
`exposed` is the time in the first two; `without late` leaves out the part of the wait in which a neighbour had not
started the same step, so that nothing could travel; `alone` is the time of the same rotation with nothing to compute
meanwhile; `hidden` is 1 - without late / alone, and 1 - exposed / alone is in the JSON beside it. Ranks share the
machine's cores, so transfer and compute also slow each other down, which on devices they would not.

Received: `at the collectives` counts at the operations of torch.distributed what each returns from other ranks, K/V
apart from the proof of the bounded softmax; `at the sockets` is what the kernel received on this process's TCP sockets
(tcpi_bytes_received), which adds the proof, gloo's headers and two barriers. The formula is
2 · (cp - 1) / cp · S · N · D · itemsize, for both methods.

Held: bytes of the live storages that hold values of K or V and nothing else, in units of K and V of the whole sequence:
the stacked pair, received and joined blocks, copies; not the caller's own k and v (1 / cp, in both methods). Counted
after every torch operation, so what an operation allocates within itself and gives back is not seen. `peak` is the most
in the call, `computing` the most while attention itself is computed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from omni_neuron_parallel import (
    AxisGroup,
    ContextMethod,
    RankPool,
    Topology,
    context_attention,
    get_group,
    initialize_parallel,
)
from omni_neuron_parallel.softmax_sums import HeadSums

METHODS: tuple[ContextMethod, ...] = ("ring", "gather")
OPS = torch.ops._c10d_functional
# Offset of tcpi_bytes_received in Linux's struct tcp_info.
TCP_BYTES_RECEIVED = 128

Shape = tuple[int, int, int]
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Step = dict[str, tuple[float, float]]


def local_tensors(shape: Shape, dtype: torch.dtype, group: AxisGroup) -> Tensors:
    """This rank's q, k and v, `[1, S / cp, N, D]`."""
    tokens, heads, dim = shape
    tensors = []
    for seed in (1, 2, 3):
        whole = torch.randn(1, tokens, heads, dim, generator=torch.Generator().manual_seed(seed))
        tensors.append(whole.chunk(group.size, dim=1)[group.rank].to(dtype).contiguous())
    return tensors[0], tensors[1], tensors[2]


class TimedGroup(AxisGroup):
    """The group, and when each rotation was started and waited for."""

    # The dataclass is frozen; the list is the class's and emptied by `timeline`.
    events: list[tuple[str, float, float]] = []  # noqa: RUF012

    def start_rotate(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:  # noqa: D102
        wait = self._timed("start", lambda: super(TimedGroup, self).start_rotate(tensor))
        return lambda: self._timed("wait", wait)

    @classmethod
    def _timed(cls, what: str, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = call()
        cls.events.append((what, begin, time.perf_counter()))
        return result


def timeline(tensors: Tensors, group: AxisGroup) -> list[Step]:
    """When each step of one ring but the last was started, computed and waited for: (begin, end) each.

    All ranks' times are of one clock, CLOCK_MONOTONIC.

    Raises:
        SystemExit: a transfer was not started before its block's compute, or not waited for after it.
    """
    timed = TimedGroup(group.axis, group.ranks, group.rank, group.process_group)
    TimedGroup.events = []
    add = HeadSums.add
    with patch.object(HeadSums, "add", lambda *block: TimedGroup._timed("compute", lambda: add(*block))):
        context_attention(*tensors, group=timed, method="ring")
    expected = ["start", "compute", "wait"] * (group.size - 1) + ["compute"]
    if [what for what, *_ in TimedGroup.events] != expected:
        raise SystemExit(f"the order was {[what for what, *_ in TimedGroup.events]}, not {expected}")
    steps = []
    for step in range(group.size - 1):
        start, compute, wait = TimedGroup.events[3 * step : 3 * step + 3]
        if not start[1] < start[2] <= compute[1] < compute[2] <= wait[1]:
            raise SystemExit(
                f"step {step} overlaps in another way than started, computed, waited for: {start, compute}"
            )
        steps.append({what: (begin, end) for what, begin, end in (start, compute, wait)})
    return steps


def rotation_alone(tensors: Tensors, group: AxisGroup) -> float:
    """Seconds from the start of a block's rotation to its end, with nothing to compute."""
    block = torch.stack(tensors[1:])
    dist.barrier()
    begin = time.perf_counter()
    group.start_rotate(block)()
    return time.perf_counter() - begin


@contextmanager
def counted_at_collectives(group: AxisGroup) -> Iterator[Counter[str]]:
    """Bytes that this rank's collectives return from other ranks, by operation."""
    received: Counter[str] = Counter()
    exchange, gather = OPS.all_to_all_single, OPS.all_gather_into_tensor

    def counted_exchange(sent: torch.Tensor, rows: list[int], rows_sent: list[int], name: str) -> torch.Tensor:
        result = exchange(sent, rows, rows_sent, name)
        received["rotate"] += (sum(rows) - rows[group.rank]) * result[0].nbytes
        return result

    def counted_gather(sent: torch.Tensor, *arguments: Any) -> torch.Tensor:
        result = gather(sent, *arguments)
        # K and V stacked have five dims, the proof's two numbers a head three.
        received["gather" if sent.dim() == 5 else "proof"] += result.nbytes - sent.nbytes
        return result

    with ExitStack() as stack:
        stack.enter_context(patch.object(OPS, "all_to_all_single", counted_exchange))
        stack.enter_context(patch.object(OPS, "all_gather_into_tensor", counted_gather))
        yield received


def socket_bytes() -> int:
    """Bytes that the kernel received so far on the TCP sockets of this process."""
    total = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            if not descriptor.readlink().name.startswith("socket:"):
                continue
            duplicate = os.dup(int(descriptor.name))
        except FileNotFoundError:  # the descriptor that iterdir itself had
            continue
        with socket.socket(fileno=duplicate) as opened:
            if opened.family in (socket.AF_INET, socket.AF_INET6):
                info = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", info, TCP_BYTES_RECEIVED)[0]
    return total


class HeldKeysValues(TorchDispatchMode):
    """Live bytes of the storages made meanwhile whose content was copied or received from K or V.

    Attributes:
        peak: the most at any time, in bytes.
        computing: the most right after an operation that takes K or V and computes.
    """

    # What only moves values: its result holds K or V if what it takes does.
    MOVES = frozenset({"stack", "cat", "clone", "_to_copy", "index_select", "collective_permute", "wait_tensor",
                       "all_gather_into_tensor"})  # fmt: skip
    COMPUTES = frozenset({"bmm", "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math"})

    def __init__(self, k: torch.Tensor, v: torch.Tensor):
        super().__init__()
        self.peak = self.computing = 0
        # Bytes to count of each storage; the caller's own count as none.
        self._held: Any = WeakIdKeyDictionary()
        for tensor in (k, v):
            self._held[tensor.untyped_storage()] = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        takes_kv = any(leaf.untyped_storage() in self._held for leaf in _tensors(args))
        if takes_kv and name in self.MOVES:
            for made in _tensors(result):
                self._held.setdefault(made.untyped_storage(), made.untyped_storage().nbytes())
        live = sum(self._held.values())
        self.peak = max(self.peak, live)
        if takes_kv and name in self.COMPUTES:
            self.computing = max(self.computing, live)
        return result


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def measure_rank(shape: Shape, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """All figures of this rank."""
    initialize_parallel(Topology(cp=dist.get_world_size()))
    group = get_group("cp")
    tensors = local_tensors(shape, dtype, group)
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    figures: dict[str, Any] = {"received": {}, "socket_bytes": {}, "held": {}, "seconds": seconds}
    with torch.no_grad():
        outputs = {name: context_attention(*tensors, group=group, method=name) for name in METHODS}
        figures["largest_difference"] = float((outputs["ring"] - outputs["gather"]).abs().max())
        for name in METHODS:
            with HeldKeysValues(*tensors[1:]) as held:
                context_attention(*tensors, group=group, method=name)
            figures["held"][name] = {"peak": held.peak, "computing": held.computing}
            # Nobody sends before every rank has read its counter.
            dist.barrier()
            before = socket_bytes()
            dist.barrier()
            with counted_at_collectives(group) as received:
                context_attention(*tensors, group=group, method=name)
            dist.barrier()
            figures["socket_bytes"][name] = socket_bytes() - before
            figures["received"][name] = dict(received)
        for _ in range(rounds):
            for name in METHODS:
                dist.barrier()
                begin = time.perf_counter()
                context_attention(*tensors, group=group, method=name)
                seconds[name].append(time.perf_counter() - begin)
        figures.update(alone=[], steps=[])
        for _ in range(rounds):
            figures["alone"].append(rotation_alone(tensors, group))
            dist.barrier()
            figures["steps"].append(timeline(tensors, group))
    return figures


def _length(span: tuple[float, float]) -> float:
    return span[1] - span[0]


def _late(step: Step, neighbours: tuple[Step, Step]) -> float:
    """The part of the wait before both neighbours had started."""
    begin, end = step["wait"]
    started = max(neighbour["start"][0] for neighbour in neighbours)
    return min(max(started - begin, 0.0), end - begin)


def summarise(ranks: list[dict[str, Any]], shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """The figures of all ranks as one result."""
    cp, (tokens, heads, dim) = len(ranks), shape
    whole = 2 * tokens * heads * dim * dtype.itemsize
    rounds = range(len(ranks[0]["alone"]))

    steps: list[Step] = []
    late = []
    for number in rounds:
        rings = [rank["steps"][number] for rank in ranks]
        for place, ring_steps in enumerate(rings):
            steps += ring_steps
            neighbours = zip(rings[place - 1], rings[(place + 1) % cp], strict=True)
            late += [_late(step, pair) for step, pair in zip(ring_steps, neighbours, strict=True)]
    exposed = [_length(step["start"]) + _length(step["wait"]) for step in steps]
    exposed_in_time = statistics.median(whole - part for whole, part in zip(exposed, late, strict=True))
    alone = statistics.median(seconds for rank in ranks for seconds in rank["alone"])
    result: dict[str, Any] = {
        "cp": cp,
        "largest_difference": max(rank["largest_difference"] for rank in ranks),
        "overlap": {
            "every_transfer_started_before_and_waited_for_after_its_compute": True,  # or `timeline` raises
            "rotations_recorded": len(steps),
            "seconds_computing": statistics.median(_length(step["compute"]) for step in steps),
            "seconds_alone": alone,
            "seconds_starting": statistics.median(_length(step["start"]) for step in steps),
            "seconds_exposed": statistics.median(exposed),
            "seconds_exposed_p90": statistics.quantiles(exposed, n=10)[-1],
            "seconds_exposed_without_late_neighbours": exposed_in_time,
            "hidden_fraction": 1 - statistics.median(exposed) / alone,
            "hidden_fraction_without_late_neighbours": 1 - exposed_in_time / alone,
        },
        "formula_bytes": whole * (cp - 1) // cp,
        "whole_kv_bytes": whole,
        "methods": {},
    }
    for name in METHODS:
        received = [rank["received"][name] for rank in ranks]
        seconds = [max(rank["seconds"][name][number] for rank in ranks) for number in rounds]
        result["methods"][name] = {
            "kv_bytes_received": max(counts.get("rotate", 0) + counts.get("gather", 0) for counts in received),
            "proof_bytes_received": max(counts.get("proof", 0) for counts in received),
            "socket_bytes_received": max(rank["socket_bytes"][name] for rank in ranks),
            "kv_bytes_held_peak": max(rank["held"][name]["peak"] for rank in ranks),
            "kv_bytes_held_computing": max(rank["held"][name]["computing"] for rank in ranks),
            "seconds": statistics.median(seconds),
            "all_seconds": seconds,
        }
    ring, gather = (result["methods"][name] for name in METHODS)
    for key in ("kv_bytes_held_peak", "kv_bytes_held_computing", "seconds"):
        result[f"ring_over_gather_{key}"] = ring[key] / gather[key]
    return result


def show(results: list[dict[str, Any]], title: str) -> None:
    """Two tables: overlap, and ring beside gather."""
    console = Console(width=120)
    overlap = Table(title=f"Ring, a step: {title}")
    for column in ("ranks", "rotations", "compute ms", "alone ms", "exposed ms", "without late ms", "hidden"):
        overlap.add_column(column, justify="right")
    table = Table(title=f"Ring and gather: {title}")
    for column in ("ranks", "method", "K/V bytes received", "formula", "proof", "at the sockets", "held peak",
                   "held computing", "ms"):  # fmt: skip
        table.add_column(column, justify="left" if column == "method" else "right")
    for result in results:
        step = result["overlap"]
        parts = ("computing", "alone", "exposed", "exposed_without_late_neighbours")
        milliseconds = [f"{step[f'seconds_{part}'] * 1e3:.2f}" for part in parts]
        overlap.add_row(
            str(result["cp"]),
            str(step["rotations_recorded"]),
            *milliseconds,
            f"{step['hidden_fraction_without_late_neighbours']:.0%}",
        )
        for name, method in result["methods"].items():
            table.add_row(
                str(result["cp"]),
                name,
                f"{method['kv_bytes_received']:,}",
                f"{result['formula_bytes']:,}",
                f"{method['proof_bytes_received']:,}",
                f"{method['socket_bytes_received']:,}",
                f"{method['kv_bytes_held_peak'] / result['whole_kv_bytes']:.3f}",
                f"{method['kv_bytes_held_computing'] / result['whole_kv_bytes']:.3f}",
                f"{method['seconds'] * 1e3:.1f}",
            )
        ratios = [result[f"ring_over_gather_kv_bytes_held_{when}"] for when in ("peak", "computing")]
        table.add_row("", "ring / gather", "", "", "", "", *(f"{ratio:.3f}" for ratio in ratios),
                      f"{result['ring_over_gather_seconds']:.2f}", end_section=True)  # fmt: skip
    console.print(overlap)
    console.print(table)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, default=4096, help="S; every number of ranks divides it")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="where to write all figures")
    arguments = parser.parse_args()
    for ranks in arguments.ranks:
        if ranks < 2 or arguments.tokens % ranks:
            parser.error(f"--ranks {ranks}: valid are 2 or more that divide {arguments.tokens} tokens")
    shape = (arguments.tokens, arguments.heads, arguments.dim)
    dtype = getattr(torch, arguments.dtype)
    results = []
    for ranks in arguments.ranks:
        with RankPool(ranks) as pool:
            results.append(summarise(pool.run(measure_rank, shape, dtype, arguments.rounds), shape, dtype))
    show(results, f"S {shape[0]}, {shape[1]} heads of {shape[2]}, {arguments.dtype}, {os.cpu_count()} cores")
    if arguments.json:
        report = {
            "command": f"python benchmarks/ring_overlap.py {' '.join(sys.argv[1:])}",
            "machine": {
                "cores": os.cpu_count(),
                "processor": platform.processor() or platform.machine(),
                "load_average_at_the_end": os.getloadavg()[0],
            },
            "torch": torch.__version__,
            "workload": {"tokens": shape[0], "heads": shape[1], "dim": shape[2], "dtype": arguments.dtype},
            "rounds": arguments.rounds,
            "results": results,
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
