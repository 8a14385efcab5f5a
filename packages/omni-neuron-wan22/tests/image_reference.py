# SPDX-License-Identifier: Apache-2.0
"""What the tests with images run on every rank, and diffusers' counterpart. Importable by spawned processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.inputs.data import OmniDiffusionSamplingParams
from wan22_reference import NEGATIVE_PROMPT, PROMPT

from omni_neuron_parallel import RankPool, Topology, destroy_parallel, initialize_parallel, tensor_digest
from omni_neuron_wan22 import (
    NeuronFlowUniPCMultistepScheduler,
    NeuronWanI2VPipeline,
    NeuronWanPipeline,
    WanCheckpoint,
    load_transformer,
)

SETTINGS = {
    "height": 64,
    "width": 96,
    "num_frames": 9,
    "num_inference_steps": 8,
    "guidance_scale": 4.0,
    "guidance_scale_2": 3.0,
    "seed": 7,
}
IMAGES = ("image", "last_image")


def make_image(seed: int, width: int = SETTINGS["width"], height: int = SETTINGS["height"]) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return Image.fromarray(values).resize((width, height), Image.Resampling.BICUBIC)


def media(count: int) -> dict[str, Image.Image]:
    """The first `count` of a first and a last frame."""
    return {name: make_image(seed) for seed, name in enumerate(IMAGES[:count])}


def run_diffusers(path: Path, images: int) -> torch.Tensor:
    """Final latents of diffusers' pipeline for as many images; its scheduler is ours, as its UniPC is another."""
    from diffusers import WanImageToVideoPipeline, WanPipeline

    pipeline = (WanImageToVideoPipeline if images else WanPipeline).from_pretrained(path, dtype=torch.float32)
    pipeline.scheduler = NeuronFlowUniPCMultistepScheduler(shift=5.0)
    pipeline.set_progress_bar_config(disable=True)
    settings = {name: value for name, value in SETTINGS.items() if name != "seed"}
    if pipeline.config.boundary_ratio is None:
        del settings["guidance_scale_2"]
    settings |= {"generator": torch.Generator().manual_seed(SETTINGS["seed"]), "output_type": "latent"}
    return pipeline(prompt=PROMPT, negative_prompt=NEGATIVE_PROMPT, **media(images), **settings, return_dict=False)[0]


def make_pipeline(path: str, **config: Any) -> NeuronWanPipeline:
    """The pipeline of the checkpoint's architecture, as a worker has it after loading."""
    os.environ["OMNI_NEURON_CHECK_RANK_AGREEMENT"] = "1"
    image_to_video = WanCheckpoint(Path(path)).index["_class_name"] == "WanImageToVideoPipeline"
    made = (NeuronWanI2VPipeline if image_to_video else NeuronWanPipeline)(
        od_config=OmniDiffusionConfig(model=path, dtype=torch.float32, **config)
    )
    made.set_progress_bar_config(disable=True)
    return made


def run_trajectory(path: str, images: int, config: dict[str, Any]) -> tuple[torch.Tensor, str]:
    """Final latents and, with images, the digest of what the DiT was told of them."""
    pipeline = make_pipeline(path, **config)
    parameters = OmniDiffusionSamplingParams(guidance_scale_provided=True, guidance_scale_2_provided=True, **SETTINGS)
    prompt = {"prompt": PROMPT, "negative_prompt": NEGATIVE_PROMPT, "multi_modal_data": media(images)}
    request = pipeline.resolve(prompt, parameters)
    trajectory = pipeline.encode(request)
    digest = ""
    if images:
        trajectory.condition = pipeline.encode_images(prompt, request)
        digest = tensor_digest(trajectory.condition.latents)
    return pipeline.diffuse(pipeline.prepare_latents(request), trajectory), digest


def forward_with_first_frame(path: str, latent_shape: tuple[int, ...], sequence_parallel: bool) -> torch.Tensor:
    """One forward whose first latent frame has timestep 0."""
    checkpoint = WanCheckpoint(Path(path))
    model = load_transformer(checkpoint, "transformer", dtype=torch.float32, sequence_parallel=sequence_parallel)
    latents, text = first_frame_inputs(latent_shape, model.config.text_dim)
    return model(latents, torch.tensor([700.0]), text, first_frame_timestep=torch.tensor([0.0])).sample


def traced_with_first_frame(path: str, latent_shape: tuple[int, ...]) -> tuple[bool, list[str]]:
    """Whether a compiled forward gives the eager one's values, and the code of its graphs."""
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph.code)
        return graph.forward

    model = load_transformer(WanCheckpoint(Path(path)), "transformer", dtype=torch.float32)
    inputs = first_frame_inputs(latent_shape, model.config.text_dim)
    arguments = (inputs[0], torch.tensor([700.0]), inputs[1])
    first = torch.tensor([0.0])
    eager = model(*arguments, first_frame_timestep=first).sample
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
    return torch.allclose(compiled(*arguments, first_frame_timestep=first).sample, eager, 1e-4, 1e-5), graphs


def first_frame_inputs(latent_shape: tuple[int, ...], text_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(latent_shape, generator=generator), torch.randn(1, 6, text_dim, generator=generator)


def forward_with_image_embeds(path: str, expert: str) -> torch.Tensor:
    """One forward with CLIP's embeddings of two images."""
    model = load_transformer(WanCheckpoint(Path(path)), expert, dtype=torch.float32)  # type: ignore[arg-type]
    return model(**image_embeds_inputs(model.config)).sample


def image_embeds_inputs(config: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    images = 1 if config.pos_embed_seq_len is None else 2
    return {
        "hidden_states": torch.randn(1, config.in_channels, 3, 6, 8, generator=generator),
        "timestep": torch.tensor([873.0]),
        # diffusers takes what precedes the last 512 rows of its context for the image's.
        "encoder_hidden_states": torch.randn(1, 512, config.text_dim, generator=generator),
        "encoder_hidden_states_image": torch.randn(images, 5, config.image_dim, generator=generator),
    }


def on_topology(pool: RankPool | None, topology: Topology, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(*arguments)` here for one rank, or on every rank of a pool of as many as the topology has."""
    if topology.world_size == 1:
        return [function(*arguments)]
    assert pool is not None
    return pool.run(_with_topology, topology, function, arguments)


def _with_topology(topology: Topology, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    initialize_parallel(topology)
    try:
        with torch.no_grad():
            return function(*arguments)
    finally:
        destroy_parallel()  # other tests use the pool with other topologies
