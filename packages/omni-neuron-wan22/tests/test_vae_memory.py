# SPDX-License-Identifier: Apache-2.0
"""What encoding and decoding hold at a time: it does not depend on the video's length, and the planner knows it."""

from __future__ import annotations

import pytest
import torch
from live_bytes import LiveBytes
from vae_ranks import SMALL_VAES, make_latents, make_video, small_vae

from omni_neuron_wan22 import NeuronAutoencoderKLWan, UMT5Config, VaeConfig, WanConfig
from omni_neuron_wan22.planning import model_sizes

TI2V_5B = {"base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "num_res_blocks": 2}


@pytest.mark.parametrize("version", list(SMALL_VAES))
def test_a_longer_video_takes_no_more_than_its_own_bytes(version: str) -> None:
    vae = small_vae(version)
    scale = vae.config.scale_factor_spatial
    rest = {"encode": set(), "decode": set()}
    for frames in (9, 25):
        video = make_video(frames, 2 * scale, 3 * scale)
        latents = make_latents((frames + 3) // 4, 2, 3, vae.config.z_dim)
        for name, call, value in (("encode", vae.encode, video), ("decode", vae.decode, latents)):
            with LiveBytes([value, *vae.parameters()]) as live:
                output = call(value)
            rest[name].add(live.peak - output.untyped_storage().nbytes())
    # Of the decoder's patches the video is made at the end, when no activations are left.
    assert {name: len(sizes) for name, sizes in rest.items()} == {"encode": 1, "decode": 1}


@pytest.mark.parametrize("changes", [{}, SMALL_VAES["2.2"] | TI2V_5B], ids=["2.1", "2.2"])
def test_the_planner_knows_the_decoders_peak(changes: dict[str, object]) -> None:
    """Of one tile of the real sizes, a later chunk, in eager mode."""
    z_dim = changes.get("z_dim", 16)
    config = VaeConfig(latents_mean=(0.0,) * z_dim, latents_std=(1.0,) * z_dim, **changes)  # type: ignore[arg-type, operator]
    side = 256 // config.scale_factor_spatial
    with torch.device("meta"):
        decoder = NeuronAutoencoderKLWan(config).decoder.bfloat16()
        frame = torch.empty(1, config.z_dim, 1, side, side, dtype=torch.bfloat16)
        with LiveBytes([frame, *decoder.parameters()]) as live:
            decoder(frame, decoder.empty_feature_cache(frame), first_chunk=False)
    vae = model_sizes("vae", 1, WanConfig(), UMT5Config(), config).vae
    planned = 2 * side * side * (2 * vae.cached_elements + vae.peak_elements)
    assert live.peak == pytest.approx(planned, rel=0.1)
