# SPDX-License-Identifier: Apache-2.0
"""A denoising run of the shapes checkpoint under TP 2, without vLLM, whose import takes long. Importable by ranks."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from omni_neuron_parallel import Topology, destroy_parallel, initialize_parallel
from omni_neuron_shapes import FLOW_SHIFT
from omni_neuron_wan22 import WanCheckpoint, load_transformer, make_scheduler

Text = tuple[torch.Tensor, torch.Tensor | None]
BOUNDARY = 875


def denoise(path: str, text: Text, negative: Text, guidance: float, steps: int, seeds: list[int]) -> torch.Tensor:
    """Final latents, from the noise of this rank's own seed."""
    rank = dist.get_rank()
    initialize_parallel(Topology(tp=len(seeds)))
    try:
        with torch.inference_mode():
            checkpoint = WanCheckpoint(Path(path))
            experts = [load_transformer(checkpoint, name, dtype=torch.float32) for name in checkpoint.experts]
            texts = [[expert.project_cross_attention_kv(*one) for one in (text, negative)] for expert in experts]
            latents = torch.randn(1, 8, 5, 8, 8, generator=torch.Generator().manual_seed(seeds[rank]))
            scheduler = make_scheduler("unipc", FLOW_SHIFT)
            scheduler.set_timesteps(steps)
            for timestep in scheduler.timesteps:
                index = int(timestep < BOUNDARY)
                positive, without = (
                    experts[index](latents, timestep.expand(1), cross_attention_kv_cache=cache).sample
                    for cache in texts[index]
                )
                prediction = without + guidance * (positive - without)
                latents = scheduler.step(prediction, timestep, latents).prev_sample
            return latents.clone()
    finally:
        destroy_parallel()
