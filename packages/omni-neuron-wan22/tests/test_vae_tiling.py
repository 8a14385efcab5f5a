# SPDX-License-Identifier: Apache-2.0
"""Tiled decoding: diffusers' result on diffusers' tiles, close to the video decoded whole, the same on any ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from vae_ranks import TILING, decode_on_group, make_latents, make_vae, make_video
from wan22_reference import relative_l2

from omni_neuron_parallel import RankPool, Topology, stitch_tiles
from omni_neuron_wan22 import NeuronAutoencoderKLWan, VaeConfig, VaeTiling, WanConfigError
from omni_neuron_wan22.published import T2V_A14B, TI2V_5B

WAN21, WAN22 = T2V_A14B.vae, TI2V_5B.vae


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, which on a busy machine wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def diffusers_tiled(path: Path, latents: torch.Tensor, tile: int, stride: int) -> torch.Tensor:
    reference = AutoencoderKLWan.from_pretrained(path / "vae")
    reference.enable_tiling(tile, tile, stride, stride)
    return reference.decode(latents, return_dict=False)[0]


def test_even_grid_equals_diffusers(tiny: Path) -> None:
    latents = make_latents(2, 7, 10)
    expected = diffusers_tiled(tiny, latents, 32, 24)
    vae = make_vae(str(tiny))
    vae.enable_tiling(TILING)
    actual = vae.decode(latents)
    assert actual.shape == expected.shape == (1, 3, 5, 56, 80)
    # diffusers starts one more row and column of tiles in the last overlap, 1 latent wide, though the tiles before
    # hold all of it; up to there the tiles are the same.
    assert relative_l2(actual[..., :48, :72], expected[..., :48, :72]) <= 1e-5
    assert relative_l2(actual[..., 48:, :], expected[..., 48:, :]) > 1e-3


def test_tiles_without_overlap_equal_diffusers(tiny: Path) -> None:
    latents = make_latents(2, 4, 6)
    actual = make_vae(str(tiny)).decode(latents, tiling=VaeTiling(16, 16, 16, 16))
    assert relative_l2(actual, diffusers_tiled(tiny, latents, 16, 16)) <= 1e-5


@pytest.mark.parametrize("size", [(7, 10), (6, 9), (5, 4)])
def test_blending_is_that_of_diffusers(size: tuple[int, int]) -> None:
    """Its own functions on the same tiles; the last ones, pulled back, over the whole of their overlap."""
    plan = TILING.decoding_plan(*size, 8)
    generator = torch.Generator().manual_seed(1)
    tiles = [torch.randn(1, 3, 2, *plan.output_tile, generator=generator) for _ in range(plan.count)]
    blend_v, blend_h = AutoencoderKLWan.blend_v, AutoencoderKLWan.blend_h
    rows, columns = plan.output_rows, plan.output_columns
    expected = torch.empty(1, 3, 2, *plan.output_size)
    theirs = [tile.clone() for tile in tiles]
    for index, tile in enumerate(theirs):
        i, j = divmod(index, len(columns))
        if i > 0:
            blend_v(None, theirs[index - len(columns)], tile, rows[i - 1] + tile.shape[-2] - rows[i])  # type: ignore[arg-type]
        if j > 0:
            blend_h(None, theirs[index - 1], tile, columns[j - 1] + tile.shape[-1] - columns[j])  # type: ignore[arg-type]
        expected[..., rows[i] : rows[i] + tile.shape[-2], columns[j] : columns[j] + tile.shape[-1]] = tile
    actual = torch.empty_like(expected)
    stitch_tiles(plan, tiles, actual)
    assert torch.equal(actual, expected)


def psnr(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """In dB, for values within ±1."""
    return float(10 * torch.log10(4 / (actual - expected).double().square().mean()))


def test_a_tiled_video_is_close_to_the_whole_one(tiny: Path) -> None:
    """Two of the default tiles in a row, of 32 latents with 8 in common; more of this is in test_vae_encoder.py.

    The mid block's attention averages over a tile, not over the frame, which moves every pixel. White noise and random
    weights give 33 to 40 dB.
    """
    latents = make_latents(1, 4, 56)
    vae = make_vae(str(tiny))
    whole, tiled = vae.decode(latents), vae.decode(latents, tiling=VaeTiling())
    assert tiled.shape == whole.shape == (1, 3, 1, 32, 448)
    assert float(tiled.abs().max()) <= 1.0
    assert psnr(tiled, whole) >= 30
    assert not torch.equal(tiled[..., :80], whole[..., :80])


def test_a_video_smaller_than_a_tile_is_decoded_whole(tiny: Path) -> None:
    latents = make_latents(2, 5, 7)
    vae = make_vae(str(tiny))
    assert torch.equal(vae.decode(latents, tiling=VaeTiling()), vae.decode(latents))


def one_level_vae() -> NeuronAutoencoderKLWan:
    """One resampling instead of three, which is soon traced: 2 pixels and 2 frames a latent."""
    config = VaeConfig(
        base_dim=8,
        dim_mult=(1, 2),
        num_res_blocks=1,
        temperal_downsample=(True,),
        latents_mean=(0.0,) * 16,
        latents_std=(1.0,) * 16,
        scale_factor_temporal=2,
        scale_factor_spatial=2,
    )
    vae = NeuronAutoencoderKLWan(config, encoder=True)
    generator = torch.Generator().manual_seed(3)
    for parameter in vae.parameters():
        parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return vae


def test_tiles_are_two_graphs_and_one_cache_at_a_time() -> None:
    latents, tiling = make_latents(3, 13, 10), VaeTiling(16, 16, 12, 12)
    vae = one_level_vae()
    eager = vae.decode(latents, tiling=tiling)
    assert eager.shape == (1, 3, 5, 26, 20)
    chunks: list[tuple[bool, tuple[int, ...]]] = []
    vae.decoder.register_forward_pre_hook(
        lambda module, inputs, options: chunks.append((options["first_chunk"], tuple(inputs[0].shape))),
        with_kwargs=True,
    )
    vae.decode(latents, tiling=tiling)
    shape = (1, 16, 1, 8, 8)
    assert chunks == [(True, shape), (False, shape), (False, shape)] * 4

    graphs: list[Any] = []

    def run_as_is(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = one_level_vae()
    compiled.decoder.compile(fullgraph=True, dynamic=False, backend=run_as_is)
    torch.testing.assert_close(compiled.decode(latents, tiling=tiling), eager, rtol=1e-4, atol=1e-5)
    assert len(graphs) == 2

    # The encoder: two more, whatever the number of frames and tiles.
    video = make_video(5, 26, 20)
    latents = vae.encode(video, tiling=tiling)
    compiled.encoder.compile(fullgraph=True, dynamic=False, backend=run_as_is)
    torch.testing.assert_close(compiled.encode(video, tiling=tiling), latents, rtol=1e-4, atol=1e-5)
    compiled.encode(video[:, :, :3], tiling=tiling)
    assert len(graphs) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("pool", "topology", "shares"),
    [
        (2, Topology(tp=2, vae_patch=2), [2, 2]),
        (4, Topology(tp=2, cp=2, vae_patch=4), [1, 1, 1, 1]),
        (4, Topology(cp=4, vae_patch=2), [2, 2, 0, 0]),
        (4, Topology(tp=4), [4, 0, 0, 0]),
    ],
    indirect=["pool"],
)
def test_any_ranks_give_the_video_of_one_process(
    tiny: Path, pool: RankPool, topology: Topology, shares: list[int], dtype: torch.dtype
) -> None:
    results = pool.run(decode_on_group, str(tiny), topology, dtype, make_latents(2, 6, 5), TILING)
    assert results == [(shares[0], True)] + [(share, None) for share in shares[1:]]


def test_more_ranks_than_tiles(tiny: Path, four_ranks: RankPool) -> None:
    """Two tiles of the default size, which several ranks imply."""
    results = four_ranks.run(
        decode_on_group, str(tiny), Topology(tp=4, vae_patch=4), torch.float32, make_latents(1, 2, 33), None
    )
    assert results == [(1, True), (1, None), (0, None), (0, None)]


def test_a_tiling_that_does_not_fit_is_refused() -> None:
    with pytest.raises(WanConfigError, match="tile_sample_min_width = 250: valid values are positive multiples of 8"):
        VaeTiling(tile_sample_min_width=250).decoding_plan(60, 104, 8)
    with pytest.raises(WanConfigError, match=r"tile_sample_stride_height = 264 leaves gaps.* = 256; .* 8 to 256"):
        VaeTiling(tile_sample_stride_height=264).encoding_plan(480, 832, 8)
    with pytest.raises(WanConfigError, match=r"tile_sample_stride_width = 24: .* multiples of 16"):
        VaeTiling(tile_sample_stride_width=24).encoding_plan(480, 832, 16)


def test_the_tiles_of_720p() -> None:
    """256 pixels every 192, of both VAEs, in both directions: tiles are not halved where patches halve the picture."""
    for config, height in ((WAN21, 720), (WAN22, 704)):
        scale = config.scale_factor_spatial
        encoding = VaeTiling().encoding_plan(height, 1280, scale)
        decoding = VaeTiling().decoding_plan(height // scale, 1280 // scale, scale, patch=config.patch)
        assert encoding.count == decoding.count == 28
        assert encoding.tile == (256, 256)
        assert encoding.origins == tuple((scale * row, scale * column) for row, column in decoding.origins)
        assert encoding.output_size == decoding.size
        assert decoding.output_size == (height // config.patch, 1280 // config.patch)
