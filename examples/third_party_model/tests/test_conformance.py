# SPDX-License-Identifier: Apache-2.0
"""The conformance kit on this model, and the same model in plain torch for it to compare with.

A model that diffusers has needs no code here: `reference_pipeline` names its pipeline.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler
from omni_neuron_testkit.conformance import KitRequest, ModelConformance, Published, ReferenceRun
from safetensors.torch import load_file
from torch import nn
from transformers import AutoTokenizer

from acme_toy_video.config import TextEncoderConfig, TransformerConfig
from acme_toy_video.tiny import make_tiny_checkpoint
from acme_toy_video.transformer import TRANSFORMER

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def waves(values: torch.Tensor, width: int) -> torch.Tensor:
    steps = torch.arange(width // 2) / (width // 2)
    angles = values.float()[:, None] * 10000.0**-steps
    return torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)


class ReferenceTextEncoder(nn.Module):
    def __init__(self, config: TextEncoderConfig):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.up = nn.Linear(config.width, config.inner)
        self.down = nn.Linear(config.inner, config.width)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows = self.embedding(token_ids)
        rows = rows + waves(torch.arange(rows.shape[1]), rows.shape[2]).to(rows.dtype)
        return rows + self.down(F.gelu(self.up(rows)))


class ReferenceAttention(nn.Module):
    def __init__(self, config: TransformerConfig):
        super().__init__()
        width, self.heads = config.hidden, config.num_heads
        self.to_q, self.to_k, self.to_v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.text_k, self.text_v = (nn.Linear(config.text_width, width) for _ in range(2))
        self.norm_q, self.norm_k = (nn.RMSNorm(width, eps=config.eps) for _ in range(2))

    def forward(self, hidden: torch.Tensor, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        keys = torch.cat([self.norm_k(self.to_k(hidden)), self.norm_k(self.text_k(text))], dim=1)
        values = torch.cat([self.to_v(hidden), self.text_v(text)], dim=1)
        query, key, value = (
            rows.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for rows in (self.norm_q(self.to_q(hidden)), keys, values)
        )
        allowed = torch.cat([torch.ones(1, hidden.shape[1], dtype=torch.bool), mask], dim=1)[:, None, None, :]
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        return self.out(attended.transpose(1, 2).flatten(2))


class ReferenceBlock(nn.Module):
    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.modulation = nn.Linear(config.hidden, 6 * config.hidden)
        self.attention = ReferenceAttention(config)
        self.up, self.down = nn.Linear(config.hidden, config.inner), nn.Linear(config.inner, config.hidden)

    def forward(self, hidden: torch.Tensor, time: torch.Tensor, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        parts = self.modulation(time)[:, None].chunk(6, dim=-1)
        hidden = hidden + parts[2] * self.attention(modulated(hidden, *parts[:2]), text, mask)
        return hidden + parts[5] * self.down(F.gelu(self.up(modulated(hidden, *parts[3:5]))))


class ReferenceTransformer(nn.Module):
    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config, pixels = config, config.channels * config.patch**2
        self.patch_in, self.patch_out = nn.Linear(pixels, config.hidden), nn.Linear(config.hidden, pixels)
        self.time_in = nn.Linear(config.hidden, config.hidden)
        self.blocks = nn.ModuleList(ReferenceBlock(config) for _ in range(config.num_layers))
        self.modulation_out = nn.Linear(config.hidden, 2 * config.hidden)

    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        size, dtype = self.config.patch, self.patch_in.weight.dtype
        frames = latents[0].to(dtype).movedim(0, 1)  # a batch of pictures
        patches = F.unfold(frames, size, stride=size).transpose(1, 2)
        hidden = self.patch_in(patches.flatten(0, 1)[None])
        hidden = hidden + waves(torch.arange(hidden.shape[1]), hidden.shape[2]).to(dtype)
        time = F.silu(self.time_in(waves(timestep, hidden.shape[2]).to(dtype)))
        for block in self.blocks:
            hidden = block(hidden, time, text, mask)
        shift, scale = self.modulation_out(time)[:, None].chunk(2, dim=-1)
        patches = self.patch_out(modulated(hidden, shift, scale)).reshape(patches.shape).transpose(1, 2)
        return F.fold(patches, latents.shape[-2:], size, stride=size).movedim(0, 1)[None]


def modulated(hidden: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows = F.layer_norm(hidden.float(), hidden.shape[-1:], eps=1e-6)
    return (rows * (1 + scale.float()) + shift.float()).to(hidden.dtype)


def loaded(module: ModuleT, folder: Path, dtype: torch.dtype) -> ModuleT:
    module.load_state_dict(load_file(folder / "diffusion_pytorch_model.safetensors"))
    return module.to(dtype).eval()


@torch.no_grad()
def reference(folder: Path, request: KitRequest, dtype: torch.dtype) -> ReferenceRun:
    """The latents after each step."""
    text_config = TextEncoderConfig.from_file(folder / "text_encoder" / "config.json")
    config = TransformerConfig.from_file(folder / "transformer" / "config.json")
    text_encoder = loaded(ReferenceTextEncoder(text_config), folder / "text_encoder", dtype)
    transformer = loaded(ReferenceTransformer(config), folder / "transformer", dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", local_files_only=True)
    length = request.more.get("max_sequence_length", 32)
    texts = []
    for prompt in (request.prompt, request.negative_prompt):
        tokens = tokenizer(prompt, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        texts.append((text_encoder(tokens.input_ids), tokens.attention_mask.bool()))
    stride = json.loads((folder / "vae" / "config.json").read_text())["stride"]
    shape = (1, config.channels, request.num_frames or 1, request.height // stride, request.width // stride)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(request.seed))
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler")
    scheduler.set_timesteps(request.num_inference_steps)
    steps = []
    for timestep in scheduler.timesteps:
        positive, negative = (transformer(latents, timestep[None], *text).float() for text in texts)
        guided = negative + request.guidance_scale * (positive - negative)
        latents = scheduler.step(guided, timestep, latents).prev_sample
        steps.append(latents)
    return ReferenceRun(latents, steps)


class TestAcmeToyVideo(ModelConformance):
    spec = "acme_toy_video.spec:SPEC"
    pipeline = "acme_toy_video.pipeline:AcmeToyVideoPipeline"
    checkpoint = staticmethod(make_tiny_checkpoint)
    reference = staticmethod(reference)
    request = KitRequest(height=32, width=48, num_frames=5)
    # Every test of the kit that is not named here runs. A reason is part of the report.
    not_supported: ClassVar[dict[str, str]] = {
        "vae_patch": "the decoder is too small to be shared",
        "memory_plan": "there is no published model to plan",
        "output": "the decoder in plain torch would be the same lines again",
    }

    @staticmethod
    def published() -> dict[str, Published]:
        """The DiT at the size of a real model; its keys and shapes are those of the model in plain torch."""
        config = TransformerConfig(num_heads=24, head_dim=128, num_layers=30, inner=12288)
        return {"transformer": Published.of(TRANSFORMER, lambda: ReferenceTransformer(config), config)}
