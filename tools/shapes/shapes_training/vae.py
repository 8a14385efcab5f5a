# SPDX-License-Identifier: Apache-2.0
"""The VAE: diffusers' `AutoencoderKLWan`, run over whole clips at once so that it can be trained.

diffusers encodes and decodes in chunks with a cache of features, and clamps what it decodes, which stops gradients.
`encode` and `decode` here compute the same numbers in one pass (a test compares them).
"""

from __future__ import annotations

import math
import types

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    WanAttentionBlock,
    WanResample,
    WanResidualBlock,
    WanRMS_norm,
)
from torch import nn

from omni_neuron_testkit import all_subjects, random_scenes, render

from .budget import Budget
from .loop import generators


def make_vae(budget: Budget) -> AutoencoderKLWan:
    """A fresh VAE with the layout of Wan2.2's (8 × 8 pixels and 4 frames a latent), small."""
    vae = AutoencoderKLWan(
        base_dim=budget.vae_base_dim,
        z_dim=budget.z_dim,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        attn_scales=[],
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * budget.z_dim,
        latents_std=[1.0] * budget.z_dim,
    )
    for module in vae.modules():
        if isinstance(module, WanRMS_norm):
            # F.normalize takes a sixth of a training step; this is the same up to its guard against zero.
            module.forward = types.MethodType(_fast_rms_norm, module)
    _initialise(vae)
    return vae


@torch.no_grad()
def _initialise(vae: AutoencoderKLWan) -> None:
    """Start as a plain scaling down and up of the three colour planes, beside random features.

    Residual branches start at zero, and the first three channels of every other convolution copy, average or repeat the
    first three of its input. So blurred colours come through from the first step. With torch's own initial values the
    network is 25 layers deep and predicts the ground alone for its first 250 steps.
    """
    planes = range(3)
    for module in vae.modules():
        if isinstance(module, (nn.Conv2d, nn.Conv3d)):
            nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
            nn.init.zeros_(module.bias)
            module.weight[:3] = 0
            for plane in planes:
                # Causal: the last of three taps in time is the present.
                module.weight[plane, plane].view(-1, *module.kernel_size[-2:])[-1].copy_(_middle(module.kernel_size))
    for module in vae.modules():
        if isinstance(module, WanResidualBlock):
            nn.init.zeros_(module.conv2.weight)
        elif isinstance(module, WanAttentionBlock):
            nn.init.zeros_(module.proj.weight)
        elif isinstance(module, WanResample):
            spatial = module.resample[1].weight
            for plane in planes:
                if module.mode.startswith("downsample"):
                    spatial[plane, plane] = torch.tensor([[0.25, 0.25, 0.0], [0.25, 0.25, 0.0], [0.0, 0.0, 0.0]])
                else:
                    smooth = torch.tensor([0.25, 0.5, 0.25])
                    spatial[plane, plane] = smooth[:, None] * smooth
                if module.mode == "downsample3d":
                    module.time_conv.weight[plane, plane, :, 0, 0] = torch.tensor([0.0, 0.5, 0.5])
                elif module.mode == "upsample3d":
                    second = module.dim + plane  # the second of the two frames that each becomes
                    module.time_conv.weight[second] = 0
                    module.time_conv.weight[second, plane, -1] = 1


def _middle(kernel_size: tuple[int, ...]) -> torch.Tensor:
    """A kernel over height and width with one in its middle."""
    kernel = torch.zeros(kernel_size[-2:])
    kernel[kernel_size[-2] // 2, kernel_size[-1] // 2] = 1
    return kernel


@torch.no_grad()
def calibrate_latents(vae: AutoencoderKLWan, clips: torch.Tensor) -> None:
    """Scale a fresh encoder's output so that latents of `clips` have mean 0 and spread 1, under noise of spread 0.1.

    Fresh, the latents are far smaller than their noise, and the decoder long learns nothing but the ground.
    """
    channels = vae.config.z_dim
    mean, _ = encode(vae, clips)
    centre, spread = mean.mean(dim=(0, 2, 3, 4)), mean.std(dim=(0, 2, 3, 4))
    weight, bias = vae.quant_conv.weight, vae.quant_conv.bias
    weight[:channels] /= spread.view(-1, 1, 1, 1, 1)
    bias[:channels] = (bias[:channels] - centre) / spread
    weight[channels:] = 0
    bias[channels:] = 2 * math.log(0.1)


def _fast_rms_norm(norm: WanRMS_norm, x: torch.Tensor) -> torch.Tensor:
    dim = 1 if norm.channel_first else -1
    return x * torch.rsqrt(x.square().mean(dim, keepdim=True) + 1e-12) * norm.gamma


def encode(vae: AutoencoderKLWan, clips: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and log-variance of the posterior.

    Args:
        clips: `[B, 3, T, H, W]` in [−1, 1], T = 4k + 1.

    Returns:
        Two tensors `[B, z, k + 1, H / 8, W / 8]`.
    """
    encoder = vae.encoder
    x = encoder.conv_in(clips)
    for block in encoder.down_blocks:
        x = block(x)
        if isinstance(block, WanResample) and block.mode == "downsample3d":
            # The first frame is a latent frame of its own; the others are taken in pairs.
            x = torch.cat([x[:, :, :1], block.time_conv(x)], dim=2) if x.shape[2] > 1 else x
    x = encoder.mid_block(x)
    x = encoder.conv_out(encoder.nonlinearity(encoder.norm_out(x)))
    mean, log_variance = vae.quant_conv(x).chunk(2, dim=1)
    return mean, log_variance.clamp(-30.0, 20.0)


def half_precision() -> torch.autocast:
    """Convolutions in bfloat16: a training step takes two thirds of the time."""
    return torch.autocast("cpu", torch.bfloat16)


def decode(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """Clips `[B, 3, T, H, W]` from latents, about in [−1, 1] and not clamped."""
    decoder = vae.decoder
    x = decoder.mid_block(decoder.conv_in(vae.post_quant_conv(latents)))
    for block in decoder.up_blocks:
        for resnet in block.resnets:
            x = resnet(x)
        if block.upsamplers is not None:
            [upsampler] = block.upsamplers
            if upsampler.mode == "upsample3d" and x.shape[2] > 1:
                first, rest = x[:, :, :1], upsampler.time_conv(x[:, :, 1:])
                batch, channels, frames, height, width = rest.shape
                rest = rest.reshape(batch, 2, channels // 2, frames, height, width).movedim(1, 3)
                x = torch.cat([first, rest.reshape(batch, channels // 2, 2 * frames, height, width)], dim=2)
            x = upsampler(x)
    return decoder.conv_out(decoder.nonlinearity(decoder.norm_out(x)))


def clip_batch(budget: Budget, stage: str, step: int, batch: int, *, crop: bool) -> torch.Tensor:
    """Rendered clips of random subjects, `[batch, 3, T, H, W]` in [−1, 1]; crops have half the height and width."""
    numbers, _ = generators(budget.seed, stage + "-clips", step)
    subjects = all_subjects()
    scenes = random_scenes(int(numbers.integers(2**31)), frames=budget.frames, height=budget.height, width=budget.width)
    clips = []
    for scene in (next(scenes) for _ in range(batch)):
        clip = render(
            subjects[numbers.integers(len(subjects))],
            scene,
            frames=budget.frames,
            height=budget.height,
            width=budget.width,
        )
        if crop:
            top = numbers.integers(budget.height // 2 + 1)
            left = numbers.integers(budget.width // 2 + 1)
            clip = clip[:, top : top + budget.height // 2, left : left + budget.width // 2]
        clips.append(torch.from_numpy(clip.copy()))
    return torch.stack(clips).permute(0, 4, 1, 2, 3) * 2 - 1


def reconstruction_loss(decoded: torch.Tensor, clips: torch.Tensor) -> torch.Tensor:
    """Absolute and squared error, the shape and its surroundings three times, the first frame four times as heavy.

    The ground is the majority of the pixels, and the first frame has a latent frame of its own: one of seventeen frames
    would not teach it.
    """
    moving = (clips.amax(dim=1, keepdim=True) > -0.6).float()
    weight = 1 + 2 * F.max_pool3d(moving, (1, 5, 5), stride=1, padding=(0, 2, 2))
    weight[:, :, 0] *= 4
    error = decoded - clips
    return (weight * (error.abs() + error.square())).mean() / weight.mean()


def optimizer_groups(module: nn.Module, rate: float) -> list[dict[str, object]]:
    """Learning rates: a convolution's is `rate` over the root of three times its inputs, a vector's is 2e-3.

    That is `rate` times the spread of torch's own initial values. A convolution over 27 positions of 64 channels has
    values of about 0.014: one rate for all tensors would be a seventh of that a step.
    """
    groups: list[dict[str, object]] = []
    vectors = []
    for parameter in module.parameters():
        if parameter.squeeze().dim() < 2:
            vectors.append(parameter)
        else:
            groups.append({"params": [parameter], "lr": rate * (3 * parameter[0].numel()) ** -0.5})
    return [*groups, {"params": vectors, "lr": 2e-3}]
