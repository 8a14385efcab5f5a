# SPDX-License-Identifier: Apache-2.0
"""The two experts: diffusers' `WanTransformer3DModel`, each trained on its own share of the noise levels only.

The high-noise expert never sees a noise level below the boundary and the low-noise one none above it, from different
initial weights: exchanged, each would have to work where it was never trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention
from torch import nn

from .budget import BOUNDARY_RATIO, FLOW_SHIFT, MAX_TEXT_LENGTH, Budget
from .loop import generators

EMPTY_SHARE = 0.12  # of the captions that name nothing, for guidance
GUIDANCE_UP_TO = 5.0  # the largest scale that a guided prediction is trained with
CONDITION_MASK_CHANNELS = 4  # of image-to-video: one a frame of the four that make a latent frame


def make_expert(budget: Budget, *, condition_channels: int = 0) -> WanTransformer3DModel:
    """A fresh expert whose cross-attention does not drown in padding.

    Args:
        budget: sizes.
        condition_channels: input channels beside the latents; 4 + z for image-to-video.
    """
    expert = WanTransformer3DModel(
        num_attention_heads=budget.heads,
        attention_head_dim=budget.head_dim,
        in_channels=budget.z_dim + condition_channels,
        out_channels=budget.z_dim,
        text_dim=budget.text_dim,
        freq_dim=128,
        ffn_dim=budget.ffn_dim,
        num_layers=budget.layers,
        cross_attn_norm=True,
        rope_max_seq_len=256,
    )
    with torch.no_grad():
        embedder = expert.condition_embedder.text_embedder
        for linear in (embedder.linear_1, embedder.linear_2):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
        embedder.linear_2.weight.mul_(2)  # words' keys then owe little to the bias that they share with padding
        for block in expert.blocks:
            block.scale_shift_table[:, 2] = block.scale_shift_table[:, 5] = 0.3  # gates of attention and feed-forward
            attention = block.attn2
            # Padding embeds to zero, so its key is the bias alone; a query's bias against it makes its logit about
            # −9 from the start. Without, five hundred pads outweigh ten words and the text is ignored for long.
            direction = torch.randn(attention.to_k.bias.shape).sign()
            attention.to_k.bias.copy_(0.1 * direction)
            attention.to_q.bias.copy_(-0.6 * direction)
            attention.norm_q.weight.fill_(1.5)
            attention.norm_k.weight.fill_(1.5)
    return expert


@dataclass(frozen=True)
class Share:
    """An expert's share of the noise levels, as the uniform variable before the flow shift."""

    stage: str
    low: float
    high: float


def shares() -> tuple[Share, Share]:
    """High-noise and low-noise share, split at `BOUNDARY_RATIO`."""
    boundary = BOUNDARY_RATIO / (FLOW_SHIFT - (FLOW_SHIFT - 1) * BOUNDARY_RATIO)
    return Share("high", boundary, 1.0), Share("low", 0.02, boundary)


def shifted(uniform: torch.Tensor) -> torch.Tensor:
    """Noise level of the flow's schedule: s·u / (1 + (s − 1)·u)."""
    return FLOW_SHIFT * uniform / (1 + (FLOW_SHIFT - 1) * uniform)


class PaddedCrossAttention:
    """Cross-attention over a prompt and one key that stands for all further padding.

    Padding is zeros, so all its keys are equal: n of them weigh as much as one whose logit is larger by log n. Exactly
    what diffusers computes over the whole length, at a fortieth of the keys.
    """

    def __init__(self) -> None:
        self.padding = 1

    def __call__(  # noqa: D102  # the class says what it computes
        self,
        attention: WanAttention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: object = None,
    ) -> torch.Tensor:
        heads = (attention.heads, -1)
        query = attention.norm_q(attention.to_q(hidden_states)).unflatten(2, heads).transpose(1, 2)
        key = attention.norm_k(attention.to_k(encoder_hidden_states)).unflatten(2, heads).transpose(1, 2)
        value = attention.to_v(encoder_hidden_states).unflatten(2, heads).transpose(1, 2)
        bias = torch.zeros(key.shape[2], dtype=query.dtype)
        bias[-1] = math.log(self.padding)
        bias = bias.expand(query.shape[2], -1)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return attention.to_out[0](attended.transpose(1, 2).flatten(2))


def compress_padding(expert: WanTransformer3DModel) -> Callable[[torch.Tensor], torch.Tensor]:
    """Install `PaddedCrossAttention`.

    Returns:
        A function that makes its input: embeddings `[B, L, D]` get one zero token, which stands for the other
        `MAX_TEXT_LENGTH − L`.
    """
    processor = PaddedCrossAttention()
    for block in expert.blocks:
        block.attn2.set_processor(processor)

    def prepare(embeddings: torch.Tensor) -> torch.Tensor:
        processor.padding = MAX_TEXT_LENGTH - embeddings.shape[1]
        return F.pad(embeddings, (0, 0, 0, 1))

    return prepare


@dataclass(frozen=True)
class TrainingSet:
    """What the experts are trained on.

    Attributes:
        latents: `[N, z, T', H', W']`, normalised.
        subjects: `[N]`, index of each clip's subject.
        captions: `[subjects, variants, L, D]` embeddings.
        nothing: `[variants, L, D]` embeddings of captions that name nothing; the first is the empty one.
        conditions: `[N, z, T', H', W']`, normalised latents of each clip's first frame followed by grey, for
            image-to-video.
    """

    latents: torch.Tensor
    subjects: torch.Tensor
    captions: torch.Tensor
    nothing: torch.Tensor
    conditions: torch.Tensor | None


def expert_step(
    expert: WanTransformer3DModel, data: TrainingSet, share: Share, budget: Budget, stage: str, *, guided: bool
) -> Callable[[int], dict[str, torch.Tensor]]:
    """The step of an expert's `Loop`: error of the predicted velocity (noise − clip) at levels of its share.

    With conditions in the data, the expert is an image-to-video one and gets mask and condition.

    Args:
        expert: what is trained.
        data: clips and captions.
        share: the noise levels.
        budget: seed and batch size.
        stage: its name, for the generators.
        guided: train the guided prediction as well. Guidance of scale w multiplies the difference of the predictions
            with and without caption by w. Below the boundary the noisy clip itself tells the subject, so a small
            expert's difference is mostly its own error, and w times that makes paths wobble.
    """
    prepare = compress_padding(expert)
    empty_choices = len(data.nothing)

    def step(index: int) -> dict[str, torch.Tensor]:
        _, generator = generators(budget.seed, stage, index)
        batch = budget.guided_batch if guided else budget.expert_batch
        clips = torch.randint(len(data.latents), (batch,), generator=generator)
        latents = data.latents[clips]
        variants = torch.randint(data.captions.shape[1], (batch,), generator=generator)
        text = data.captions[data.subjects[clips], variants]
        empty = torch.rand(batch, generator=generator) < EMPTY_SHARE
        # Mostly the empty caption itself, which is what guidance compares with.
        others = torch.randint(4 * empty_choices, (batch,), generator=generator)
        others = torch.where(others < empty_choices, others, 0)
        text = torch.where(empty[:, None, None], data.nothing[others], text)
        strata = (torch.arange(batch) + torch.rand(batch, generator=generator)) / batch
        sigma = shifted(share.low + (share.high - share.low) * strata)
        noise = torch.randn(latents.shape, generator=generator)
        level = sigma[:, None, None, None, None]
        noisy = (1 - level) * latents + level * noise
        if data.conditions is not None:
            mask = torch.zeros(batch, CONDITION_MASK_CHANNELS, *latents.shape[2:])
            mask[:, :, 0] = 1
            noisy = torch.cat([noisy, mask, data.conditions[clips]], dim=1)
        timesteps = (1000 * sigma).long()
        target = noise - latents
        if not guided:
            [predicted] = expert(noisy, timesteps, prepare(text), return_dict=False)
            return {"loss": F.mse_loss(predicted, target)}
        texts = prepare(torch.cat([text, data.nothing[:1].expand(batch, -1, -1)]))
        [both] = expert(noisy.repeat(2, 1, 1, 1, 1), timesteps.repeat(2), texts, return_dict=False)
        conditional, unconditional = both.chunk(2)
        scale = 1 + (GUIDANCE_UP_TO - 1) * torch.rand(batch, 1, 1, 1, 1, generator=generator)
        guided_prediction = unconditional + scale * (conditional - unconditional)
        losses = [F.mse_loss(one, target) for one in (conditional, unconditional, guided_prediction)]
        return {"loss": torch.stack(losses).mean(), "conditional": losses[0], "guided": losses[2]}

    return step


def widen_for_conditions(expert: WanTransformer3DModel, budget: Budget) -> WanTransformer3DModel:
    """An image-to-video expert that starts as `expert`: the new input channels have weights of zero."""
    channels = CONDITION_MASK_CHANNELS + budget.z_dim
    wide = make_expert(budget, condition_channels=channels)
    state = dict(expert.state_dict())
    weight = state["patch_embedding.weight"]
    state["patch_embedding.weight"] = F.pad(weight, (0, 0, 0, 0, 0, 0, 0, channels))
    wide.load_state_dict(state)
    return wide
