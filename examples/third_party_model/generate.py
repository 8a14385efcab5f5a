# SPDX-License-Identifier: Apache-2.0
"""Generate a video on two workers: python generate.py CHECKPOINT [--context-parallel]."""

from __future__ import annotations

import sys

from vllm_omni.entrypoints.omni import Omni
from vllm_omni.inputs.data import OmniDiffusionSamplingParams


def main(model: str, *options: str) -> None:
    """Generate, and say what came."""
    axis = "ring_degree" if "--context-parallel" in options else "tensor_parallel_size"
    omni = Omni(model=model, dtype="float32", enforce_eager=True, **{axis: 2})
    sampling = OmniDiffusionSamplingParams(height=32, width=48, num_frames=5, num_inference_steps=4, seed=7)
    [output] = omni.generate({"prompt": "a red fox"}, sampling)
    [frames] = output.images
    print(f"frames of {model}: {tuple(frames.shape)}, {frames.dtype}")
    print(output.multimodal_output["metadata"]["generation"]["layout"])
    omni.close()


if __name__ == "__main__":  # workers are processes that import this file again
    main(*sys.argv[1:])
