# SPDX-License-Identifier: Apache-2.0
"""Loading one rank's shard of a sharded safetensors checkpoint: ours against safetensors.torch.load_file and slicing.

Makes a synthetic checkpoint of transformer blocks (bfloat16, 4 files with an index: column-parallel, row-parallel,
fused QKV, norms) in a temporary folder and loads rank 0 at several TP sizes. Every case runs in a process of its own;
the methods take turns, and the table has the median of the repetitions.

    python benchmarks/weights_loading.py [--megabytes 200] [--tp 1 2 4 8] [--repeat 3] [--cold] [--json FILE]

Columns: `slices` are the bytes of the slices that loaders took (for load_file, of every tensor); `storage` is what the
kernel fetched for this process (read_bytes of /proc/self/io; 0 where the page cache held the file); `kept` is the size
of the result; `extra` is the peak of private memory (RssAnon, sampled every millisecond) beyond the start and beyond
the result; `rss` is the peak of resident memory beyond the start, which counts pages of the mapped files too: they
belong to the page cache, are shared by all ranks of a host, and the kernel drops them when it needs memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from omni_neuron_runtime import (
    SafetensorsCheckpoint,
    fused_qkv_weight_loader,
    set_weight_loader,
    sharding_weight_loader,
)

HIDDEN, INNER, FILES = 1024, 4096, 4
BLOCK_BYTES = 2 * (4 * HIDDEN * HIDDEN + 2 * HIDDEN * INNER + HIDDEN)
METHODS = ("load_sharded", "load_sharded_pipelined", "load_file")


def make_checkpoint(folder: Path, megabytes: int) -> int:
    """Write the checkpoint and its index; returns its number of blocks."""
    blocks = max(1, round(megabytes * 1e6 / BLOCK_BYTES))
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (HIDDEN, HIDDEN), "k": (HIDDEN, HIDDEN), "v": (HIDDEN, HIDDEN), "o": (HIDDEN, HIDDEN),
              "up": (INNER, HIDDEN), "down": (HIDDEN, INNER), "norm": (HIDDEN,)}  # fmt: skip
    weight_map = {}
    for number in range(FILES):
        name = f"model-{number + 1:05d}-of-{FILES:05d}.safetensors"
        tensors = {
            f"blocks.{block}.{part}": torch.randn(shape, generator=generator).to(torch.bfloat16)
            for block in range(blocks)
            if block * FILES // blocks == number
            for part, shape in shapes.items()
        }
        if tensors:
            save_file(tensors, folder / name)
        weight_map.update(dict.fromkeys(tensors, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return blocks


def make_model(blocks: int, tp: int) -> tuple[nn.Module, dict[str, str | list[str]]]:
    """Rank 0's model on the meta device, and the mapping to the checkpoint's keys."""
    model = nn.Module()
    mapping: dict[str, str | list[str]] = {}
    heads, inner = HIDDEN // tp, INNER // tp
    parts = {
        "qkv": ((3 * heads, HIDDEN), fused_qkv_weight_loader(heads, heads, 0, tp), ["q", "k", "v"]),
        "o": ((HIDDEN, heads), sharding_weight_loader(1, heads, tp), ["o"]),
        "up": ((inner, HIDDEN), sharding_weight_loader(0, inner, tp), ["up"]),
        "down": ((HIDDEN, inner), sharding_weight_loader(1, inner, tp), ["down"]),
        "norm": ((HIDDEN,), None, ["norm"]),
    }
    for block in range(blocks):
        for part, (shape, loader, keys) in parts.items():
            parameter = nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta"), requires_grad=False)
            if loader is not None:
                set_weight_loader(parameter, loader)
            model.register_parameter(f"{part}_{block}", parameter)
            mapping[f"{part}_{block}"] = [f"blocks.{block}.{key}" for key in keys]
    return model, mapping


def load_file_and_slice(folder: Path, blocks: int, tp: int) -> tuple[dict[str, torch.Tensor], int]:
    """The peer: every file whole, then rank 0's slices, copied."""
    whole: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        whole.update(load_file(file))
    heads, inner = HIDDEN // tp, INNER // tp
    made = {}
    for block in range(blocks):
        part = {name: whole[f"blocks.{block}.{name}"] for name in ("q", "k", "v", "o", "up", "down", "norm")}
        made[f"qkv_{block}"] = torch.cat([part[name][:heads] for name in ("q", "k", "v")])
        made[f"o_{block}"] = part["o"][:, :heads].clone(memory_format=torch.contiguous_format)
        made[f"up_{block}"] = part["up"][:inner].clone()
        made[f"down_{block}"] = part["down"][:, :inner].clone(memory_format=torch.contiguous_format)
        made[f"norm_{block}"] = part["norm"].clone()
    return made, sum(tensor.nbytes for tensor in whole.values())


class MemoryPeak:
    """Peaks of private (RssAnon) and of all resident memory beyond the start, sampled on a thread."""

    def __enter__(self) -> MemoryPeak:
        self._process = psutil.Process()
        self._start_anon, self._start_rss = self._now()
        self.anon = self.rss = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _now(self) -> tuple[int, int]:
        memory = self._process.memory_info()
        return memory.rss - memory.shared, memory.rss

    def _sample(self) -> None:
        while not self._done.is_set():
            anon, rss = self._now()
            self.anon, self.rss = max(self.anon, anon - self._start_anon), max(self.rss, rss - self._start_rss)
            self._done.wait(0.001)


def storage_bytes() -> int:
    """Bytes that the kernel fetched from storage for this process so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def drop_from_page_cache(folder: Path) -> None:
    """Make the next reader fetch the files from storage."""
    os.sync()
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def run_case(method: str, folder: Path, blocks: int, tp: int) -> dict[str, Any]:
    """One load in this process."""
    model, mapping = make_model(blocks, tp)
    torch.zeros(HIDDEN, HIDDEN).sum()  # torch's own first allocations are not the load's
    before = storage_bytes()
    with MemoryPeak() as peak:
        start = time.perf_counter()
        if method == "load_file":
            made, slices = load_file_and_slice(folder, blocks, tp)
        else:
            checkpoint = SafetensorsCheckpoint(folder)
            load: Callable[..., Any] = getattr(checkpoint, method)
            made = load(0, tp, model, mapping, "cpu").state_dict
            slices = checkpoint.stats.bytes_read
        seconds = time.perf_counter() - start
    kept = sum(tensor.nbytes for tensor in made.values())
    checksum = sum(int(tensor.view(torch.int16).sum()) for tensor in made.values())
    return {
        "seconds": seconds,
        "slice_bytes": slices,
        "storage_bytes": storage_bytes() - before,
        "kept_bytes": kept,
        "extra_bytes": max(0, peak.anon - kept),
        "rss_bytes": peak.rss,
        "checksum": checksum,
    }


def measure(folder: Path, blocks: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every method at every TP size, interleaved, each run in a new process; medians."""
    rows = []
    for tp in arguments.tp:
        runs: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
        for _ in range(arguments.repeat):
            for method in METHODS:
                if arguments.cold:
                    drop_from_page_cache(folder)
                command = [sys.executable, __file__, "--case", method, str(folder), str(blocks), str(tp)]
                done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
                runs[method].append(json.loads(done.stdout))
        if len({run["checksum"] for results in runs.values() for run in results}) != 1:
            raise SystemExit(f"the methods disagree at TP {tp}")
        for method, results in runs.items():
            medians = {key: statistics.median(result[key] for result in results) for key in results[0]}
            del medians["checksum"]
            rows.append({"tp": tp, "method": method, **medians})
    return rows


def main() -> None:
    """The command line."""
    if sys.argv[1:2] == ["--case"]:
        method, folder, blocks, tp = sys.argv[2:]
        print(json.dumps(run_case(method, Path(folder), int(blocks), int(tp))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before every run")
    parser.add_argument("--folder", type=Path, help="where to put the checkpoint (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="weights-loading-", dir=arguments.folder))
    try:
        blocks = make_checkpoint(folder, arguments.megabytes)
        rows = measure(folder, blocks, arguments)
    finally:
        shutil.rmtree(folder)
    total = blocks * BLOCK_BYTES
    cache = "cold" if arguments.cold else "warm"
    print(f"{blocks} blocks, {total / 1e6:.0f} MB in {FILES} files, page cache {cache}, medians of {arguments.repeat}")
    print("\n| TP | method | slices MB | of all | storage MB | kept MB | extra MB | rss MB | seconds |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        megabytes = {key: value / 1e6 for key, value in row.items() if key.endswith("_bytes")}
        print(
            f"| {row['tp']} | {row['method']} | {megabytes['slice_bytes']:.1f} | {row['slice_bytes'] / total:.3f} "
            f"| {megabytes['storage_bytes']:.1f} | {megabytes['kept_bytes']:.1f} | {megabytes['extra_bytes']:.1f} "
            f"| {megabytes['rss_bytes']:.1f} | {row['seconds']:.3f} |"
        )
    if arguments.json:
        report = {"total_bytes": total, "page_cache": cache, "repeat": arguments.repeat, "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
