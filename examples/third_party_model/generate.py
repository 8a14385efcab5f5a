# SPDX-License-Identifier: Apache-2.0
"""Generate a video with the toy model on two tensor-parallel workers: python generate.py FOLDER_OF_THE_MODEL."""

from __future__ import annotations

import sys

from vllm_omni.entrypoints.omni import Omni
from vllm_omni.inputs.data import OmniDiffusionSamplingParams


def main(model: str) -> None:
    """Generate, and say what came."""
    omni = Omni(model=model, tensor_parallel_size=2, enforce_eager=True)
    sampling = OmniDiffusionSamplingParams(height=32, width=48, num_frames=5, num_inference_steps=4, seed=7)
    [output] = omni.generate({"prompt": "a red fox"}, sampling)
    [frames] = output.images
    print(f"frames of {model}: {tuple(frames.shape)}, {frames.dtype}")
    omni.close()


if __name__ == "__main__":  # workers are processes that import this file again
    main(sys.argv[1])
