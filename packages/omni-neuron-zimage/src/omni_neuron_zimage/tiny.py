# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints in the real diffusers layout, with random weights: for tests and for trying things out.

`python -m omni_neuron_zimage.tiny FOLDER` writes one. An image of it is coloured noise; the layout, the key names, the
tokenizer and its chat template are those of Z-Image.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_omni_neuron.sdk import ascii_tokenizer, perturb_constants, save_components, write_model_index


@dataclass(frozen=True)
class TinyZImage:
    """Sizes of a tiny checkpoint; the defaults suit TP 1, 2, 3 and 6 and make 4 MB of float32.

    Attributes:
        n_heads, n_layers, n_refiner_layers: of the transformer, whose heads have 16 channels.
        text_dim, text_layers: of the Qwen3 encoder.
        dynamic_shifting: the scheduler shifts its timesteps by the image's size; published checkpoints have a fixed
            shift of 3 instead, where this is false.
        seed: of the weights.
        dtype: of the weights on disk.
        max_shard_size: in diffusers' notation; small values give several files with an index, as large models have.
    """

    n_heads: int = 6
    n_layers: int = 2
    n_refiner_layers: int = 1
    text_dim: int = 64
    text_layers: int = 3
    dynamic_shifting: bool = True
    seed: int = 0
    dtype: torch.dtype = torch.float32
    max_shard_size: str = "10GB"


def make_tiny_checkpoint(folder: str | Path, sizes: TinyZImage | None = None) -> Path:
    """Write a checkpoint that diffusers' `ZImagePipeline.from_pretrained`, vLLM-Omni and this package load.

    Args:
        folder: made if missing; an existing checkpoint in it is overwritten.
        sizes: see `TinyZImage`.

    Returns:
        The folder.
    """
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImageTransformer2DModel
    from transformers import Qwen3Config, Qwen3Model

    sizes = sizes or TinyZImage()
    tokenizer = ascii_tokenizer("qwen2")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sizes.seed)
        text_config = Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=sizes.text_dim,
            intermediate_size=2 * sizes.text_dim,
            num_hidden_layers=sizes.text_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=1024,
        )
        components = {
            "text_encoder": Qwen3Model(text_config),
            "transformer": ZImageTransformer2DModel(
                dim=16 * sizes.n_heads,
                n_layers=sizes.n_layers,
                n_refiner_layers=sizes.n_refiner_layers,
                n_heads=sizes.n_heads,
                n_kv_heads=sizes.n_heads,
                cap_feat_dim=sizes.text_dim,
                axes_dims=[4, 6, 6],
                axes_lens=[1024, 64, 64],
            ),
            "vae": AutoencoderKL(
                down_block_types=("DownEncoderBlock2D",) * 4,
                up_block_types=("UpDecoderBlock2D",) * 4,
                block_out_channels=(8, 8, 16, 16),
                layers_per_block=1,
                latent_channels=16,
                norm_num_groups=4,
                scaling_factor=0.3611,
                shift_factor=0.1159,
                use_quant_conv=False,
                use_post_quant_conv=False,
            ),
        }
        for model in components.values():
            perturb_constants(model)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=sizes.dynamic_shifting)
    models = {**components, "scheduler": scheduler, "tokenizer": tokenizer}
    save_components(folder, models, dtype=sizes.dtype, max_shard_size=sizes.max_shard_size)
    libraries = {"text_encoder": "transformers", "tokenizer": "transformers"}
    entries = {name: (libraries.get(name, "diffusers"), type(part).__name__) for name, part in models.items()}
    write_model_index(folder, "ZImagePipeline", entries)
    return Path(folder)


def main() -> None:
    """`python -m omni_neuron_zimage.tiny FOLDER [--seed N]`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_tiny_checkpoint(arguments.folder, TinyZImage(seed=arguments.seed))


if __name__ == "__main__":
    main()
