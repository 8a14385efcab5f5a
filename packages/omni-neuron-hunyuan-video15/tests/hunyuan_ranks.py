# SPDX-License-Identifier: Apache-2.0
"""One forward of the DiT on a layout. Importable by spawned processes; imports no vLLM, which would cost each half a
minute of CPU time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from omni_neuron_hunyuan_video15.checkpoint import TRANSFORMER
from omni_neuron_parallel import AxisGroup, Topology, destroy_parallel, initialize_parallel
from vllm_omni_neuron.sdk import DiffusersCheckpoint

# 3·5·6 = 90 video tokens, which 4 ranks do not share evenly, nor two the shards of 4.
LATENT_SHAPE = (1, 9, 3, 5, 6)


def inputs(with_glyphs: bool) -> dict[str, torch.Tensor]:
    """The keywords of a forward of the default tiny checkpoint; padding of the texts holds large numbers."""
    generator = torch.Generator().manual_seed(1)
    text_mask, glyph_mask = torch.zeros(1, 12, dtype=torch.int64), torch.zeros(1, 6, dtype=torch.int64)
    text_mask[:, :7] = 1
    glyph_mask[:, : 4 if with_glyphs else 0] = 1
    text, glyphs = (torch.randn(1, mask.shape[1], 32, generator=generator) for mask in (text_mask, glyph_mask))
    text[:, 7:] *= 100.0
    return {
        "hidden_states": torch.randn(LATENT_SHAPE, generator=generator),
        "timestep": torch.tensor([431.5]),
        "encoder_hidden_states": text,
        "encoder_attention_mask": text_mask,
        "encoder_hidden_states_2": glyphs,
        "encoder_attention_mask_2": glyph_mask,
    }


def forward(path: str, with_glyphs: bool, topology: Topology | None = None, **options: Any) -> torch.Tensor:
    """The prediction on this rank; without a topology on one rank that no process group knows."""
    alone = {"group": AxisGroup("tp"), "context_group": AxisGroup("cp")} if topology is None else {}
    if topology is not None:
        initialize_parallel(topology)
    try:
        model = TRANSFORMER.load(DiffusersCheckpoint(Path(path)), dtype=torch.float32, **alone, **options)
        with torch.no_grad():
            return model(**inputs(with_glyphs)).sample
    finally:
        if topology is not None:
            destroy_parallel()


def forward_on(path: str, topology: Topology, options: dict[str, Any]) -> torch.Tensor:
    """`forward` on a rank of a pool."""
    return forward(path, True, topology, **options)
