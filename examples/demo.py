# SPDX-License-Identifier: Apache-2.0
"""`./dev demo`: make a tiny Wan2.2 checkpoint, then turn a prompt into an MP4 through the real vLLM-Omni engine.

The weights are random, so the video is coloured noise; what it shows is that the whole way works on this machine.
Everything after the checkpoint is the command that a user would type.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
import time
from pathlib import Path

PROMPT = "A red circle moving to the right over a grey ground."


def main() -> None:
    """Parse, make the checkpoint, run the command, check the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("demo"), help="where checkpoint and video go")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--height", type=int, default=240)
    parser.add_argument("--width", type=int, default=416)
    parser.add_argument("--num-frames", type=int, default=33)
    parser.add_argument("--num-inference-steps", type=int, default=20)
    parser.add_argument("--fps", type=int, default=16)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--tensor-parallel-size", type=int, default=2)
    arguments = parser.parse_args()

    started = time.monotonic()
    model, video = arguments.folder / "tiny-wan22", arguments.folder / "video.mp4"
    print(f"making a tiny Wan2.2 checkpoint in {model} …", flush=True)
    from omni_neuron_wan22 import make_tiny_checkpoint

    with contextlib.redirect_stderr(io.StringIO()):  # transformers' and diffusers' own progress bars
        make_tiny_checkpoint(model)

    command = ["vllm-omni-neuron", "generate", "--model", str(model), "--output", str(video), "--dtype", "float32"]
    for name in (
        "prompt",
        "height",
        "width",
        "num_frames",
        "num_inference_steps",
        "fps",
        "seed",
        "tensor_parallel_size",
    ):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    print("$ " + " ".join(json.dumps(word) if " " in word else word for word in command), flush=True)
    subprocess.run([str(Path(sys.executable).with_name(command[0])), *command[1:]], check=True)

    from vllm_omni_neuron.video import read_video_info

    found = read_video_info(video)
    asked = (arguments.num_frames, arguments.width, arguments.height, float(arguments.fps))
    if (found.frames, found.width, found.height, float(found.fps)) != asked:
        sys.exit(f"{video}: {found}, but {asked} was asked for")
    print(f"{video.resolve()}: {found.frames} frames of {found.width}×{found.height} at {found.fps:g} fps, as asked")
    print(f"the demo took {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
