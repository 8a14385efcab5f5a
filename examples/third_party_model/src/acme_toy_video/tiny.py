# SPDX-License-Identifier: Apache-2.0
"""A tiny checkpoint in diffusers' layout, with random weights.

`python -m acme_toy_video.tiny FOLDER` writes one.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from omni_neuron_parallel import AxisGroup
from safetensors.torch import save_file
from vllm_omni_neuron.sdk import ShardedComponent, ascii_tokenizer, write_model_index

from .spec import SPEC
from .text_encoder import TEXT_ENCODER
from .transformer import TRANSFORMER
from .vae import VAE


def make_tiny_checkpoint(folder: str | Path, seed: int = 0) -> Path:
    """Write a checkpoint to `folder`, which is made if missing; returns the folder."""
    path, generator = Path(folder), torch.Generator().manual_seed(seed)
    for component in (TEXT_ENCODER, TRANSFORMER, VAE):
        _save(path / component.name, component, generator)
    ascii_tokenizer("t5").save_pretrained(path / "tokenizer")
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(path / "scheduler")
    write_model_index(
        path,
        SPEC.architecture,
        {
            "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
            "text_encoder": ("acme_toy_video", "TextEncoder"),
            "tokenizer": ("transformers", "T5TokenizerFast"),
            "transformer": ("acme_toy_video", "Transformer"),
            "vae": ("acme_toy_video", "Vae"),
        },
    )
    return path


def _save(folder: Path, component: ShardedComponent[Any, Any], generator: torch.Generator) -> None:
    """Random weights for every key that the mapping names, of a size that keeps activations near 1."""
    config = component.config_class()
    module, mapping = component.make(config)(AxisGroup("tp")), component.mapping(config)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters():
        whole = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1 and "embedding" not in name:
            whole *= parameter[0].numel() ** -0.5
        elif "norm" in name:
            whole = 1 + 0.1 * whole
        elif name.endswith("bias"):
            whole *= 0.1
        keys = mapping[name]
        keys = [keys] if isinstance(keys, str) else keys
        tensors |= {key: part.contiguous() for key, part in zip(keys, whole.chunk(len(keys)), strict=True)}
    save_file(tensors, str(folder / "diffusion_pytorch_model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")


if __name__ == "__main__":
    make_tiny_checkpoint(sys.argv[1])
