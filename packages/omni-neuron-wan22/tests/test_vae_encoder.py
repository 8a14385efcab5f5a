# SPDX-License-Identifier: Apache-2.0
"""The encoder of both VAEs and the decoder of VAE 2.2 against diffusers, whole, in tiles and on several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan
from vae_ranks import SMALL_VAES, make_latents, make_vae, make_video, small_vae, small_vaes_on_group
from wan22_reference import relative_l2

from omni_neuron_parallel import RankPool, Topology
from omni_neuron_wan22 import NeuronAutoencoderKLWan, VaeTiling, WanCheckpoint, load_vae, vae_mapping

VERSIONS = pytest.mark.parametrize("version", list(SMALL_VAES))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, which on a busy machine wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def diffusers_like(vae: NeuronAutoencoderKLWan) -> AutoencoderKLWan:
    """diffusers' VAE of the same configuration and weights."""
    config = {name: getattr(vae.config, name) for name in SMALL_VAES["2.2"]}
    theirs = AutoencoderKLWan(
        **config, latents_mean=list(vae.config.latents_mean), latents_std=list(vae.config.latents_std)
    )
    mapping, state = vae_mapping(vae.config, encoder=True), vae.state_dict()
    theirs.load_state_dict({key: state[name] for name, key in mapping.items()})  # type: ignore[misc]
    return theirs


@VERSIONS
@pytest.mark.parametrize("frames", [1, 5, 13])
def test_encode_and_decode_are_those_of_diffusers(version: str, frames: int) -> None:
    ours = small_vae(version)
    theirs, video = diffusers_like(ours), make_video(frames, 32, 48)
    expected = theirs.encode(video).latent_dist.mode()
    latents = ours.encode(video)
    assert latents.shape == expected.shape
    assert relative_l2(latents, expected) <= 1e-5
    decoded = theirs.decode(expected, return_dict=False)[0]
    actual = ours.decode(expected)
    assert actual.shape == decoded.shape == video.shape
    assert relative_l2(actual, decoded) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_encode_of_a_checkpoint(tiny: Path, dtype: torch.dtype) -> None:
    video = make_video(9, 48, 64)
    expected = AutoencoderKLWan.from_pretrained(tiny / "vae").encode(video).latent_dist.mode()
    actual = load_vae(WanCheckpoint(tiny), dtype=dtype, encoder=True).encode(video)
    assert actual.dtype is dtype
    if dtype is torch.float32:
        assert relative_l2(actual, expected) <= 1e-5
    else:
        low = AutoencoderKLWan.from_pretrained(tiny / "vae", torch_dtype=torch.bfloat16)
        theirs = relative_l2(low.encode(video.bfloat16()).latent_dist.mode(), expected)
        assert relative_l2(actual, expected) <= 1.25 * theirs


@VERSIONS
def test_even_grids_equal_diffusers(version: str) -> None:
    ours = small_vae(version)
    theirs, scale, patch = diffusers_like(ours), ours.config.scale_factor_spatial, ours.config.patch
    # Tiles of 4 latents every 3. diffusers starts one more row and column of tiles in the last overlap, 1 latent wide,
    # though the tiles before hold all of it; up to there the tiles are the same.
    tile, stride = 4 * scale, 3 * scale
    video, tiling = make_video(5, 7 * scale, 10 * scale), VaeTiling(tile, tile, stride, stride)
    # It cuts what VAE 2.2 encodes in patches.
    theirs.enable_tiling(tile // patch, tile // patch, stride // patch, stride // patch)
    expected = theirs.encode(video).latent_dist.mode()
    latents = ours.encode(video, tiling=tiling)
    assert latents.shape == expected.shape == (1, ours.config.z_dim, 2, 7, 10)
    assert relative_l2(latents[..., :6, :9], expected[..., :6, :9]) <= 1e-5
    theirs.enable_tiling(tile, tile, stride, stride)
    expected = theirs.decode(latents, return_dict=False)[0]
    actual = ours.decode(latents, tiling=tiling)
    assert actual.shape == expected.shape == video.shape
    within = (..., slice(6 * scale), slice(9 * scale))
    assert relative_l2(actual[within], expected[within]) <= 1e-5


def psnr(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """In dB, of the expected values' range."""
    span = float(expected.max() - expected.min())
    return float(10 * torch.log10(span**2 / (actual - expected).double().square().mean()))


@VERSIONS
@pytest.mark.parametrize("frames", [1, 9])
def test_tiled_is_close_to_whole_and_without_attention_exact_in_the_interior(version: str, frames: int) -> None:
    """Two tiles of 32 latents in a row, 8 in common. Attention sees a tile, not the frame: it alone moves interiors."""
    vae = small_vae(version)
    scale = vae.config.scale_factor_spatial
    tiling = VaeTiling(32 * scale, 32 * scale, 24 * scale, 24 * scale)
    video, latents = make_video(frames, scale, 56 * scale), make_latents((frames + 3) // 4, 1, 56, vae.config.z_dim)
    encoded, decoded = vae.encode(video), vae.decode(latents)
    tiled_encoded, tiled_decoded = vae.encode(video, tiling=tiling), vae.decode(latents, tiling=tiling)
    assert tiled_encoded.shape == encoded.shape
    assert tiled_decoded.shape == decoded.shape == video.shape
    # Of random weights; a tile that is off by one pixel or in time gives less than half of it.
    assert psnr(tiled_encoded, encoded) >= 24 and psnr(tiled_decoded, decoded) >= 24
    for half in (vae.encoder, vae.decoder):
        for parameter in half.mid_block.attentions[0].proj.parameters():
            parameter.zero_()
    # In latents, what is seen to each side: by the encoder 10, by the decoder 14.
    for whole, tiled, sight, unit in (
        (vae.encode(video), vae.encode(video, tiling=tiling), 10, 1),
        (vae.decode(latents), vae.decode(latents, tiling=tiling), 14, scale),
    ):
        for interior in (slice(0, min(24, 32 - sight) * unit), slice(max(32, 24 + sight) * unit, None)):
            torch.testing.assert_close(tiled[..., interior], whole[..., interior], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("pool", "topology", "shares"),
    [
        (2, Topology(tp=2, vae_patch=2), [2, 2]),
        (4, Topology(tp=2, cp=2, vae_patch=4), [1, 1, 1, 1]),
    ],
    indirect=["pool"],
)
def test_any_ranks_give_the_bits_of_one_process(pool: RankPool, topology: Topology, shares: list[int]) -> None:
    results = pool.run(small_vaes_on_group, topology)
    same = [True] + [None] * (len(shares) - 1)
    assert results == [[(share, share, equal)] * 2 for share, equal in zip(shares, same, strict=True)]


def test_the_encoder_is_loaded_where_it_is_asked_for(tiny: Path) -> None:
    vae = make_vae(str(tiny))
    assert not any("encoder" in name for name in vae.state_dict())
    with pytest.raises(ValueError, match="without its encoder"):
        vae.encode(make_video(1, 32, 32))


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((4, 32, 32), r"frames of the video = 4: valid are multiples of 4 plus 1"),
        ((5, 40, 32), r"height of the video = 40: valid are multiples of 16"),
    ],
)
def test_videos_that_do_not_fit_are_refused(size: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_vae("2.2").encode(make_video(*size))
