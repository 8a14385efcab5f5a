# SPDX-License-Identifier: Apache-2.0
"""Seconds per denoising step and per video on a CPU: this repository, diffusers, and vLLM-Omni's own Wan pipeline.

All three run the same random checkpoint, shape, dtype, prompt, seed, guidance and number of threads, in one process
each, and take turns, round by round. The two engines are vLLM-Omni's; "vllm-omni" is its stock `Wan22Pipeline` on our
CPU platform (the model package is left out by VLLM_PLUGINS=neuron), because without a platform plugin stock vLLM-Omni
0.30 does not run on a CPU. Diffusers is called directly, without an engine around it.

A video's time is from the prompt to the decoded frames in the caller's process. A step's time is the difference of two
such times with different numbers of steps, divided by the difference in steps: no hook in anybody's code. CPU seconds
are those of all threads of the process, taken likewise: they move less with what else the machine does, but count
OpenMP threads that wait by spinning.

    ./dev run python benchmarks/e2e_cpu.py --json benchmarks/e2e_cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

SYSTEMS = ("ours", "diffusers", "vllm-omni")
ANSWER_TIMEOUT_S = 300
FIGURES = {
    "seconds_per_step": "s / step",
    "seconds_per_video": "s / video",
    "cpu_seconds_per_step": "CPU s / step",
    "cpu_seconds_per_video": "CPU s / video",
}


@dataclass(frozen=True)
class Workload:
    """One video."""

    height: int = 240
    width: int = 416
    num_frames: int = 17
    steps: int = 10
    few_steps: int = 2
    guidance_scale: float = 4.0
    max_sequence_length: int = 512
    dtype: str = "float32"
    threads: int = 2
    prompt: str = "A red circle moving to the right over a grey ground."


class System:
    """One of the three, in a process of its own that answers a line for a line.

    Answers come through a socket: engines log to stdout and stderr and decorate both.
    """

    def __init__(self, name: str, model: Path, workload: Workload):
        environment = dict(
            os.environ,
            VLLM_NEURON_CPU_MODE="1",
            HF_HUB_OFFLINE="1",
            OMP_NUM_THREADS=str(workload.threads),
            VLLM_LOGGING_LEVEL="WARNING",
        )
        if name == "vllm-omni":
            environment["VLLM_PLUGINS"] = "neuron"
        self.name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        ours, theirs = socket.socketpair()
        command = [sys.executable, __file__, "--serve", name, str(theirs.fileno()), "--model", str(model)]
        self._process = subprocess.Popen(
            [*command, "--workload", json.dumps(asdict(workload))],
            env=environment,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        ours.settimeout(ANSWER_TIMEOUT_S)
        self._lines = ours.makefile("rw")
        self.identity = self._answer()

    def generate(self, steps: int) -> tuple[float, float]:
        """One video with `steps` steps: wall-clock seconds, and CPU seconds of all its threads."""
        print(steps, file=self._lines, flush=True)
        answer = self._answer()
        return float(answer["seconds"]), float(answer["cpu_seconds"])

    def close(self) -> None:
        """End the process."""
        self._lines.close()
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._lines.readline()
        except TimeoutError:
            line = ""
        if line:
            return json.loads(line)
        self._process.kill()
        self._log.seek(0)
        log = self._log.read()[-3000:]
        raise SystemExit(f"{self.name}: no answer in {ANSWER_TIMEOUT_S} s, or it ended:\n{log}")


def serve(name: str, answers: int, model: Path, workload: Workload) -> None:
    """The child's side: load, say so, then generate once a line."""
    import torch

    torch.set_num_threads(workload.threads)
    lines = socket.socket(fileno=answers).makefile("rw")
    generate, identity = _diffusers(model, workload) if name == "diffusers" else _engine(model, workload)
    print(json.dumps({"pipeline": identity, "threads": torch.get_num_threads()}), file=lines, flush=True)
    for line in lines:
        started, cpu_started = time.perf_counter(), time.process_time()
        frames = generate(int(line))
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        assert frames == workload.num_frames, f"{frames} frames, {workload.num_frames} were asked for"
        print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds}), file=lines, flush=True)


def _diffusers(model: Path, workload: Workload) -> tuple[Any, str]:
    import torch
    from diffusers import WanPipeline

    pipeline = WanPipeline.from_pretrained(model, torch_dtype=getattr(torch, workload.dtype))
    pipeline.set_progress_bar_config(disable=True)

    def generate(steps: int) -> int:
        video = pipeline(
            workload.prompt,
            "",
            height=workload.height,
            width=workload.width,
            num_frames=workload.num_frames,
            num_inference_steps=steps,
            guidance_scale=workload.guidance_scale,
            max_sequence_length=workload.max_sequence_length,
            generator=torch.Generator().manual_seed(0),
        ).frames[0]
        return len(video)

    return generate, f"{type(pipeline).__module__}.{type(pipeline).__name__}"


def _engine(model: Path, workload: Workload) -> tuple[Any, str]:
    from vllm_omni.diffusion.registry import DiffusionModelRegistry
    from vllm_omni.entrypoints.omni import Omni
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    omni = Omni(model=str(model), dtype=workload.dtype, enforce_eager=True)
    pipeline = DiffusionModelRegistry._try_load_model_cls("WanPipeline")

    def generate(steps: int) -> int:
        parameters = OmniDiffusionSamplingParams(
            height=workload.height,
            width=workload.width,
            num_frames=workload.num_frames,
            num_inference_steps=steps,
            guidance_scale=workload.guidance_scale,
            max_sequence_length=workload.max_sequence_length,
            seed=0,
        )
        [output] = omni.generate({"prompt": workload.prompt, "negative_prompt": ""}, parameters, use_tqdm=False)
        return output.images[0].shape[-4]

    return generate, f"{pipeline.__module__}.{pipeline.__name__}"


def measure(model: Path, workload: Workload, rounds: int, systems: list[str]) -> dict[str, Any]:
    """Start every system, warm each up, then let them take turns."""
    running = []
    try:
        for name in systems:
            running.append(System(name, model, workload))
            Console(stderr=True).print(f"{name}: {running[-1].identity['pipeline']}")
            running[-1].generate(workload.few_steps)
        times: dict[str, dict[int, list[tuple[float, float]]]] = {
            name: {workload.few_steps: [], workload.steps: []} for name in systems
        }
        for turn in range(rounds):
            # Another order every round: whoever follows the heaviest one would otherwise always find warm cores.
            for system in running[turn % len(running) :] + running[: turn % len(running)]:
                for steps in (workload.few_steps, workload.steps):
                    times[system.name][steps].append(system.generate(steps))
    finally:
        for system in running:
            system.close()
    results: dict[str, Any] = {}
    for system in running:
        results[system.name] = {**system.identity}
        for clock, prefix in enumerate(("", "cpu_")):
            few, many = ([pair[clock] for pair in times[system.name][n]] for n in (workload.few_steps, workload.steps))
            per_step = [(m - f) / (workload.steps - workload.few_steps) for f, m in zip(few, many, strict=True)]
            results[system.name] |= {
                f"{prefix}seconds_per_step": statistics.median(per_step),
                f"{prefix}seconds_per_video": statistics.median(many),
                f"all_{prefix}seconds_per_step": per_step,
                f"all_{prefix}seconds_per_video": many,
            }
    return results


def show(results: dict[str, Any], workload: Workload, rounds: int) -> None:
    """The table, with ratios to the faster of the peers."""
    peers = [name for name in results if name != "ours"]
    table = Table(
        title=f"{workload.width}×{workload.height}×{workload.num_frames}, {workload.steps} steps with guidance, "
        f"{workload.dtype}, {workload.threads} threads; medians of {rounds} rounds"
    )
    for column in ("system", *FIGURES.values()):
        table.add_column(column, justify="left" if column == "system" else "right")
    for name, result in results.items():
        table.add_row(name, *(f"{result[key]:.2f}" for key in FIGURES))
    Console().print(table)
    if "ours" in results and peers:
        for key in FIGURES:
            fastest = min(peers, key=lambda peer: results[peer][key])
            ratio = results["ours"][key] / results[fastest][key]
            Console().print(f"{key}: {ratio:.2f} × {fastest}, the faster peer (target ≤ 0.9)", highlight=False)


def main() -> None:
    """Make the checkpoint, measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, default=Workload.steps)
    parser.add_argument("--size", default="240x416x17", help="height x width x frames")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--serve", nargs=2, metavar=("SYSTEM", "FD"), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--workload", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        name, answers = arguments.serve
        serve(name, int(answers), arguments.model, Workload(**json.loads(arguments.workload)))
        return

    from omni_neuron_wan22 import TinyWan, make_tiny_checkpoint

    height, width, frames = (int(part) for part in arguments.size.split("x"))
    workload = Workload(height=height, width=width, num_frames=frames, steps=arguments.steps, dtype=arguments.dtype)
    sizes = TinyWan(
        num_attention_heads=8,
        attention_head_dim=64,
        num_layers=4,
        ffn_dim=2048,
        text_dim=256,
        text_ffn_dim=512,
        vae_base_dim=32,
    )
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_checkpoint(Path(folder) / "model", sizes)
        results = measure(model, workload, arguments.rounds, arguments.systems)
    show(results, workload, arguments.rounds)
    if arguments.json:
        report = {
            "command": f"python benchmarks/e2e_cpu.py {' '.join(sys.argv[1:])}",
            "machine": {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()},
            "workload": asdict(workload),
            "rounds": arguments.rounds,
            "results": results,
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
