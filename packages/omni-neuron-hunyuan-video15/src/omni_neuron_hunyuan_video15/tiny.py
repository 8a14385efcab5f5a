# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints in the real diffusers layout, with random weights: for tests and for trying the package.

`python -m omni_neuron_hunyuan_video15.tiny FOLDER` writes one. The weights mean nothing; the layout, the key names, the
tokenizers and the guider are those of HunyuanVideo-1.5.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_omni_neuron.sdk import ascii_tokenizer, perturb_constants


@dataclass(frozen=True)
class TinyHunyuanVideo15:
    """Sizes of a tiny checkpoint; the defaults suit TP 1, 2 and 4 and make 20 MB of float32.

    Attributes:
        num_attention_heads, attention_head_dim, rope_axes_dim, num_layers, num_refiner_layers: of the DiT.
        latent_channels, vae_channels: of the VAE; the second from the pixel side to the latent side.
        text_dim, text_layers: of the language model.
        glyph_dim: of ByT5.
        guidance_scale: written into the guider's configuration.
        flow_shift: written into the scheduler's configuration.
        seed: of the weights.
        dtype: of the weights on disk.
        max_shard_size: in diffusers' notation; small values give sharded index files, as the real checkpoint has.
    """

    num_attention_heads: int = 4
    attention_head_dim: int = 16
    rope_axes_dim: tuple[int, int, int] = (4, 6, 6)
    num_layers: int = 2
    num_refiner_layers: int = 2
    latent_channels: int = 4
    vae_channels: tuple[int, ...] = (8, 8, 16, 16, 16)
    text_dim: int = 32
    text_layers: int = 4
    glyph_dim: int = 32
    guidance_scale: float = 6.0
    flow_shift: float = 5.0
    seed: int = 0
    dtype: torch.dtype = torch.float32
    max_shard_size: str = "10GB"


def make_tiny_checkpoint(folder: str | Path, sizes: TinyHunyuanVideo15 | None = None) -> Path:
    """Write a checkpoint that diffusers' `HunyuanVideo15Pipeline.from_pretrained`, vLLM-Omni and this package load.

    Args:
        folder: made if missing; an existing checkpoint in it is overwritten.
        sizes: see `TinyHunyuanVideo15`.

    Returns:
        The folder.
    """
    from diffusers import (
        AutoencoderKLHunyuanVideo15,
        ClassifierFreeGuidance,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideo15Pipeline,
        HunyuanVideo15Transformer3DModel,
    )
    from transformers import ByT5Tokenizer, T5EncoderModel

    sizes = sizes or TinyHunyuanVideo15()
    tokenizer, tokenizer_2 = ascii_tokenizer("qwen2"), ByT5Tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sizes.seed)
        models = {
            "transformer": HunyuanVideo15Transformer3DModel(
                in_channels=2 * sizes.latent_channels + 1,
                out_channels=sizes.latent_channels,
                num_attention_heads=sizes.num_attention_heads,
                attention_head_dim=sizes.attention_head_dim,
                num_layers=sizes.num_layers,
                num_refiner_layers=sizes.num_refiner_layers,
                text_embed_dim=sizes.text_dim,
                text_embed_2_dim=sizes.glyph_dim,
                image_embed_dim=8,
                rope_axes_dim=sizes.rope_axes_dim,
                target_size=640,
                task_type="t2v",
            ),
            "vae": AutoencoderKLHunyuanVideo15(
                latent_channels=sizes.latent_channels, block_out_channels=sizes.vae_channels, layers_per_block=1
            ),
            "text_encoder": _language_model(sizes, len(tokenizer)),
            "text_encoder_2": T5EncoderModel(_byt5_config(sizes, len(tokenizer_2))),
        }
        for model in models.values():
            perturb_constants(model)
            model.to(sizes.dtype)
    pipeline = HunyuanVideo15Pipeline(
        **models,
        tokenizer=tokenizer,
        tokenizer_2=tokenizer_2,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=sizes.flow_shift),
        guider=ClassifierFreeGuidance(guidance_scale=sizes.guidance_scale),
    )
    pipeline.save_pretrained(folder, max_shard_size=sizes.max_shard_size)
    return Path(folder)


def _language_model(sizes: TinyHunyuanVideo15, vocabulary: int):  # type: ignore[no-untyped-def]
    """The text part of Qwen2.5-VL; its positions have three axes, which are one and the same for a text."""
    from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

    heads = 2
    pairs = sizes.text_dim // heads // 2
    sections = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    config = Qwen2_5_VLTextConfig(
        vocab_size=vocabulary,
        hidden_size=sizes.text_dim,
        intermediate_size=2 * sizes.text_dim,
        num_hidden_layers=sizes.text_layers,
        num_attention_heads=heads,
        num_key_value_heads=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections},
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen2_5_VLTextModel(config)


def _byt5_config(sizes: TinyHunyuanVideo15, vocabulary: int):  # type: ignore[no-untyped-def]
    from transformers import T5Config

    return T5Config(
        vocab_size=vocabulary,
        d_model=sizes.glyph_dim,
        d_kv=sizes.glyph_dim // 2,
        d_ff=2 * sizes.glyph_dim,
        num_layers=1,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
    )


def main() -> None:
    """`python -m omni_neuron_hunyuan_video15.tiny FOLDER [--seed N]`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_tiny_checkpoint(arguments.folder, TinyHunyuanVideo15(seed=arguments.seed))


if __name__ == "__main__":
    main()
