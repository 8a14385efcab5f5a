# SPDX-License-Identifier: Apache-2.0
"""Cache-DiT on a CPU: steps that reuse, seconds, and what the videos lose by it, for several thresholds.

The trained checkpoint of omni-neuron-shapes makes the same videos, from the same prompts and seeds, without a cache and
with each threshold, in turns, video by video. For each threshold:

- steps reused, of all steps of both experts and both branches;
- denoising time without the cache over that with it (the ratio of sums; CPU seconds of the process, and wall clock);
- the final latents' relative L2 distance to the uncached ones, and the videos' PSNR against the uncached videos;
- how many videos the judge recognises, of those and of the uncached ones.

The model is small (five blocks an expert, of which every step computes the first): the share of the time that a reused
step saves is smaller than in a model of forty blocks.

    ./dev run python benchmarks/cache_dit_cpu.py --json benchmarks/cache_dit_cpu.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from omni_neuron_shapes import FLOW_SHIFT, FRAMES, HEIGHT, WIDTH, model_path
from omni_neuron_testkit import Accuracy, GridPrompt, judge, prompt_grid

THRESHOLDS = (0.08, 0.16, 0.24)
# Cache-DiT's documented setting but for the warm-up of four steps, which is half of the steps of an expert here.
CACHE = {
    "Fn_compute_blocks": 1,
    "Bn_compute_blocks": 0,
    "max_warmup_steps": 2,
    "max_cached_steps": 20,
    "max_continuous_cached_steps": 3,
}


@dataclass
class Runs:
    """What the videos of one setting came to."""

    accuracy: Accuracy = field(default_factory=Accuracy)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    steps: int = 0
    cached_steps: int = 0
    distances: list[float] = field(default_factory=list)
    psnr: list[float] = field(default_factory=list)


class Generator:
    """One pipeline, whose cache is exchanged between videos."""

    def __init__(self, steps: int):
        import torch
        from vllm_omni.diffusion.cache.selector import get_cache_backend
        from vllm_omni.diffusion.data import OmniDiffusionConfig

        from omni_neuron_wan22 import NeuronWanPipeline

        config = {"dtype": torch.float32, "flow_shift": FLOW_SHIFT, "cache_backend": "cache_dit"}
        self.steps = steps
        self.pipeline = NeuronWanPipeline(od_config=OmniDiffusionConfig(model=str(model_path()), **config))
        self.pipeline.set_progress_bar_config(disable=True)
        self.caches: dict[float | None, Any] = {None: None}
        for threshold in THRESHOLDS:
            backend = get_cache_backend("cache_dit", {**CACHE, "residual_diff_threshold": threshold})
            backend.enable(self.pipeline)
            self.caches[threshold] = self.pipeline.block_cache

    def generate(self, prompt: GridPrompt, threshold: float | None, runs: Runs) -> tuple[np.ndarray, np.ndarray]:
        """Latents and frames of one video; the time of its denoising and its steps are added to `runs`."""
        import torch
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        pipeline = self.pipeline
        pipeline.block_cache = self.caches[threshold]
        parameters = OmniDiffusionSamplingParams(
            height=HEIGHT,
            width=WIDTH,
            num_frames=FRAMES,
            num_inference_steps=self.steps,
            seed=prompt.seed,
        )
        with torch.inference_mode():
            request = pipeline.resolve({"prompt": prompt.caption, "negative_prompt": ""}, parameters)
            trajectory, noise = pipeline.encode(request), pipeline.prepare_latents(request)
            started, cpu_started = time.perf_counter(), time.process_time()
            latents = pipeline.diffuse(noise, trajectory)
            runs.seconds += time.perf_counter() - started
            runs.cpu_seconds += time.process_time() - cpu_started
            video = pipeline.decode(latents)
        if pipeline.block_cache is not None:
            for branches in pipeline.block_cache.report()["experts"].values():
                for branch in branches.values():
                    runs.steps += branch["steps"]
                    runs.cached_steps += len(branch["cached_steps"])
        frames = (video[0].permute(1, 2, 3, 0) / 2 + 0.5).clamp(0, 1)
        return latents.numpy(), frames.float().numpy()


def measure(prompts: list[GridPrompt], steps: int) -> dict[float | None, Runs]:
    """Every prompt once with each setting."""
    generator = Generator(steps)
    settings: tuple[float | None, ...] = (None, *THRESHOLDS)
    runs = {threshold: Runs() for threshold in settings}
    for threshold in settings:
        generator.generate(prompts[0], threshold, Runs())  # the first time costs more
    for prompt in prompts:
        made = {threshold: generator.generate(prompt, threshold, runs[threshold]) for threshold in settings}
        expected, reference = made[None]
        for threshold, (latents, frames) in made.items():
            runs[threshold].accuracy.add(prompt, judge(frames))
            if threshold is not None:
                difference = np.linalg.norm((latents - expected).astype(np.float64))
                runs[threshold].distances.append(float(difference / np.linalg.norm(expected.astype(np.float64))))
                runs[threshold].psnr.append(
                    float(-10 * np.log10(np.square(frames - reference, dtype=np.float64).mean()))
                )
    return runs


def report(runs: dict[float | None, Runs], prompts: int, steps: int, threads: int) -> dict[str, Any]:
    """The figures."""
    uncached = runs[None]
    thresholds = [
        {
            "residual_diff_threshold": threshold,
            "steps_reused": of.cached_steps,
            "of_steps": of.steps,
            "cpu_seconds_per_video": round(of.cpu_seconds / prompts, 4),
            "speed_ratio_cpu_seconds": round(uncached.cpu_seconds / of.cpu_seconds, 3),
            "speed_ratio_wall_clock": round(uncached.seconds / of.seconds, 3),
            "latents_relative_l2": {"mean": round(np.mean(of.distances), 4), "largest": round(max(of.distances), 4)},
            "psnr_db": {"mean": round(np.mean(of.psnr), 2), "least": round(min(of.psnr), 2)},
            "judge": of.accuracy.as_json()["measures"],
        }
        for threshold, of in runs.items()
        if threshold is not None
    ]
    return {
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cpus": os.cpu_count(),
            "threads": threads,
        },
        "videos": prompts,
        "num_inference_steps": steps,
        "cache_config": CACHE,
        "uncached": {
            "cpu_seconds_per_video": round(uncached.cpu_seconds / prompts, 4),
            "judge": uncached.accuracy.as_json()["measures"],
        },
        "thresholds": thresholds,
    }


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=4, help="take only every n-th prompt of the grid")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    os.environ.update(VLLM_NEURON_CPU_MODE="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="WARNING")
    import torch

    torch.set_num_threads(arguments.threads)
    prompts = list(itertools.islice(prompt_grid(seeds=1, first_seed=1000), 0, None, arguments.every))
    figures = report(measure(prompts, arguments.steps), len(prompts), arguments.steps, arguments.threads)
    text = json.dumps(figures, indent=1, default=float)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
