# SPDX-License-Identifier: Apache-2.0
"""What runs in the engine's process: checks of configuration and requests before, the output's form after."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from diffusers.image_processor import VaeImageProcessor
from diffusers.video_processor import VideoProcessor
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.errors import OmniClientError

from omni_neuron_parallel import Topology
from vllm_omni_neuron import shared_memory
from vllm_omni_neuron.sdk.engine_checks import check_engine_config, topology_of
from vllm_omni_neuron.sdk.engine_hooks import EngineHooks
from vllm_omni_neuron.sdk.images import fit_images, load_images
from vllm_omni_neuron.sdk.request import (
    DEFAULT_OUTPUT_TYPES,
    SOURCES,
    GenerationRequest,
    RequestError,
    media_of,
    resolve_request,
)
from vllm_omni_neuron.sdk.spec import Feature, ModelSpec, Output

_IMAGE_FEATURES: dict[str, Feature] = {"image": "image_input", "last_image": "last_image_input"}


class ClientRequestError(OmniClientError, RequestError):
    """A `RequestError` that vLLM-Omni's server answers with status 400 instead of 500."""


def pre_process_func(
    pipeline_class: type[EngineHooks], od_config: OmniDiffusionConfig
) -> Callable[[OmniDiffusionRequest], OmniDiffusionRequest]:
    """Check the engine's configuration now, in the engine's process, and every request as it comes.

    Args:
        pipeline_class: its `spec` and hooks say what is valid.
        od_config: of the engine.

    Returns:
        The function, which raises `ClientRequestError`.

    Raises:
        ModelConfigError: as `check_engine_config`.
        CheckpointError: likewise.
    """
    checkpoint = check_engine_config(od_config, pipeline_class)
    rules = pipeline_class.request_rules(od_config, checkpoint)
    topology = topology_of(od_config.parallel_config)
    # Else the one rank is in this process, and its result goes nowhere.
    has_workers = od_config.num_gpus != 1 or od_config.distributed_executor_backend == "mp"

    def pre_process(request: OmniDiffusionRequest) -> OmniDiffusionRequest:
        if request.is_dummy_run():
            return request
        # A copy: what is filled in must not stay in an object that the caller uses for the next request.
        params = request.sampling_params = copy.copy(request.sampling_params)
        params.extra_args = {name: value for name, value in (params.extra_args or {}).items() if name != SOURCES}
        try:
            _refuse_unsupported(request, pipeline_class.spec)
            request.prompt = load_images(request.prompt)
            resolved = resolve_request(request.prompt, params, rules)
            pipeline_class.check_request(resolved, checkpoint, od_config)
            _check_sequence(resolved, pipeline_class.num_tokens(resolved, checkpoint), topology)
            generators, outputs = params.generator, resolved.num_outputs_per_prompt
            if isinstance(generators, list) and len(generators) != outputs:
                raise RequestError(
                    f"{len(generators)} generators are given; {outputs} {rules.output}(s) need as many, or one"
                )
            if params.lora_request is not None:
                _check_lora(params.lora_request.lora_path, pipeline_class, checkpoint)
            if has_workers:
                _check_shared_memory(resolved)
        except RequestError as error:
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


def post_process_func(output: Output) -> Callable[..., dict[str, Any]]:
    """Turn the workers' frames or images within ±1 into what the caller asked for, keeping the report beside them.

    Args:
        output: the kind, and the key of the payload: "video" `[N, 3, F, H, W]` or "image" `[N, 3, H, W]`. A PIL image
            or a list of frames for each of the N, an array, a tensor, or the latents as they are.
    """
    to_images, to_videos = VaeImageProcessor(), VideoProcessor()

    def post_process(
        result: dict[str, Any], output_type: str | None = None, sampling_params: Any = None
    ) -> dict[str, Any]:
        made = result["payload"][output]
        kind = getattr(sampling_params, "output_type", None) or output_type or DEFAULT_OUTPUT_TYPES[output]
        if kind != "latent" and output == "image":
            made = to_images.postprocess(made, output_type=kind)
        elif kind != "latent":
            made = to_videos.postprocess_video(made, output_type=kind)
        return {"payload": {output: made}, "metadata": result["metadata"]}

    return post_process


def _refuse_unsupported(request: OmniDiffusionRequest, spec: ModelSpec) -> None:
    """Refuse what a request asks for and the model's spec says that it lacks, with the reason."""
    media = media_of(request.prompt)
    asked = {name: feature for name, feature in _IMAGE_FEATURES.items() if name in media}
    if request.sampling_params.lora_request is not None:
        asked["lora_request"] = "lora"
    for name, feature in asked.items():
        if not spec.supports(feature):
            raise RequestError(f"the request carries {name}; {spec.title} takes none: {spec.why_not(feature)}")


def _check_lora(path: str, pipeline_class: type[EngineHooks], checkpoint: Any) -> None:
    try:
        pipeline_class.check_lora(path, checkpoint)
    except ValueError as error:
        raise RequestError(str(error)) from error


def _check_shared_memory(request: GenerationRequest) -> None:
    """Refuse an output that does not fit into `/dev/shm`, through which it comes in float32. Latents are smaller."""
    if request.output_type == "latent":
        return
    count, frames = request.num_outputs_per_prompt, request.num_frames
    shape = f"{count} × 3 × {frames} × {request.height} × {request.width}"
    nbytes = count * 3 * frames * request.height * request.width * 4
    problem = shared_memory.space().lacks(nbytes, f"an output of {shape} in float32")
    if problem:
        raise RequestError(problem)


def _check_sequence(request: GenerationRequest, tokens: int | None, topology: Topology) -> None:
    """Refuse an output with fewer tokens than there are ranks to share them."""
    if tokens is None:
        return
    try:
        topology.check(num_tokens=tokens)
    except ValueError as error:
        frames = "" if request.num_frames == 1 else f" and {request.num_frames} frames"
        raise RequestError(f"height {request.height}, width {request.width}{frames}: {error}") from error
