# SPDX-License-Identifier: Apache-2.0
"""Wan2.2 text-to-video with the documented options: a prompt becomes an MP4, with a report of what was done.

    python examples/wan22/run.py --model-path Wan2.2-T2V-A14B-Diffusers \
        --stage-config examples/wan22/stage_t2v_tp4_cp8_cfg2_480p.yaml
    python examples/wan22/run.py --model-path tiny-wan --dev --profile    # on a CPU, with VLLM_NEURON_CPU_MODE=1

`vllm-omni-neuron generate` has the same options and more; what both do is `generate_videos`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_omni_neuron.cli import GenerateOptions, Reporting, generate_videos, options

FULL = {"height": 480, "width": 832, "num_frames": 81, "num_inference_steps": 40}
DEV = {"height": 128, "width": 208, "num_frames": 5, "num_inference_steps": 10}
SEED = 42

Dev = Annotated[bool, typer.Option("--dev", help="208×128, 5 frames, 10 steps; else 832×480, 81 frames, 40 steps.")]


def shape(dev: bool, height: int | None, width: int | None, num_frames: int | None) -> dict[str, Any]:
    """Sizes and steps of a request: the small or the full ones, with what was given on top."""
    given = {"height": height, "width": width, "num_frames": num_frames}
    return {**(DEV if dev else FULL), **{name: value for name, value in given.items() if value is not None}}


def main(
    model_path: options.Model,
    prompt: options.Prompt = "A red panda walks through fresh snow, close-up, morning light.",
    output: options.Output = Path("wan22_t2v.mp4"),
    dev: Dev = False,
    stage_config: options.StageConfigFile = None,
    height: options.Height = None,
    width: options.Width = None,
    num_frames: options.NumFrames = None,
    no_cfg: options.NoCfg = False,
    guidance_scale: options.GuidanceScale = None,
    quantization: options.QuantizationOption = None,
    comfyui_fp8_model_path: options.ComfyFp8Path = None,
    modules_to_not_convert: options.ModulesToNotConvert = None,
    cache_backend: options.CacheBackendOption = None,
    tensor_parallel_size: options.TensorParallelSize = None,
    profile: options.Profile = False,
    verbose: options.Verbose = False,
) -> None:
    """Wan2.2 text-to-video."""
    request = GenerateOptions(
        model=model_path,
        prompt=prompt,
        seed=SEED,
        seed_is_random=False,
        **shape(dev, height, width, num_frames),
        **options.guidance(guidance_scale, None, no_cfg),
        **options.quantized(quantization, comfyui_fp8_model_path, modules_to_not_convert),
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
