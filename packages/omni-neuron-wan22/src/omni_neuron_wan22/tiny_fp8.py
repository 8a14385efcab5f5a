# SPDX-License-Identifier: Apache-2.0
"""Scaled FP8 checkpoints in ComfyUI's layout, made from a checkpoint in diffusers' layout: for tests and trials.

`python -m omni_neuron_wan22.tiny_fp8 CHECKPOINT FOLDER` writes a file for each expert.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file

from omni_neuron_runtime import SafetensorsCheckpoint
from omni_neuron_wan22.checkpoint import Expert, WanCheckpoint
from omni_neuron_wan22.comfyui import FP8
from omni_neuron_wan22.original_names import linear_weights, original_wan_names

LARGEST = torch.finfo(FP8).max


def make_scaled_fp8_checkpoint(
    checkpoint: str | Path, folder: str | Path, *, prefix: str = "", blocks_only: bool = False, scale_input: bool = True
) -> Path:
    """Quantise every expert of a checkpoint, whose tensors are held in memory meanwhile.

    A linear layer's weight becomes `(weight / scale)` in E4M3FN with scale = largest magnitude / 448; other tensors
    become float16.

    Args:
        checkpoint: in diffusers' layout.
        folder: made if missing.
        prefix: of all keys, "" or "model.diffusion_model.".
        blocks_only: leave the linear layers of embeddings and output in float16, as some published files do.
        scale_input: write factors of inputs, too; as the documented checkpoint has them.

    Returns:
        The folder.
    """
    source, target = WanCheckpoint(Path(checkpoint)), Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for expert in source.experts:
        tensors = _quantised(source, expert, blocks_only, scale_input)
        config = source.transformer_config(expert)
        task = "t2v" if config.in_channels == config.out_channels else "i2v"
        noise = "high" if expert == "transformer" else "low"
        file = target / f"wan2.2_{task}_{noise}_noise_fp8_scaled.safetensors"
        save_file({prefix + key: tensor for key, tensor in tensors.items()}, file)
    return target


def _quantised(source: WanCheckpoint, expert: Expert, blocks_only: bool, scale_input: bool) -> dict[str, torch.Tensor]:
    config, files = source.transformer_config(expert), SafetensorsCheckpoint(source.path / expert)
    names, linears = original_wan_names(config), set(linear_weights(config))
    tensors = {"scaled_fp8": torch.empty(0, dtype=FP8)}
    for key, tensor in files.read(names).items():
        name = names[key]
        if key not in linears or (blocks_only and not key.startswith("blocks.")):
            tensors[name] = tensor.to(torch.float16)
            continue
        scale = tensor.float().abs().max() / LARGEST
        tensors[name] = (tensor.float() / scale).to(FP8)
        layer = name.removesuffix("weight")
        tensors[f"{layer}scale_weight"] = scale
        if scale_input:
            tensors[f"{layer}scale_input"] = torch.tensor(1.0)
    return tensors


def main() -> None:
    """`python -m omni_neuron_wan22.tiny_fp8 CHECKPOINT FOLDER`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    make_scaled_fp8_checkpoint(arguments.checkpoint, arguments.folder)


if __name__ == "__main__":
    main()
