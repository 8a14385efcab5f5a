# SPDX-License-Identifier: Apache-2.0
"""The encoder of both VAEs and the decoder of VAE 2.2 against diffusers, whole and in tiles."""

from __future__ import annotations

import pytest
import torch
from diffusers import AutoencoderKLWan
from wan22_reference import relative_l2

from omni_neuron_wan22 import NeuronAutoencoderKLWan, VaeConfig, vae_mapping

SMALL = {
    "2.1": {"base_dim": 8, "z_dim": 4, "num_res_blocks": 1},
    "2.2": {
        "base_dim": 8,
        "decoder_base_dim": 12,
        "z_dim": 6,
        "num_res_blocks": 1,
        "is_residual": True,
        "in_channels": 12,
        "out_channels": 12,
        "patch_size": 2,
        "scale_factor_spatial": 16,
    },
}
VERSIONS = pytest.mark.parametrize("version", list(SMALL))


def make_vaes(version: str) -> tuple[NeuronAutoencoderKLWan, AutoencoderKLWan]:
    """Ours and diffusers', of the same random weights."""
    z_dim = SMALL[version]["z_dim"]
    statistics = {"latents_mean": [0.5] * z_dim, "latents_std": [2.0] * z_dim}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        theirs = AutoencoderKLWan(**SMALL[version], **statistics)
        for parameter in theirs.parameters():
            # Gains and biases that differ, and activations that neither vanish nor explode.
            parameter.add_(0.1 * torch.randn_like(parameter))
    config = VaeConfig.from_dict(dict(theirs.config))
    ours = NeuronAutoencoderKLWan(config, encoder=True)
    mapping, state = vae_mapping(config, encoder=True), theirs.state_dict()
    ours.load_state_dict({name: state[key] for name, key in mapping.items()})  # type: ignore[index]
    return ours, theirs


def make_video(frames: int, height: int, width: int) -> torch.Tensor:
    return torch.rand(1, 3, frames, height, width, generator=torch.Generator().manual_seed(6)) * 2 - 1


@VERSIONS
@pytest.mark.parametrize("frames", [1, 5, 13])
def test_encode_and_decode_are_those_of_diffusers(version: str, frames: int) -> None:
    ours, theirs = make_vaes(version)
    video = make_video(frames, 32, 48)
    expected = theirs.encode(video).latent_dist.mode()
    latents = ours.encode(video)
    assert latents.shape == expected.shape
    assert relative_l2(latents, expected) <= 1e-5
    decoded = theirs.decode(expected, return_dict=False)[0]
    actual = ours.decode(expected)
    assert actual.shape == decoded.shape == video.shape
    assert relative_l2(actual, decoded) <= 1e-5
