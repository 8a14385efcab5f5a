# SPDX-License-Identifier: Apache-2.0
"""Counters of a launch and the report made of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from omni_neuron_nkisim import costs
from omni_neuron_nkisim.target import PSUM_BYTES_PER_PARTITION, Target


@dataclass
class CoreStats:
    """What one core did.

    Attributes:
        rank, core, target: which core of which chip.
        counts: instructions by (engine, name).
        cycles: by engine, where the engine has a clock.
        busy_ns: by engine; of DMA, that of the busiest of its engines.
        dma_ns: of each of the 16 DMA engines.
        flops: of matmuls.
        hbm_read_bytes, hbm_written_bytes: by DMA and collectives.
        peak_live_bytes: of sbuf and psum, per partition, as long as Python held the tiles: an upper bound.
        in_order_ns: when the last instruction ends if every engine takes its instructions in program order and waits
            for what they read.
    """

    rank: int
    core: int
    target: Target
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    cycles: dict[str, float] = field(default_factory=dict)
    busy_ns: dict[str, float] = field(default_factory=dict)
    dma_ns: list[float] = field(default_factory=lambda: [0.0] * costs.DMA_ENGINES)
    flops: float = 0.0
    hbm_read_bytes: int = 0
    hbm_written_bytes: int = 0
    peak_live_bytes: dict[str, int] = field(default_factory=dict)
    in_order_ns: float = 0.0

    def add(
        self, instruction: str, engine: str, cycles: float, ns: float, flops: float, dma_loads: Sequence[float]
    ) -> None:
        """Count one instruction, a transfer with the time of each DMA engine, another with `ns`."""
        key = (engine, instruction)
        self.counts[key] = self.counts.get(key, 0) + 1
        self.cycles[engine] = self.cycles.get(engine, 0.0) + cycles
        if dma_loads:
            self.dma_ns = [busy + load for busy, load in zip(self.dma_ns, dma_loads, strict=True)]
            self.busy_ns[engine] = max(self.dma_ns)
        else:
            self.busy_ns[engine] = self.busy_ns.get(engine, 0.0) + ns
        self.flops += flops

    def see_live(self, region: str, size: int) -> None:
        """Note how many bytes per partition are held now."""
        self.peak_live_bytes[region] = max(size, self.peak_live_bytes.get(region, 0))

    def count(self, instruction: str, engine: str | None = None) -> int:
        """How often an instruction ran, on one engine or all."""
        return sum(n for (on, name), n in self.counts.items() if name == instruction and engine in (None, on))

    @property
    def bound_ns(self) -> float:
        """The busiest engine's time: what the kernel takes if everything else hides behind it."""
        return max(self.busy_ns.values(), default=0.0)

    @property
    def bound_by(self) -> str:
        """The busiest engine."""
        return max(self.busy_ns, key=lambda engine: self.busy_ns[engine], default="nothing")

    def busy_fraction(self, engine: str) -> float:
        """Busy time of an engine over the busiest one's: 1.0 for the engine that bounds the kernel."""
        return self.busy_ns.get(engine, 0.0) / self.bound_ns if self.bound_ns else 0.0

    def in_order_fraction(self, engine: str) -> float:
        """Busy time of an engine over the in-order estimate of the whole."""
        return self.busy_ns.get(engine, 0.0) / self.in_order_ns if self.in_order_ns else 0.0

    def roofline(self) -> dict[str, float | str | None]:
        """Intensity, the two roofs in TFLOP/s (of TensorE at bfloat16 rate), and which one is lower."""
        moved = self.hbm_read_bytes + self.hbm_written_bytes
        intensity = self.flops / moved if moved else None
        memory = intensity * self.target.hbm_gb_s / 1e3 if intensity is not None else None
        compute = self.target.bf16_tflops
        return {
            "flops": self.flops,
            "hbm_bytes": float(moved),
            "flops_per_byte": intensity,
            "ridge_flops_per_byte": compute * 1e3 / self.target.hbm_gb_s,
            "memory_roof_tflops": memory,
            "compute_roof_tflops": compute,
            "bound": "compute" if memory is None or memory >= compute else "memory",
            "tflops_at_bound": self.flops / self.bound_ns / 1e3 if self.bound_ns else 0.0,
            "tflops_in_order": self.flops / self.in_order_ns / 1e3 if self.in_order_ns else 0.0,
        }

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "rank": self.rank,
            "core": self.core,
            "target": self.target.name,
            "bound_ns": self.bound_ns,
            "bound_by": self.bound_by,
            "in_order_ns": self.in_order_ns,
            "engines": {
                engine: {
                    "instructions": {
                        name: number for (on, name), number in sorted(self.counts.items()) if on == engine
                    },
                    "cycles": self.cycles.get(engine, 0.0),
                    "busy_ns": busy,
                    "busy_fraction": self.busy_fraction(engine),
                    "in_order_fraction": self.in_order_fraction(engine),
                }
                for engine, busy in sorted(self.busy_ns.items(), key=lambda item: costs.ENGINES.index(item[0]))
            },
            "peak_live_bytes_per_partition": dict(self.peak_live_bytes),
            "capacity_bytes_per_partition": {"sbuf": self.target.sbuf_bytes, "psum": PSUM_BYTES_PER_PARTITION},
            "roofline": self.roofline(),
        }


@dataclass
class RunStats:
    """What one launch did, core by core.

    Attributes:
        kernel: its name.
        cores: by (rank, core).
    """

    kernel: str
    cores: dict[tuple[int, int], CoreStats]

    def count(self, instruction: str, engine: str | None = None) -> int:
        """How often an instruction ran on all cores together."""
        return sum(stats.count(instruction, engine) for stats in self.cores.values())

    def slowest(self) -> CoreStats:
        """The core with the longest bound."""
        return max(self.cores.values(), key=lambda stats: stats.bound_ns)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, with the cost rules and their sources."""
        return {
            "kernel": self.kernel,
            "cores": [stats.as_dict() for stats in self.cores.values()],
            "cost_rules": [dataclasses.asdict(rule) for rule in costs.COST_RULES],
        }

    def report(self, form: str = "table") -> str:
        """The slowest core as a `table`, or every core as `json`.

        Raises:
            ValueError: another form.
        """
        if form == "json":
            return json.dumps(self.as_dict(), indent=1)
        if form != "table":
            raise ValueError(f"form is {form!r}; table or json")
        stats = self.slowest()
        data = stats.as_dict()
        rows = [("engine", "instructions", "cycles", "busy us", "of bound", "of in-order")]
        rows += [
            (
                engine,
                str(sum(part["instructions"].values())),
                f"{part['cycles']:,.0f}",
                f"{part['busy_ns'] / 1e3:,.2f}",
                f"{part['busy_fraction']:.1%}",
                f"{part['in_order_fraction']:.1%}",
            )
            for engine, part in data["engines"].items()
        ]
        roof = data["roofline"]
        intensity = "no HBM traffic" if roof["flops_per_byte"] is None else f"{roof['flops_per_byte']:,.1f} FLOP/byte"
        live = ", ".join(
            f"{region} {size:,} of {data['capacity_bytes_per_partition'][region]:,}"
            for region, size in data["peak_live_bytes_per_partition"].items()
        )
        lines = [
            f"{self.kernel} on {stats.target.name}: rank {stats.rank}, core {stats.core}, slowest of {len(self.cores)}",
            *_columns(rows),
            f"bound by {data['bound_by']}: {data['bound_ns'] / 1e3:,.2f} us; in program order "
            f"{data['in_order_ns'] / 1e3:,.2f} us",
            f"roofline: {roof['flops'] / 1e9:,.3f} GFLOP, {roof['hbm_bytes'] / 1e6:,.3f} MB, {intensity} (ridge "
            f"{roof['ridge_flops_per_byte']:,.0f}), {roof['bound']}-bound",
            f"peak bytes per partition held by Python (upper bound): {live or 'none'}",
            "estimates from published figures (costs.COST_RULES); nothing was compiled or measured on a device",
        ]
        return "\n".join(lines)


def _columns(rows: Iterable[tuple[str, ...]]) -> list[str]:
    rows = list(rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width)
                  for column, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]  # fmt: skip


_last: RunStats | None = None


def remember(stats: RunStats) -> None:
    """Keep the counters of the launch that ended last."""
    global _last
    _last = stats


def last_stats() -> RunStats:
    """The counters of the launch of this process that ended last.

    Raises:
        LookupError: no kernel ran yet.
    """
    if _last is None:
        raise LookupError("no kernel was simulated in this process yet")
    return _last


def report(form: str = "table") -> str:
    """The report of the launch that ended last, as a `table` or as `json`."""
    return last_stats().report(form)
