# SPDX-License-Identifier: Apache-2.0
"""The transformer on the ranks of a pool. Importable by spawned processes; imports no vLLM."""

from __future__ import annotations

from pathlib import Path

import torch

from omni_neuron_parallel import ContextMethod, Topology, destroy_parallel, initialize_parallel
from omni_neuron_zimage.mapping import TRANSFORMER
from omni_neuron_zimage.transformer import ZImageTransformer2DModel
from vllm_omni_neuron.sdk import DiffusersCheckpoint

LATENTS = (12, 20)  # 60 tokens, padded to 64
CAPTION, ROWS = 37, 96  # padded to 64, of 96 rows


def inputs(text_dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latents `[1, C, H, W]`, a timestep `[1]`, and the encoded text `[1, CAPTION, text_dim]`."""
    generator = torch.Generator().manual_seed(3)
    latents = torch.randn(1, 16, *LATENTS, generator=generator)
    return latents, torch.tensor([0.3]), torch.randn(1, CAPTION, text_dim, generator=generator)


def load(path: str, *, sequence_parallel: bool = False, method: ContextMethod = "auto") -> ZImageTransformer2DModel:
    checkpoint = DiffusersCheckpoint(Path(path))
    return TRANSFORMER.load(checkpoint, dtype=torch.float32, sequence_parallel=sequence_parallel, context_method=method)


@torch.no_grad()
def predict(model: ZImageTransformer2DModel, rows: int = ROWS) -> torch.Tensor:
    latents, timestep, text = inputs(model.config.cap_feat_dim)
    features = torch.full((1, rows, text.shape[2]), 7.0)  # behind the text stands what must not count
    features[:, : text.shape[1]] = text
    caption = model.refine_caption(features, torch.tensor([text.shape[1]]))
    return model(latents, timestep, caption)


def forward(path: str, topology: Topology, sequence_parallel: bool, method: ContextMethod) -> torch.Tensor:
    """One prediction over `topology`, which takes all ranks of the pool."""
    initialize_parallel(topology)
    try:
        return predict(load(path, sequence_parallel=sequence_parallel, method=method))
    finally:
        destroy_parallel()
