# SPDX-License-Identifier: Apache-2.0
"""The toy in plain torch, on one rank, and the kit's class for it. The faulty toys' classes inherit from that."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from conformance_toy import SPEC, ToyConfig, ToyPipeline, ToyTransformer, make_checkpoint, transformer_mapping
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors.torch import load_file
from torch import nn

from omni_neuron_testkit.conformance import KitRequest, ModelConformance, Published, ReferenceRun


class PlainBlock(nn.Module):
    def __init__(self, config: ToyConfig):
        super().__init__()
        hidden = config.hidden
        self.modulation = nn.Linear(hidden, 3 * hidden)
        self.attention = nn.ModuleDict(
            {
                **{f"to_{part}": nn.Linear(hidden, hidden) for part in "qkv"},
                **{f"text_{part}": nn.Linear(config.text_width, hidden) for part in "kv"},
                "out": nn.Linear(hidden, hidden),
            }
        )
        self.up, self.down = nn.Linear(hidden, config.inner), nn.Linear(config.inner, hidden)


class PlainTransformer(nn.Module):
    def __init__(self, config: ToyConfig):
        super().__init__()
        self.config, pixels = config, config.channels * config.patch**2
        self.patch_in, self.patch_out = nn.Linear(pixels, config.hidden), nn.Linear(config.hidden, pixels)
        self.time_in = nn.Linear(config.hidden, config.hidden)
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.layers))

    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        config, dtype = self.config, self.patch_in.weight.dtype
        size = config.patch
        hidden = self.patch_in(F.unfold(latents.to(dtype), size, stride=size).transpose(1, 2))
        tokens = hidden.shape[1]
        angle = timestep[:, None] / 10000 ** (torch.arange(config.hidden // 2) / (config.hidden // 2))
        time = F.silu(self.time_in(torch.cat([angle.cos(), angle.sin()], 1).to(dtype)))
        turn = torch.arange(tokens)[:, None] / 10000 ** (torch.arange(config.head_dim // 2) / (config.head_dim // 2))
        phase = torch.polar(torch.ones_like(turn), turn)[None, :, None]
        allowed = torch.cat([torch.ones(1, tokens, dtype=torch.bool), mask], 1)[:, None, None]
        for block in self.blocks:
            part = block.attention
            shift, scale, gate = block.modulation(time)[:, None].chunk(3, -1)
            rows = F.layer_norm(hidden, hidden.shape[-1:]) * (1 + scale) + shift
            heads = {name: part[name](rows).unflatten(2, (config.num_heads, -1)) for name in ("to_q", "to_k", "to_v")}
            joint = {name: part[name](text).unflatten(2, (config.num_heads, -1)) for name in ("text_k", "text_v")}
            query, key = (_turned(heads[name], phase) for name in ("to_q", "to_k"))
            key, value = torch.cat([key, joint["text_k"]], 1), torch.cat([heads["to_v"], joint["text_v"]], 1)
            attended = F.scaled_dot_product_attention(
                *(tensor.transpose(1, 2) for tensor in (query, key, value)), attn_mask=allowed
            )
            hidden = hidden + gate * part["out"](attended.transpose(1, 2).flatten(2))
            hidden = hidden + block.down(F.gelu(block.up(F.layer_norm(hidden, hidden.shape[-1:]))))
        return F.fold(self.patch_out(hidden).transpose(1, 2), latents.shape[-2:], size, stride=size)


def _turned(tensor: torch.Tensor, phase: torch.Tensor) -> torch.Tensor:
    turned = torch.complex(*tensor.float().chunk(2, -1)) * phase
    return torch.cat([turned.real, turned.imag], -1).to(tensor.dtype)


@torch.no_grad()
def reference(folder: Path, request: KitRequest, dtype: torch.dtype) -> ReferenceRun:
    config = ToyConfig.from_file(folder / "transformer" / "config.json")
    model = PlainTransformer(config)
    weights = {
        name: load_file(folder / name / "diffusion_pytorch_model.safetensors")
        for name in ("transformer", "text_encoder")
    }
    model.load_state_dict(weights["transformer"])
    model, encoder = model.to(dtype), {name: value.to(dtype) for name, value in weights["text_encoder"].items()}
    texts = []
    for prompt in (request.prompt, request.negative_prompt):
        codes = torch.tensor([[ord(character) for character in prompt.ljust(24, "\0")[:24]]])
        rows = F.linear(F.embedding(codes, encoder["table"]), encoder["out.weight"], encoder["out.bias"])
        texts.append((rows, codes > 0))
    shape = (1, config.channels, request.height // 8, request.width // 8)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(request.seed))
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler")
    scheduler.set_timesteps(request.num_inference_steps)
    steps = []
    for timestep in scheduler.timesteps:
        positive, negative = (model(latents, timestep[None], *text).float() for text in texts)
        guided = negative + request.guidance_scale * (positive - negative)
        latents = scheduler.step(guided, timestep, latents).prev_sample
        steps.append(latents)
    return ReferenceRun(latents, steps)


class ToySuite(ModelConformance):
    spec = SPEC
    pipeline = ToyPipeline
    checkpoint = staticmethod(make_checkpoint)
    reference = staticmethod(reference)
    # 15 tokens: CP 2 needs a pad. The prompts are shorter than the text, which needs the mask.
    request = KitRequest(prompt="red circle", height=48, width=80, num_inference_steps=6, guidance_scale=3.0)
    not_supported: ClassVar[dict[str, str]] = {
        "sp": "the toy's tokens are not split over TP",
        "memory_plan": "there is no published toy",
        "output": "the toy's VAE is diffusers' own",
    }

    @staticmethod
    def published() -> dict[str, Published]:
        config = ToyConfig(num_heads=32, head_dim=128, layers=12, inner=16384)
        with torch.device("meta"):
            module, plain = ToyTransformer(config), PlainTransformer(config)
        shapes = {key: tuple(value.shape) for key, value in plain.state_dict().items()}
        return {"transformer": Published(module, transformer_mapping(config), shapes)}
