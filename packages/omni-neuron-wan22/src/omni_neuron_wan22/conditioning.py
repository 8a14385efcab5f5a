# SPDX-License-Identifier: Apache-2.0
"""What an image becomes for the DiT: latents beside or in the place of the noise, a mask, an embedding. No vLLM needed.

Encoded once a request, where the VAE and the image encoder live, and then sent to every rank: bit for bit the same
everywhere, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn
from transformers import AutoImageProcessor, CLIPVisionModel

from omni_neuron_parallel import broadcast_from_first, get_group
from omni_neuron_wan22.vae import NeuronAutoencoderKLWan
from vllm_omni_neuron.sdk import image_report, media_of, pixels


@dataclass(frozen=True)
class ImageCondition:
    """What the DiT is told of the images, the same on every rank.

    Attributes:
        latents: float32, on the host. Image-to-video: mask and condition `[1, 4 + z, T, h, w]`, which follow the noisy
            latents in further channels. TI2V-5B: the first latent frame `[1, z, 1, h, w]`, which takes the noisy one's
            place.
        is_first_frame: which of the two.
        image_embeds: CLIP's `[images, L, image_dim]` float32, on the device, where the DiT takes one.
        report: what `fit_images` did to the image.
    """

    latents: torch.Tensor
    is_first_frame: bool
    image_embeds: torch.Tensor | None = None
    report: Mapping[str, Any] | None = None

    def inputs(self, latents: torch.Tensor, timestep: torch.Tensor) -> dict[str, torch.Tensor]:
        """The DiT's `hidden_states`, and `first_frame_timestep` where it has one, for noisy latents `[1, z, T, h, w]`.

        Args:
            latents: of any step.
            timestep: the step's, `[1]`; a clean first frame's is 0.
        """
        if self.is_first_frame:
            return {"hidden_states": self.finish(latents), "first_frame_timestep": torch.zeros_like(timestep)}
        return {"hidden_states": torch.cat([latents, self.latents], dim=1)}

    def finish(self, latents: torch.Tensor) -> torch.Tensor:
        """Denoised latents with the given first frame, where that takes the noisy one's place."""
        if not self.is_first_frame:
            return latents
        return torch.cat([self.latents, latents[:, :, 1:]], dim=2)


class ClipImageEncoder(nn.Module):
    """CLIP's vision model, float32 on the host: it runs once a request, on a few hundred tokens.

    Args:
        checkpoint: the folder with `image_encoder` and `image_processor`.
    """

    def __init__(self, checkpoint: Path):
        super().__init__()
        self.processor = AutoImageProcessor.from_pretrained(checkpoint / "image_processor", local_files_only=True)
        self.model = CLIPVisionModel.from_pretrained(
            checkpoint / "image_encoder", dtype=torch.float32, local_files_only=True
        )
        self.requires_grad_(False).eval()

    def forward(self, images: list[Image.Image]) -> torch.Tensor:
        """The last layer but one, `[images, L, width]` float32."""
        inputs = self.processor(images=images, return_tensors="pt")
        return self.model(inputs["pixel_values"], output_hidden_states=True).hidden_states[-2]


def encode_images(
    prompt: Any,
    num_frames: int,
    *,
    temporal_stride: int,
    is_first_frame: bool,
    vae: NeuronAutoencoderKLWan | None,
    image_encoder: ClipImageEncoder | None,
    takes_embeds: bool,
    device: torch.device | str = "cpu",
) -> ImageCondition:
    """The condition of a request's images. Collective over the world.

    Args:
        prompt: vLLM-Omni's with `image` and perhaps `last_image`, RGB and of the video's size (`fit_images`).
        num_frames: of the video.
        temporal_stride: video frames per latent frame.
        is_first_frame: as in `ImageCondition`.
        vae: with its encoder, on the ranks that decode; None elsewhere.
        image_encoder: on the first rank, where the DiT takes an embedding.
        takes_embeds: whether it does.
        device: for the embedding.
    """
    media = media_of(prompt)
    images = [media[name] for name in ("image", "last_image") if name in media]
    latents = None
    if vae is not None:
        frames = [pixels(image).to(vae.dtype) for image in images]
        encoded = vae.encode(condition_video(frames, 1 if is_first_frame else num_frames), group=get_group("vae_patch"))
        latents = None if encoded is None else vae.normalize(encoded)
    latents = broadcast_from_first(latents)
    if not is_first_frame:
        mask = given_frames_mask(num_frames, len(images) > 1, temporal_stride, (latents.shape[3], latents.shape[4]))
        latents = torch.cat([mask.to(latents), latents], dim=1)
    embeds = None
    if takes_embeds:
        embeds = broadcast_from_first(None if image_encoder is None else image_encoder(images)).to(device)
    return ImageCondition(latents, is_first_frame, embeds, image_report(prompt))


def condition_video(frames: list[torch.Tensor], num_frames: int) -> torch.Tensor:
    """A grey video `[1, 3, num_frames, H, W]` with the first of `frames` `[3, H, W]` first and a second one last."""
    video = frames[0].new_zeros(1, *frames[0].shape[:1], num_frames, *frames[0].shape[1:])
    for place, frame in zip((0, -1), frames, strict=False):
        video[0, :, place] = frame
    return video


def given_frames_mask(num_frames: int, last: bool, stride: int, size: tuple[int, int]) -> torch.Tensor:
    """`[1, stride, T, h, w]`: 1 where the video frame is given, in channels those of one latent frame.

    The first latent frame is one video frame, which stands for `stride`.
    """
    given = torch.zeros(num_frames + stride - 1)
    given[:stride] = 1
    if last:
        given[-1] = 1
    return given.view(-1, stride).t()[None, :, :, None, None].expand(1, -1, -1, *size)
