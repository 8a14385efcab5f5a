# SPDX-License-Identifier: Apache-2.0
"""Accuracy of a shapes checkpoint over the grid of all 72 subjects, with diffusers' own `WanPipeline`, or
`WanImageToVideoPipeline` where the checkpoint is one for that: then each video starts from a drawn first frame.

    python tools/shapes/evaluate.py FOLDER --json result.json

`--broken` breaks one thing on purpose: it shows by how much the judge would notice a faulty engine. `--engine-schedule`
takes the timesteps of our engine, and `--videos` keeps what was made, for `evaluate_engine.py --compare`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline, WanImageToVideoPipeline, WanPipeline
from PIL import Image

from omni_neuron_shapes import FLOW_SHIFT, FRAMES, HEIGHT, WIDTH
from omni_neuron_testkit import Accuracy, GridPrompt, judge, prompt_grid, random_scenes, render


def experts_swapped(pipeline: WanPipeline) -> None:
    """High-noise expert for low noise and the other way round."""
    pipeline.transformer, pipeline.transformer_2 = pipeline.transformer_2, pipeline.transformer


def high_expert_only(pipeline: WanPipeline) -> None:
    """The boundary ignored: the high-noise expert for every step."""
    pipeline.transformer_2 = pipeline.transformer


def low_expert_only(pipeline: WanPipeline) -> None:
    """The boundary ignored: the low-noise expert for every step."""
    pipeline.transformer = pipeline.transformer_2


def latents_std_ignored(pipeline: WanPipeline) -> None:
    """Latents decoded without their spread."""
    pipeline.vae.register_to_config(latents_std=[1.0] * pipeline.vae.config.z_dim)


FAULTS: dict[str, Callable[[WanPipeline], None]] = {
    function.__name__.replace("_", "-"): function
    for function in (experts_swapped, high_expert_only, low_expert_only, latents_std_ignored)
}
PROMPTS_SWAPPED = "prompts-swapped"  # prompt and negative prompt exchanged


def load_pipeline(folder: Path, fault: str | None) -> WanPipeline | WanImageToVideoPipeline:
    """The checkpoint in float32, with one fault."""
    pipeline = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    if fault in FAULTS:
        FAULTS[fault](pipeline)
    return pipeline


def first_frame(prompt: GridPrompt) -> Image.Image:
    """The first frame of a clip of the prompt's subject, in a scene that the prompt's seed draws."""
    frames = render(prompt.subject, next(random_scenes(prompt.seed, frames=FRAMES, height=HEIGHT, width=WIDTH)))
    return Image.fromarray((frames[0] * 255).round().astype(np.uint8))


def main() -> None:
    """Parse, generate, judge, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkpoint, or a work folder's --write")
    parser.add_argument("--seeds", type=int, default=2, help="videos of each subject")
    parser.add_argument("--first-seed", type=int, default=1000)
    parser.add_argument("--every", type=int, default=1, help="take only every n-th video of the grid")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=4.0)
    parser.add_argument("--broken", choices=[*FAULTS, PROMPTS_SWAPPED])
    parser.add_argument("--json", type=Path, help="every verdict, for the model card")
    parser.add_argument("--engine-schedule", action="store_true", help="the scheduler of omni-neuron-wan22")
    parser.add_argument("--videos", type=Path, help="write frames and final latents, an .npz")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    pipeline = load_pipeline(arguments.folder, arguments.broken)
    if arguments.engine_schedule:
        from omni_neuron_wan22 import make_scheduler

        pipeline.scheduler = make_scheduler("unipc", FLOW_SHIFT)
    latents: list[np.ndarray] = []
    videos: list[np.ndarray] = []

    def keep_last(_: WanPipeline, step: int, __: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step + 1 == arguments.steps:
            latents.append(tensors["latents"][0].numpy())
        return tensors

    accuracy, started = Accuracy(), time.monotonic()
    grid = prompt_grid(seeds=arguments.seeds, first_seed=arguments.first_seed)
    for prompt in itertools.islice(grid, 0, None, arguments.every):
        texts = (prompt.caption, "") if arguments.broken != PROMPTS_SWAPPED else ("", prompt.caption)
        image = {"image": first_frame(prompt)} if isinstance(pipeline, WanImageToVideoPipeline) else {}
        video: Any = pipeline(
            **image,
            prompt=texts[0],
            negative_prompt=texts[1],
            height=HEIGHT,
            width=WIDTH,
            num_frames=FRAMES,
            num_inference_steps=arguments.steps,
            guidance_scale=arguments.guidance,
            generator=torch.Generator().manual_seed(prompt.seed),
            callback_on_step_end=keep_last,
        ).frames[0]
        if arguments.videos:
            videos.append(video)
        accuracy.add(prompt, judge(video))
        if len(accuracy.results) % 12 == 0:
            print(f"{len(accuracy.results)} videos, all three right: {accuracy.share('all'):.0%}", file=sys.stderr)
    seconds = time.monotonic() - started

    print(accuracy.table())
    for prompt, verdict in accuracy.misses():
        print(f"- seed {prompt.seed}: asked for {prompt.caption!r}, seen: {verdict} (overlap {verdict.overlap:.2f})")
    print(f"{seconds / len(accuracy.results):.2f} s a video")
    if arguments.videos:
        np.savez_compressed(arguments.videos, frames=np.stack(videos), latents=np.stack(latents))
    if arguments.json:
        settings = {
            name: str(value) for name, value in vars(arguments).items() if name not in ("json", "folder", "videos")
        }
        report = {"settings": settings, "seconds_a_video": round(seconds / len(accuracy.results), 3)}
        arguments.json.write_text(json.dumps({**report, **accuracy.as_json()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
