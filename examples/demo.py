# SPDX-License-Identifier: Apache-2.0
"""`./dev demo`: three prompts become MP4s through the real vLLM-Omni engine, and the judge says what they show.

The checkpoint is the one of omni-neuron-shapes: tiny, trained, in Wan2.2's layout of two experts. Beside the videos a
contact sheet is written, one row a prompt.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from omni_neuron_shapes import FLOW_SHIFT, FRAMES, HEIGHT, WIDTH, model_path
from omni_neuron_testkit import judge, read_video, subject_of
from vllm_omni_neuron.cli import engine_streams
from vllm_omni_neuron.video import encode_mp4, fps_from_output, frames_from_output

PROMPTS = ("a red circle moving right", "a blue triangle moving up", "the green square is moving left")
SHEET_FRAMES = 6
SHEET_SCALE = 2


def main() -> None:
    """Parse, generate, judge, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("demo"), help="where the videos go")
    parser.add_argument("--prompt", action="append", help=f"may be given more than once; default: {', '.join(PROMPTS)}")
    parser.add_argument("--num-inference-steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--tensor-parallel-size", type=int, default=2)
    arguments = parser.parse_args()
    prompts = arguments.prompt or PROMPTS
    for prompt in prompts:
        if subject_of(prompt) is None:
            sys.exit(f"{prompt!r}: the model knows one colour, shape and direction, as in {PROMPTS[0]!r}")

    started = time.monotonic()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    print(f"starting vLLM-Omni on {arguments.tensor_parallel_size} worker(s) with {model_path()} …", flush=True)
    with engine_streams():  # the engine's output goes to stderr
        outputs = generate(prompts, arguments)

    as_asked, rows = 0, []
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), start=1):
        video = arguments.folder / f"{number}-{prompt.replace(' ', '-')}.mp4"
        video.write_bytes(encode_mp4(frames_from_output(output), fps_from_output(output, None)))
        frames = read_video(video)  # what a viewer of the file sees
        verdict = judge(frames)
        right = verdict.matches(subject_of(prompt))
        as_asked += right
        print(f"{video}\n  asked: {prompt}\n  seen:  {verdict}{'' if right else '   ← not as asked'}")
        rows.append(frames)
    sheet = arguments.folder / "contact-sheet.png"
    contact_sheet(rows).save(sheet)
    print(f"{sheet}: one row a prompt, time goes to the right")
    print(f"{as_asked} of {len(prompts)} as asked; the demo took {time.monotonic() - started:.0f} s")
    sys.exit(0 if as_asked == len(prompts) else 1)


def generate(prompts: Any, arguments: argparse.Namespace) -> list[Any]:
    """One engine, one request a prompt."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm_omni.entrypoints.omni import Omni
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    omni = Omni(
        model=str(model_path()),
        tensor_parallel_size=arguments.tensor_parallel_size,
        dtype="float32",
        flow_shift=FLOW_SHIFT,
    )
    try:
        outputs = []
        for number, prompt in enumerate(prompts):
            parameters = OmniDiffusionSamplingParams(
                height=HEIGHT,
                width=WIDTH,
                num_frames=FRAMES,
                num_inference_steps=arguments.num_inference_steps,
                guidance_scale=4.0,
                seed=arguments.seed + number,
            )
            [output] = omni.generate({"prompt": prompt, "negative_prompt": ""}, parameters, use_tqdm=False)
            outputs.append(output)
    finally:
        omni.close()
    return outputs


def contact_sheet(videos: list[np.ndarray]) -> Image.Image:
    """Frames at even distances, one row a video."""
    rows = [
        np.concatenate(list(frames[np.linspace(0, len(frames) - 1, SHEET_FRAMES).round().astype(int)]), axis=1)
        for frames in videos
    ]
    sheet = Image.fromarray(np.concatenate(rows))
    return sheet.resize((sheet.width * SHEET_SCALE, sheet.height * SHEET_SCALE), Image.Resampling.NEAREST)


if __name__ == "__main__":  # workers are spawned
    main()
