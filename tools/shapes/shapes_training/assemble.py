# SPDX-License-Identifier: Apache-2.0
"""The finished stages as a diffusers folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import UniPCMultistepScheduler
from torch import nn

from .budget import BOUNDARY_RATIO, FLOW_SHIFT, Budget
from .dit import CONDITION_MASK_CHANNELS, make_expert
from .stages import T2V_EXPERTS, load_result, text_encoder
from .text import make_tokenizer
from .vae import make_vae


def write_checkpoint(
    budget: Budget,
    work: Path,
    folder: Path,
    *,
    image_to_video: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a checkpoint that diffusers' `WanPipeline` (or `WanImageToVideoPipeline`) loads.

    Args:
        budget: sizes of the networks.
        work: the work folder with the finished stages.
        folder: made if missing; files of an earlier checkpoint are overwritten.
        image_to_video: write the image-to-video sibling.
        dtype: of the weights on disk.
    """
    experts = {share: f"i2v-{share}" for share in T2V_EXPERTS} if image_to_video else T2V_EXPERTS
    encoded = load_result(work, "latents", "--write")
    vae = make_vae(budget)
    vae.load_state_dict(load_result(work, "decoder", "--write"))
    vae.register_to_config(latents_mean=encoded["mean"].tolist(), latents_std=encoded["std"].tolist())
    models: dict[str, nn.Module] = {
        "text_encoder": text_encoder(budget, load_result(work, "text", "--write")),
        "vae": vae,
    }
    channels = CONDITION_MASK_CHANNELS + budget.z_dim if image_to_video else 0
    for component, share in (("transformer", "high"), ("transformer_2", "low")):
        expert = make_expert(budget, condition_channels=channels)
        expert.load_state_dict(load_result(work, experts[share], "--write"))
        models[component] = expert
    folder.mkdir(parents=True, exist_ok=True)
    for component, model in models.items():
        model.to(dtype).save_pretrained(folder / component)  # type: ignore[operator]
    make_tokenizer().save_pretrained(folder / "tokenizer")
    UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=FLOW_SHIFT
    ).save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "WanImageToVideoPipeline" if image_to_video else "WanPipeline",
        "_diffusers_version": "0.40.0",
        "boundary_ratio": BOUNDARY_RATIO,
        "expand_timesteps": False,
        **({"image_encoder": [None, None], "image_processor": [None, None]} if image_to_video else {}),
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": ["diffusers", "WanTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
