# SPDX-License-Identifier: Apache-2.0
"""The grid of evaluate.py through the vLLM-Omni engine of these packages, in any layout.

    python tools/shapes/evaluate.py FOLDER --engine-schedule --videos diffusers.npz
    python tools/shapes/evaluate_engine.py FOLDER --compare diffusers.npz
    python tools/shapes/evaluate_engine.py FOLDER --engine '{"tensor_parallel_size": 2}' --compare diffusers.npz

`--compare` reports how far frames and final latents are from those of another run of the same grid (relative L2
distance, mean and largest). The latents take a second request a video.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from omni_neuron_shapes import FLOW_SHIFT, FRAMES, HEIGHT, WIDTH
from omni_neuron_testkit import Accuracy, GridPrompt, judge, prompt_grid


def main() -> None:
    """Parse, generate, judge, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkpoint")
    parser.add_argument("--engine", type=json.loads, default={}, help="settings of vLLM-Omni's Omni, as JSON")
    parser.add_argument("--seeds", type=int, default=2, help="videos of each subject")
    parser.add_argument("--first-seed", type=int, default=1000)
    parser.add_argument("--every", type=int, default=1, help="take only every n-th video of the grid")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=4.0)
    parser.add_argument("--json", type=Path, help="every verdict")
    parser.add_argument("--videos", type=Path, help="write frames and latents, for --compare of another run")
    parser.add_argument("--compare", type=Path, help="what --videos of another run wrote")
    arguments = parser.parse_args()

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm_omni.entrypoints.omni import Omni
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    grid = prompt_grid(seeds=arguments.seeds, first_seed=arguments.first_seed)
    prompts = list(itertools.islice(grid, 0, None, arguments.every))
    accuracy, frames, latents = Accuracy(), [], []
    omni = Omni(**{"model": str(arguments.folder), "dtype": "float32", "flow_shift": FLOW_SHIFT, **arguments.engine})

    def generate(prompt: GridPrompt, output_type: str) -> np.ndarray:
        parameters = OmniDiffusionSamplingParams(
            height=HEIGHT,
            width=WIDTH,
            num_frames=FRAMES,
            num_inference_steps=arguments.steps,
            guidance_scale=arguments.guidance,
            seed=prompt.seed,
            output_type=output_type,
        )
        [output] = omni.generate({"prompt": prompt.caption, "negative_prompt": ""}, parameters, use_tqdm=False)
        return np.asarray(output.images[0])[0]

    try:
        started = time.monotonic()
        for prompt in prompts:
            frames.append(generate(prompt, "np"))
            accuracy.add(prompt, judge(frames[-1]))
        seconds = (time.monotonic() - started) / len(prompts)
        if arguments.videos or arguments.compare:
            latents = [generate(prompt, "latent") for prompt in prompts]
    finally:
        omni.close()

    print(accuracy.table())
    print(f"{seconds:.2f} s a video, engine {json.dumps(arguments.engine)}")
    settings = {name: getattr(arguments, name) for name in ("seeds", "first_seed", "every", "steps", "guidance")}
    report = {"engine": arguments.engine, **settings, "seconds_a_video": round(seconds, 3), **accuracy.as_json()}
    made = {"frames": np.stack(frames), "latents": np.stack(latents)} if latents else {}
    if arguments.videos:
        np.savez_compressed(arguments.videos, **made)
    if arguments.compare:
        with np.load(arguments.compare) as others:
            report["distance"] = {name: distances(made[name], others[name]) for name in made}
        for name, distance in report["distance"].items():
            print(f"relative L2 distance of {name} to {arguments.compare.name}: {distance}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def distances(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    """Relative L2 distance video by video: mean and largest."""
    if ours.shape != theirs.shape:
        sys.exit(f"the other run holds arrays of shape {theirs.shape}, this one has {ours.shape}")
    ours, theirs = (array.reshape(len(array), -1).astype(np.float64) for array in (ours, theirs))
    relative = np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1)
    return {"mean": float(relative.mean()), "largest": float(relative.max())}


if __name__ == "__main__":  # workers are spawned
    main()
