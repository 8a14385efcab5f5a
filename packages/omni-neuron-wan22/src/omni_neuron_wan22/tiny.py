# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints in the real diffusers layout, with random weights: for tests, benchmarks and the demo.

`python -m omni_neuron_wan22.tiny FOLDER` writes one. The weights mean nothing (a video of it is coloured noise); the
layout, the key names, the two experts and the tokenizer are those of Wan2.2 T2V-A14B.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn


@dataclass(frozen=True)
class TinyWan:
    """Sizes of a tiny checkpoint; the defaults suit TP 1, 2 and 4 and make 4 MB of bfloat16.

    Attributes:
        num_attention_heads, attention_head_dim, num_layers, ffn_dim: of each DiT expert.
        z_dim: latent channels.
        text_dim, text_heads, text_layers, text_ffn_dim: of the UMT5 encoder.
        vae_base_dim: channels of the VAE at full resolution.
        boundary_ratio: written into the index.
        flow_shift: written into the scheduler's configuration, which diffusers reads and this package does not.
        experts: 2, or 1 for a checkpoint without `transformer_2`.
        seed: of the weights.
        dtype: of the weights on disk.
        max_shard_size: in diffusers' notation; small values give sharded index files, as A14B has.
    """

    num_attention_heads: int = 4
    attention_head_dim: int = 32
    num_layers: int = 2
    ffn_dim: int = 256
    z_dim: int = 16
    text_dim: int = 64
    text_heads: int = 4
    text_layers: int = 2
    text_ffn_dim: int = 128
    vae_base_dim: int = 16
    boundary_ratio: float = 0.875
    flow_shift: float = 5.0
    experts: int = 2
    seed: int = 0
    dtype: torch.dtype = torch.float32
    max_shard_size: str = "10GB"


def make_tiny_checkpoint(folder: str | Path, sizes: TinyWan | None = None) -> Path:
    """Write a checkpoint that diffusers' `WanPipeline.from_pretrained`, vLLM-Omni and this package load.

    Args:
        folder: made if missing; an existing checkpoint in it is overwritten.
        sizes: see `TinyWan`.

    Returns:
        The folder.
    """
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    sizes = sizes or TinyWan()
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(path / "tokenizer")

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sizes.seed)
        text_config = UMT5Config(
            vocab_size=len(tokenizer),
            d_model=sizes.text_dim,
            d_kv=sizes.text_dim // sizes.text_heads,
            d_ff=sizes.text_ffn_dim,
            num_layers=sizes.text_layers,
            num_heads=sizes.text_heads,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
            is_encoder_decoder=False,
            pad_token_id=0,
            eos_token_id=1,
        )
        models: dict[str, nn.Module] = {"text_encoder": UMT5EncoderModel(text_config)}
        for expert in ("transformer", "transformer_2")[: sizes.experts]:
            models[expert] = WanTransformer3DModel(
                num_attention_heads=sizes.num_attention_heads,
                attention_head_dim=sizes.attention_head_dim,
                in_channels=sizes.z_dim,
                out_channels=sizes.z_dim,
                text_dim=sizes.text_dim,
                freq_dim=64,
                ffn_dim=sizes.ffn_dim,
                num_layers=sizes.num_layers,
                cross_attn_norm=True,
                rope_max_seq_len=256,
            )
        generator = torch.Generator().manual_seed(sizes.seed)
        models["vae"] = AutoencoderKLWan(
            base_dim=sizes.vae_base_dim,
            z_dim=sizes.z_dim,
            num_res_blocks=1,
            latents_mean=(0.5 * torch.randn(sizes.z_dim, generator=generator)).tolist(),
            latents_std=(1.0 + torch.rand(sizes.z_dim, generator=generator)).tolist(),
        )
        for component, model in models.items():
            _perturb_constants(model)
            if sizes.dtype != torch.float32:
                model.to(sizes.dtype)
            model.save_pretrained(path / component, max_shard_size=sizes.max_shard_size)  # type: ignore[operator]

    UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=sizes.flow_shift
    ).save_pretrained(path / "scheduler")
    index = {
        "_class_name": "WanPipeline",
        "_diffusers_version": "0.40.0",
        "boundary_ratio": sizes.boundary_ratio,
        "expand_timesteps": False,
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": ["diffusers", "WanTransformer3DModel"] if sizes.experts == 2 else [None, None],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    (path / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    return path


def _perturb_constants(model: nn.Module) -> None:
    """Give norms' gains and biases random values: fresh ones are 1 and 0, which would hide a mixed-up mapping."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(0.1 * torch.randn_like(parameter))


def _tokenizer():  # type: ignore[no-untyped-def]  # transformers' classes are not typed
    """A tokenizer of T5's kind over ASCII characters, not trained; other characters become `<unk>`."""
    from transformers import T5Tokenizer

    characters = [chr(code) for code in range(33, 127)]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -4.0)]
    vocabulary += [(character, -6.0) for character in characters]
    vocabulary += [("▁" + character, -7.0) for character in characters]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0)


def main() -> None:
    """`python -m omni_neuron_wan22.tiny FOLDER [--seed N]`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_tiny_checkpoint(arguments.folder, TinyWan(seed=arguments.seed))


if __name__ == "__main__":
    main()
