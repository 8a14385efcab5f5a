# SPDX-License-Identifier: Apache-2.0
"""What the parity tests run on every rank, and the arithmetic they judge with. Importable by spawned processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from omni_neuron_parallel import RankPool, Topology, destroy_parallel, initialize_parallel, tensor_digest
from omni_neuron_wan22 import NeuronWanPipeline, WanCheckpoint, load_text_encoder, load_transformer


def relative_l2(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """‖actual − expected‖₂ / ‖expected‖₂ in float64."""
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm())


def on_ranks(pool: RankPool | None, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(*arguments)` here, or on every rank of `pool` with TP over all of them."""
    if pool is None:
        return [function(*arguments)]
    return pool.run(_with_tensor_parallel, pool.world_size, function, arguments)


def _with_tensor_parallel(size: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    initialize_parallel(Topology(tp=size))
    try:
        with torch.no_grad():
            return function(*arguments)
    finally:
        destroy_parallel()  # other tests use the pool with other topologies


def dit_inputs(seed: int = 0, text_dim: int = 64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(1, 16, 3, 6, 8, generator=generator),
        "timestep": torch.tensor([873.0]),
        "encoder_hidden_states": torch.randn(1, 32, text_dim, generator=generator),
    }


def run_transformer(path: str, expert: str, dtype: torch.dtype) -> torch.Tensor:
    model = load_transformer(WanCheckpoint(Path(path)), expert, dtype=dtype)  # type: ignore[arg-type]
    return model(**dit_inputs(), return_dict=False)[0]


def run_text_encoder(path: str, dtype: torch.dtype, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return load_text_encoder(WanCheckpoint(Path(path)), dtype=dtype)(ids, mask).last_hidden_state


PROMPT = "A red circle, moving right."
NEGATIVE_PROMPT = "blurry &amp; dark"


def make_pipeline(path: str, dtype: torch.dtype, **config: Any) -> NeuronWanPipeline:
    """The pipeline as a worker has it after loading, without an engine around it."""
    # The checks that an engine leaves off by default: every rank compares its latents with the others' after each step.
    os.environ["OMNI_NEURON_CHECK_RANK_AGREEMENT"] = "1"
    pipeline = NeuronWanPipeline(od_config=OmniDiffusionConfig(model=path, dtype=dtype, **config))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def run_trajectory(path: str, dtype: torch.dtype, settings: dict[str, Any]) -> tuple[torch.Tensor, str, dict[str, int]]:
    """Final latents, digest of the initial noise, and steps per expert."""
    pipeline = make_pipeline(path, dtype)
    parameters = OmniDiffusionSamplingParams(
        guidance_scale_provided=True, guidance_scale_2_provided="guidance_scale_2" in settings, **settings
    )
    request = pipeline.resolve({"prompt": PROMPT, "negative_prompt": NEGATIVE_PROMPT}, parameters)
    trajectory = pipeline.encode(request)
    noise = pipeline.prepare_latents(request)
    return pipeline.diffuse(noise, trajectory), tensor_digest(noise), trajectory.steps
