# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints in the real diffusers layout, with random weights: for tests, benchmarks and the demo.

`python -m omni_neuron_wan22.tiny FOLDER [--task i2v]` writes one. The weights mean nothing (a video of it is coloured
noise); the layout, the key names, the experts and the tokenizer are those of Wan2.2 T2V-A14B, I2V-A14B or TI2V-5B.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from torch import nn

from omni_neuron_wan22.checkpoint import Task

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
        if sizes.image_dim is not None:
            models["image_encoder"] = _image_encoder(path, sizes.image_dim)
        for component, model in models.items():
            if component != "image_encoder":
                _perturb_constants(model)
            if sizes.dtype != torch.float32:
                model.to(sizes.dtype)
            model.save_pretrained(path / component, max_shard_size=sizes.max_shard_size)  # type: ignore[operator]

    UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=sizes.flow_shift
    ).save_pretrained(path / "scheduler")
    boundaries: dict[Task, float | None] = {"t2v": 0.875, "i2v": 0.9, "ti2v": None}
    index: dict[str, object] = {
        "_class_name": "WanImageToVideoPipeline" if sizes.task == "i2v" else "WanPipeline",
        "_diffusers_version": "0.40.0",
        "boundary_ratio": boundaries[sizes.task] if sizes.boundary_ratio is None else sizes.boundary_ratio,
        "expand_timesteps": sizes.task == "ti2v",
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": ["diffusers", "WanTransformer3DModel"] if len(experts) == 2 else [None, None],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    if sizes.task == "i2v":
        with_clip = sizes.image_dim is not None
        index["image_encoder"] = ["transformers", "CLIPVisionModel"] if with_clip else [None, None]
        index["image_processor"] = ["transformers", "CLIPImageProcessor"] if with_clip else [None, None]
    (path / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    return path


def _image_encoder(path: Path, width: int) -> nn.Module:
    """CLIP's vision model, of two layers, and its image processor, written to `path`."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    side = {"height": CLIP_PIXELS, "width": CLIP_PIXELS}
    processor = CLIPImageProcessor(size={"shortest_edge": CLIP_PIXELS}, crop_size=side)
    processor.save_pretrained(path / "image_processor")
    return CLIPVisionModel(
        CLIPVisionConfig(
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=CLIP_PIXELS,
            patch_size=CLIP_PIXELS // 2,
        )
    )


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
    """`python -m omni_neuron_wan22.tiny FOLDER [--task TASK] [--seed N]`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", choices=get_args(Task), default="t2v")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_tiny_checkpoint(arguments.folder, TinyWan(task=arguments.task, seed=arguments.seed))


if __name__ == "__main__":
    main()
