# SPDX-License-Identifier: Apache-2.0
"""What runs in the engine's process: checks of configuration and requests before, the video's form after."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.request import OmniDiffusionRequest

from omni_neuron_wan22.engine_config import (
    ClientRequestError,
    check_engine_config,
    check_experts,
    check_sequence,
    engine_defaults,
    topology_of,
)
from omni_neuron_wan22.image import fit_images, load_images
from omni_neuron_wan22.lora_adapter import LoraError, read_adapter
from omni_neuron_wan22.request import SOURCES, RequestError, resolve_request


def get_neuron_wan22_pre_process_func(
    od_config: OmniDiffusionConfig,
) -> Callable[[OmniDiffusionRequest], OmniDiffusionRequest]:
    """Check the engine's configuration now, in the engine's process, and every request as it comes."""
    checkpoint = check_engine_config(od_config)
    defaults = engine_defaults(od_config, checkpoint)
    topology = topology_of(od_config.parallel_config)

    def pre_process(request: OmniDiffusionRequest) -> OmniDiffusionRequest:
        if request.is_dummy_run():
            return request
        # A copy: what is filled in must not stay in an object that the caller uses for the next request.
        params = request.sampling_params = copy.copy(request.sampling_params)
        params.extra_args = {name: value for name, value in (params.extra_args or {}).items() if name != SOURCES}
        try:
            request.prompt = load_images(request.prompt)
            resolved = resolve_request(request.prompt, params, defaults)
            check_experts(resolved, checkpoint, od_config.boundary_ratio)
            check_sequence(resolved, checkpoint, topology)
            generators, videos = params.generator, resolved.num_outputs_per_prompt
            if isinstance(generators, list) and len(generators) != videos:
                raise RequestError(f"{len(generators)} generators are given; {videos} video(s) need as many, or one")
            if params.lora_request is not None:
                read_adapter(params.lora_request.lora_path, checkpoint)
        except (RequestError, LoraError) as error:
            raise ClientRequestError(str(error)) from error
        request.prompt = fit_images(request.prompt, resolved)
        # The rounded sizes, so that what vLLM-Omni reports is what is made, and no second warning in the workers.
        params.height, params.width, params.num_frames = resolved.height, resolved.width, resolved.num_frames
        params.output_type = resolved.output_type
        params.extra_args |= {"num_frames": resolved.num_frames, SOURCES: dict(resolved.sources)}
        if params.generator is not None or params.latents is not None:
            params.seed = None  # the noise does not come from it
        return request

    return pre_process


def get_neuron_wan22_post_process_func(od_config: OmniDiffusionConfig) -> Callable[..., Any]:
    """Turn the workers' frames into what the caller asked for, keeping the report beside them."""
    from diffusers.video_processor import VideoProcessor

    processor = VideoProcessor(vae_scale_factor=8)

    def post_process(output: dict[str, Any], output_type: str = "np", sampling_params: Any = None) -> dict[str, Any]:
        if sampling_params is not None and sampling_params.output_type is not None:
            output_type = sampling_params.output_type
        video = output["payload"]["video"]
        if output_type != "latent":
            video = processor.postprocess_video(video, output_type=output_type)
        return {"payload": {"video": video}, "metadata": output["metadata"]}

    return post_process
