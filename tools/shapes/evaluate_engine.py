# SPDX-License-Identifier: Apache-2.0
"""The grid of evaluate.py through the vLLM-Omni engine of these packages, in any layout.

    python tools/shapes/evaluate_engine.py FOLDER --frames one.npz
    python tools/shapes/evaluate_engine.py FOLDER --engine '{"tensor_parallel_size": 2}' --compare one.npz

`--compare` reports how far the frames are from those of another run (relative L2 distance, mean and largest).
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
from omni_neuron_testkit import Accuracy, judge, prompt_grid


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
    parser.add_argument("--frames", type=Path, help="write all frames, for --compare of another run")
    parser.add_argument("--compare", type=Path, help="frames of another run of the same grid")
    arguments = parser.parse_args()

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm_omni.entrypoints.omni import Omni
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    grid = prompt_grid(seeds=arguments.seeds, first_seed=arguments.first_seed)
    prompts = list(itertools.islice(grid, 0, None, arguments.every))
    accuracy, videos = Accuracy(), []
    omni = Omni(**{"model": str(arguments.folder), "dtype": "float32", "flow_shift": FLOW_SHIFT, **arguments.engine})
    try:
        started = time.monotonic()
        for prompt in prompts:
            parameters = OmniDiffusionSamplingParams(
                height=HEIGHT,
                width=WIDTH,
                num_frames=FRAMES,
                num_inference_steps=arguments.steps,
                guidance_scale=arguments.guidance,
                seed=prompt.seed,
            )
            [output] = omni.generate({"prompt": prompt.caption, "negative_prompt": ""}, parameters, use_tqdm=False)
            videos.append(np.asarray(output.images[0])[0])
            accuracy.add(prompt, judge(videos[-1]))
        seconds = (time.monotonic() - started) / len(prompts)
    finally:
        omni.close()

    print(accuracy.table())
    print(f"{seconds:.2f} s a video, engine {json.dumps(arguments.engine)}")
    frames = np.stack(videos)
    report = {"engine": arguments.engine, "seconds_a_video": round(seconds, 3), **accuracy.as_json()}
    if arguments.frames:
        np.savez_compressed(arguments.frames, frames=frames)
    if arguments.compare:
        others = np.load(arguments.compare)["frames"]
        if others.shape != frames.shape:
            sys.exit(f"{arguments.compare} holds frames of shape {others.shape}, this run has {frames.shape}")
        axes = tuple(range(1, frames.ndim))
        distances = np.linalg.norm((frames - others).reshape(len(frames), -1), axis=1)
        distances /= np.sqrt(np.square(others).sum(axis=axes))
        report["distance"] = {"mean": float(distances.mean()), "largest": float(distances.max())}
        print(
            f"relative L2 distance to {arguments.compare}: mean {distances.mean():.2e}, largest {distances.max():.2e}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":  # workers are spawned
    main()
