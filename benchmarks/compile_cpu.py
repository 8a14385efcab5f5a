# SPDX-License-Identifier: Apache-2.0
"""The compile route on a CPU: seconds of a cold and a warm start, and seconds of a step against eager and Inductor.

A DiT and a VAE's decoder of Wan2.2's architecture at small sizes, random weights, one rank. Every figure comes from a
process of its own, one after the other. "Cold" is the first call in a process with an empty cache, capture included;
"warm" the first call in another process with the cache that the cold one left (for Inductor, its own). A step is the
median of the calls that follow, the smaller one of the two processes. Eager's "cold" and "warm" are two first calls.

`neuron_stablehlo` has the kernels as composites. Inductor gets the kernels' references instead, which it can fuse.

    ./dev run python benchmarks/compile_cpu.py --json benchmarks/compile_cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

BACKENDS = ("eager", "inductor", "neuron_stablehlo")
DTYPES = ("float32", "bfloat16")
COMPONENTS = ("transformer", "vae")
LIMIT_S = 150
# 1,170 tokens of width 512 in 4 blocks; a later latent frame of 16 x 24 at a base width of 8.
TRANSFORMER = {"num_attention_heads": 8, "attention_head_dim": 64, "ffn_dim": 2048, "num_layers": 4, "text_dim": 256}
VIDEO = {"height": 240, "width": 416, "frames": 9}
VAE = {"base_dim": 8, "height": 128, "width": 192}


def make(component: str, dtype: Any) -> tuple[Any, dict[str, Any]]:
    """A component with random weights, and the arguments of one call."""
    import torch

    from omni_neuron_wan22 import UMT5Config, VaeConfig, WanConfig
    from omni_neuron_wan22.lowering import WanComponents
    from vllm_omni_neuron.sdk import default_dtype

    sizes = {"latents_mean": (0.0,) * 16, "latents_std": (1.0,) * 16}
    vae = VaeConfig(base_dim=VAE["base_dim"], **sizes)
    components = WanComponents(WanConfig(**TRANSFORMER), UMT5Config(), vae)
    shape = VIDEO if component == "transformer" else {**VIDEO, "height": VAE["height"], "width": VAE["width"]}
    with default_dtype(dtype):
        model, arguments = components.make(component, **shape)
    generator = torch.Generator().manual_seed(0)
    for tensor in [*model.parameters(), *_tensors(list(arguments.values()))]:
        tensor.data.copy_(torch.randn(tensor.shape, generator=generator) * 0.05)
    return model, arguments


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in _tensors(part)]
    return [value] if hasattr(value, "shape") else []


def compiled(model: Callable[..., Any], component: str, backend: str) -> Callable[..., Any]:
    """The model as `backend` runs it."""
    import torch

    from omni_neuron_runtime import compile_options, component_compiler_args

    if backend == "eager":
        return model
    if backend == "inductor":
        return torch.compile(model, fullgraph=True, dynamic=False)
    options = compile_options(component, component_compiler_args(component))
    return torch.compile(model, backend=backend, fullgraph=True, dynamic=False, options=options)


def measure(backend: str, dtype: str, calls: int) -> dict[str, Any]:
    """In this process: seconds of the first call and of the next ones, of each component."""
    import torch

    from omni_neuron_kernels import graph_ops  # noqa: F401 - registers the kernels
    from omni_neuron_runtime.compile import kernel_ops

    if backend == "inductor":
        from torch._inductor.decomposition import decompositions

        os.environ["VLLM_NEURON_DISABLE_NKI_KERNELS"] = "1"
        decompositions.update(kernel_ops.reference_decompositions())
    results = {}
    for component in COMPONENTS:
        model, arguments = make(component, getattr(torch, dtype))
        function = compiled(model, component, backend)
        seconds = []
        with torch.inference_mode():
            for _ in range(calls + 1):
                started = time.perf_counter()
                function(**arguments)
                seconds.append(time.perf_counter() - started)
        results[component] = {
            "first_call_s": seconds[0],
            "step_s": statistics.median(seconds[1:]),
            "steps": seconds[1:],
        }
    return results


def in_a_process(backend: str, dtype: str, calls: int, threads: int, cache: Path) -> dict[str, Any] | None:
    """What `measure` says in a process of its own; None where that took too long."""
    environment = {
        **os.environ,
        "VLLM_NEURON_CPU_MODE": "1",
        "OMP_NUM_THREADS": str(threads),
        "OMNI_NEURON_COMPILE_CACHE_DIR": str(cache / "neuron"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
    }
    command = [sys.executable, __file__, "--measure", backend, dtype, "--calls", str(calls)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        raise SystemExit(f"{backend} {dtype} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def run(calls: int, threads: int, console: Console) -> dict[str, Any]:
    """Every backend and dtype, cold and warm."""
    results: dict[str, Any] = {}
    for dtype in DTYPES:
        for backend in BACKENDS:
            cache = Path(tempfile.mkdtemp(prefix="compile-cpu-"))
            try:
                console.print(f"{backend}, {dtype} …")
                cold = in_a_process(backend, dtype, calls, threads, cache)
                warm = in_a_process(backend, dtype, calls, threads, cache)
            finally:
                shutil.rmtree(cache)
            for component in COMPONENTS:
                rows = results.setdefault(component, {}).setdefault(dtype, {})
                if cold is None or warm is None:
                    rows[backend] = {"not_within_s": LIMIT_S}
                    continue
                rows[backend] = {
                    "cold_s": cold[component]["first_call_s"],
                    "warm_s": warm[component]["first_call_s"],
                    "step_s": min(cold[component]["step_s"], warm[component]["step_s"]),
                    "steps_s": [cold[component]["steps"], warm[component]["steps"]],
                }
    for dtypes in results.values():
        for backends in dtypes.values():
            for row in (row for row in backends.values() if "step_s" in row):
                row["of_eager"] = row["step_s"] / backends["eager"]["step_s"]
    return results


def show(results: dict[str, Any], console: Console) -> None:
    """Print the results as a table."""
    table = Table("component", "dtype", "backend", "cold s", "warm s", "s / step", "of eager")
    for component, dtypes in results.items():
        for dtype, backends in dtypes.items():
            for backend, row in backends.items():
                names = ("cold_s", "warm_s", "step_s", "of_eager")
                figures = (f"{row[name]:.2f}" if name in row else f"not in {LIMIT_S} s" for name in names)
                table.add_row(component, dtype, backend, *figures)
    console.print(table)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--calls", type=int, default=5, help="calls after the first one")
    parser.add_argument("--threads", type=int, default=2, help="of torch; XLA takes the cores there are")
    parser.add_argument("--measure", nargs=2, metavar=("BACKEND", "DTYPE"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.measure:
        print(json.dumps(measure(*chosen.measure, chosen.calls)))
        return
    console = Console()
    load = os.getloadavg()[0]
    results = run(chosen.calls, chosen.threads, console)
    show(results, console)
    if chosen.json:
        import torch

        report = {
            "command": " ".join(["python", *sys.argv]),
            "machine": {"cores": os.cpu_count(), "processor": platform.machine(), "load_before": round(load, 2)},
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "workload": {"transformer": {**TRANSFORMER, **VIDEO}, "vae": VAE, "threads": chosen.threads},
            "results": results,
        }
        chosen.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
