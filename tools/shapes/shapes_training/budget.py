# SPDX-License-Identifier: Apache-2.0
"""Sizes of the networks and how long each stage trains: fixed step counts, never seconds."""

from __future__ import annotations

from dataclasses import dataclass

BOUNDARY_RATIO = 0.875
FLOW_SHIFT = 3.0
MAX_TEXT_LENGTH = 512


@dataclass(frozen=True)
class Budget:
    """Everything that decides what is trained and how long.

    Attributes:
        seed: of weights, data and noise.
        frames, height, width: of a clip in pixels.
        z_dim: latent channels.
        vae_base_dim: channels of the VAE at full resolution.
        heads, head_dim, layers, ffn_dim: of each DiT expert.
        text_dim, text_heads, text_layers, text_ffn_dim: of the UMT5 encoder.
        vae_crop_steps, vae_crop_batch: first part of the VAE's training, on crops of half height and width.
        vae_steps, vae_batch: second part, on whole clips.
        decoder_steps, decoder_batch: polishing of the decoder with a frozen encoder and noisy latents.
        copies: clips of each of the 72 subjects in the set that the experts are trained on.
        text_steps, text_batch: of the text encoder's pretraining.
        high_steps, low_steps, expert_batch: of the two experts.
        refine_low_steps, polish_low_steps: of the low-noise expert's second and third round.
        guided_batch: clips of a step that trains the guided prediction, each predicted with and without its caption.
        i2v_high_steps, i2v_low_steps: of the two image-to-video experts, which start from the text-to-video ones.
        vae_rate: learning rate of the VAE's matrices over the standard deviation of their initial values.
        expert_rate, refine_rate, polish_rate, i2v_rate, text_rate: peak learning rates.
    """

    seed: int = 0
    frames: int = 17
    height: int = 64
    width: int = 64
    z_dim: int = 8
    vae_base_dim: int = 16
    heads: int = 4
    head_dim: int = 32
    layers: int = 5
    ffn_dim: int = 384
    text_dim: int = 64
    text_heads: int = 4
    text_layers: int = 2
    text_ffn_dim: int = 128
    vae_crop_steps: int = 400
    vae_crop_batch: int = 4
    vae_steps: int = 100
    vae_batch: int = 2
    decoder_steps: int = 300
    decoder_batch: int = 2
    copies: int = 8
    text_steps: int = 400
    text_batch: int = 64
    high_steps: int = 1800
    low_steps: int = 1300
    expert_batch: int = 24
    refine_low_steps: int = 1000
    polish_low_steps: int = 1800
    guided_batch: int = 16
    i2v_high_steps: int = 600
    i2v_low_steps: int = 600
    vae_rate: float = 0.05
    expert_rate: float = 1.5e-3
    refine_rate: float = 1e-3
    polish_rate: float = 4e-4
    i2v_rate: float = 8e-4
    text_rate: float = 2e-3


FULL = Budget()

TOY = Budget(
    frames=5,
    height=16,
    width=16,
    vae_base_dim=4,
    layers=1,
    head_dim=12,
    ffn_dim=32,
    text_dim=16,
    text_layers=1,
    text_ffn_dim=32,
    vae_crop_steps=2,
    vae_crop_batch=1,
    vae_steps=3,
    vae_batch=1,
    decoder_steps=2,
    decoder_batch=1,
    copies=1,
    text_steps=3,
    text_batch=8,
    high_steps=4,
    low_steps=4,
    expert_batch=4,
    refine_low_steps=3,
    polish_low_steps=2,
    guided_batch=2,
    i2v_high_steps=2,
    i2v_low_steps=2,
)
"""A budget of seconds: every stage runs and nothing is learnt."""

BUDGETS = {"full": FULL, "toy": TOY}
