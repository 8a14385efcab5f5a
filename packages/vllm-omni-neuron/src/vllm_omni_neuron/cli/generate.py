# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-neuron generate`: a prompt becomes a video or an image."""

from __future__ import annotations

import secrets

from . import options
from .engine import GenerateOptions
from .run import Reporting, generate_videos


def generate(
    model: options.Model,
    prompt: options.Prompt,
    output: options.Output = None,
    image: options.Image = None,
    last_image: options.LastImage = None,
    image_policy: options.ImagePolicyOption = None,
    negative_prompt: options.NegativePrompt = None,
    height: options.Height = None,
    width: options.Width = None,
    num_frames: options.NumFrames = None,
    num_inference_steps: options.Steps = None,
    guidance_scale: options.GuidanceScale = None,
    guidance_scale_2: options.GuidanceScale2 = None,
    no_cfg: options.NoCfg = False,
    seed: options.Seed = None,
    num_outputs_per_prompt: options.NumOutputs = None,
    fps: options.Fps = None,
    lora: options.Lora = None,
    lora_scale: options.LoraScale = None,
    flow_shift: options.FlowShift = None,
    boundary_ratio: options.BoundaryRatio = None,
    sample_solver: options.SampleSolver = None,
    dtype: options.DtypeOption = None,
    quantization: options.QuantizationOption = None,
    comfyui_fp8_model_path: options.ComfyFp8Path = None,
    modules_to_not_convert: options.ModulesToNotConvert = None,
    cache_backend: options.CacheBackendOption = None,
    cache_config: options.CacheConfig = None,
    vae_use_tiling: options.VaeTiling = False,
    enable_cpu_offload: options.CpuOffload = False,
    tensor_parallel_size: options.TensorParallelSize = None,
    ring_degree: options.RingDegree = None,
    cfg_parallel_size: options.CfgParallelSize = None,
    vae_patch_parallel_size: options.VaePatchParallelSize = None,
    stage_config: options.StageConfigFile = None,
    deploy_config: options.DeployConfigFile = None,
    init_timeout: options.InitTimeout = None,
    profile: options.Profile = False,
    profile_runs: options.ProfileRuns = options.DEFAULT_PROFILE_RUNS,
    json_: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
) -> None:
    """Generate a video, or an image, from a prompt.

    Exit codes: 0 done, 1 generation failed, 2 wrong usage.
    """
    request = GenerateOptions(
        model=model,
        prompt=prompt,
        seed=secrets.randbelow(2**31) if seed is None else seed,
        seed_is_random=seed is None,
        negative_prompt=negative_prompt,
        **options.images(image, last_image, image_policy),
        height=height,
        width=width,
        num_frames=num_frames,
        num_inference_steps=num_inference_steps,
        **options.guidance(guidance_scale, guidance_scale_2, no_cfg),
        num_outputs_per_prompt=num_outputs_per_prompt,
        fps=fps,
        flow_shift=flow_shift,
        boundary_ratio=boundary_ratio,
        sample_solver=sample_solver,
        **options.adapter(lora, lora_scale),
        tensor_parallel_size=tensor_parallel_size,
        ring_degree=ring_degree,
        cfg_parallel_size=cfg_parallel_size,
        vae_patch_parallel_size=vae_patch_parallel_size,
        dtype=None if dtype is None else dtype.value,
        vae_use_tiling=vae_use_tiling or None,
        enable_cpu_offload=enable_cpu_offload or None,
        **options.quantized(quantization, comfyui_fp8_model_path, modules_to_not_convert),
        **options.cached(cache_backend, cache_config),
        init_timeout=init_timeout,
    )
    generate_videos(
        request,
        output,
        stage_config=stage_config,
        deploy_config=deploy_config,
        profile_runs=profile_runs if profile else None,
        reporting=Reporting(json=json_, quiet=quiet, verbose=verbose, debug=debug),
    )
