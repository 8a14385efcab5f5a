# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints in the real diffusers layout, with random weights: for tests, benchmarks and the demo.

`python -m omni_neuron_wan22.tiny FOLDER [--task i2v]` writes one. The weights mean nothing (a video of it is coloured
noise); the layout, the key names, the experts and the tokenizer are those of Wan2.2 T2V-A14B, I2V-A14B or TI2V-5B.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from omni_neuron_wan22.checkpoint import Task
from vllm_omni_neuron.sdk import ascii_tokenizer, perturb_constants, save_components, write_model_index

CLIP_PIXELS = 28
CLIP_TOKENS = 5  # four patches and the class
_VAE_2_2 = {
    "decoder_base_dim": 24,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
}


@dataclass(frozen=True)
class TinyWan:
    """Sizes of a tiny checkpoint; the defaults suit TP 1, 2 and 4 and make 4 MB of bfloat16.

    Attributes:
        num_attention_heads, attention_head_dim, num_layers, ffn_dim: of each DiT expert.
        z_dim: latent channels; None for the task's: 16 or 48.
        text_dim, text_heads, text_layers, text_ffn_dim: of the UMT5 encoder.
        vae_base_dim: channels of the VAE at full resolution.
        task: "t2v", "i2v", or "ti2v": one expert, VAE 2.2, a patch of 32 pixels.
        image_dim: width of CLIP's image embedding, as in Wan2.1's I2V; None, as in Wan2.2's, for none.
        last_image: such a DiT takes the embeddings of a first and a last frame (Wan2.1's FLF2V).
        boundary_ratio: written into the index; None for the task's: 0.875, 0.9 or none.
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
    z_dim: int | None = None
    text_dim: int = 64
    text_heads: int = 4
    text_layers: int = 2
    text_ffn_dim: int = 128
    vae_base_dim: int = 16
    task: Task = "t2v"
    image_dim: int | None = None
    last_image: bool = False
    boundary_ratio: float | None = None
    flow_shift: float = 5.0
    experts: int = 2
    seed: int = 0
    dtype: torch.dtype = torch.float32
    max_shard_size: str = "10GB"


def make_tiny_checkpoint(folder: str | Path, sizes: TinyWan | None = None) -> Path:
    """Write a checkpoint that diffusers' `WanPipeline.from_pretrained`, vLLM-Omni and this package load.

    An image-to-video checkpoint is one for `WanImageToVideoPipeline`.

    Args:
        folder: made if missing; an existing checkpoint in it is overwritten.
        sizes: see `TinyWan`.

    Returns:
        The folder.
    """
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    sizes = sizes or TinyWan()
    z_dim = sizes.z_dim or (48 if sizes.task == "ti2v" else 16)
    # Image-to-video: the noisy latents, a mask for the four frames of a latent one, the condition.
    in_channels = 2 * z_dim + 4 if sizes.task == "i2v" else z_dim
    experts = ("transformer", "transformer_2")[: 1 if sizes.task == "ti2v" else sizes.experts]
    width = sizes.num_attention_heads * sizes.attention_head_dim
    path = Path(folder)
    tokenizer = ascii_tokenizer("t5")
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
        for expert in experts:
            models[expert] = WanTransformer3DModel(
                num_attention_heads=sizes.num_attention_heads,
                attention_head_dim=sizes.attention_head_dim,
                in_channels=in_channels,
                out_channels=z_dim,
                text_dim=sizes.text_dim,
                freq_dim=64,
                ffn_dim=sizes.ffn_dim,
                num_layers=sizes.num_layers,
                cross_attn_norm=True,
                rope_max_seq_len=256,
                image_dim=sizes.image_dim,
                added_kv_proj_dim=None if sizes.image_dim is None else width,
                pos_embed_seq_len=2 * CLIP_TOKENS if sizes.last_image else None,
            )
        generator = torch.Generator().manual_seed(sizes.seed)
        models["vae"] = AutoencoderKLWan(
            base_dim=sizes.vae_base_dim,
            z_dim=z_dim,
            num_res_blocks=1,
            latents_mean=(0.5 * torch.randn(z_dim, generator=generator)).tolist(),
            latents_std=(1.0 + torch.rand(z_dim, generator=generator)).tolist(),
            **(_VAE_2_2 if sizes.task == "ti2v" else {}),
        )
        clip = {} if sizes.image_dim is None else _image_encoder(sizes.image_dim)
        for model in models.values():
            perturb_constants(model)

    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=sizes.flow_shift
    )
    save_components(
        path,
        {"tokenizer": tokenizer, "scheduler": scheduler, **models, **clip},
        dtype=sizes.dtype,
        max_shard_size=sizes.max_shard_size,
    )
    boundaries: dict[Task, float | None] = {"t2v": 0.875, "i2v": 0.9, "ti2v": None}
    components: dict[str, tuple[str, str] | None] = {
        "scheduler": ("diffusers", "UniPCMultistepScheduler"),
        "text_encoder": ("transformers", "UMT5EncoderModel"),
        "tokenizer": ("transformers", "T5TokenizerFast"),
        "transformer": ("diffusers", "WanTransformer3DModel"),
        "transformer_2": ("diffusers", "WanTransformer3DModel") if len(experts) == 2 else None,
        "vae": ("diffusers", "AutoencoderKLWan"),
    }
    if sizes.task == "i2v":
        components["image_encoder"] = ("transformers", "CLIPVisionModel") if clip else None
        components["image_processor"] = ("transformers", "CLIPImageProcessor") if clip else None
    write_model_index(
        path,
        "WanImageToVideoPipeline" if sizes.task == "i2v" else "WanPipeline",
        components,
        boundary_ratio=boundaries[sizes.task] if sizes.boundary_ratio is None else sizes.boundary_ratio,
        expand_timesteps=sizes.task == "ti2v",
    )
    return path


def _image_encoder(width: int) -> dict[str, Any]:
    """CLIP's vision model, of two layers, and its image processor."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    side = {"height": CLIP_PIXELS, "width": CLIP_PIXELS}
    processor = CLIPImageProcessor(size={"shortest_edge": CLIP_PIXELS}, crop_size=side)
    config = CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=CLIP_PIXELS,
        patch_size=CLIP_PIXELS // 2,
    )
    return {"image_encoder": CLIPVisionModel(config), "image_processor": processor}


def main() -> None:
    """`python -m omni_neuron_wan22.tiny FOLDER [--task TASK] [--seed N]`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", choices=get_args(Task), default="t2v")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_tiny_checkpoint(arguments.folder, TinyWan(task=arguments.task, seed=arguments.seed))


if __name__ == "__main__":
    main()
