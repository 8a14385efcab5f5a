# SPDX-License-Identifier: Apache-2.0
"""Wan2.2 image-to-video with the documented options: an image and a prompt become an MP4.

    python examples/wan22/run_i2v.py --model-path Wan2.2-I2V-A14B-Diffusers --image first.png \
        --stage-config examples/wan22/stage_i2v_tp8_cp4_720p.yaml --height 720 --width 1280
"""

from __future__ import annotations

from pathlib import Path

import typer
from run import SEED, Dev, shape

from vllm_omni_neuron.cli import GenerateOptions, Reporting, generate_videos, options


def main(
    model_path: options.Model,
    image: options.Image,
    last_image: options.LastImage = None,
    image_policy: options.ImagePolicyOption = None,
    prompt: options.Prompt = "The camera moves slowly forward.",
    output: options.Output = Path("wan22_i2v.mp4"),
    dev: Dev = False,
    stage_config: options.StageConfigFile = None,
    height: options.Height = None,
    width: options.Width = None,
    num_frames: options.NumFrames = None,
    no_cfg: options.NoCfg = False,
    guidance_scale: options.GuidanceScale = None,
    cache_backend: options.CacheBackendOption = None,
    tensor_parallel_size: options.TensorParallelSize = None,
    profile: options.Profile = False,
    verbose: options.Verbose = False,
) -> None:
    """Wan2.2 image-to-video. The video has the size asked for, whatever the image's."""
    request = GenerateOptions(
        model=model_path,
        prompt=prompt,
        **options.images(image, last_image, image_policy),
        seed=SEED,
        seed_is_random=False,
        **shape(dev, height, width, num_frames),
        **options.guidance(guidance_scale, None, no_cfg),
        **options.cached(cache_backend, None),
        tensor_parallel_size=tensor_parallel_size,
    )
    generate_videos(
        request,
        output,
        stage_config=stage_config,
        profile_runs=options.DEFAULT_PROFILE_RUNS if profile else None,
        reporting=Reporting(verbose=verbose),
    )


if __name__ == "__main__":
    typer.run(main)
