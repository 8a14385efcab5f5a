# SPDX-License-Identifier: Apache-2.0
"""What encoding and decoding hold: no more for a longer video, what the planner says, and no DiT beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from live_bytes import LiveBytes
from vae_ranks import SMALL_VAES, make_latents, make_video, small_vae
from wan22_reference import make_pipeline

from omni_neuron_parallel import tensor_digest
from omni_neuron_wan22 import NeuronAutoencoderKLWan, UMT5Config, VaeConfig, WanConfig
from omni_neuron_wan22.planning import model_sizes
from omni_neuron_wan22.published import T2V_A14B, TI2V_5B


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


@pytest.mark.parametrize("config", [T2V_A14B.vae, TI2V_5B.vae], ids=["2.1", "2.2"])
def test_the_planner_knows_the_decoders_peak(config: VaeConfig) -> None:
    """Of one tile of the real sizes, a later chunk, in eager mode."""
    side = 256 // config.scale_factor_spatial
    with torch.device("meta"):
        decoder = NeuronAutoencoderKLWan(config).decoder.bfloat16()
        frame = torch.empty(1, config.z_dim, 1, side, side, dtype=torch.bfloat16)
        with LiveBytes([frame, *decoder.parameters()]) as live:
            decoder(frame, decoder.empty_feature_cache(frame), first_chunk=False)
    vae = model_sizes("vae", 1, WanConfig(), UMT5Config(), config).vae
    planned = 2 * side * side * (2 * vae.cached_elements + vae.peak_elements)
    assert live.peak == pytest.approx(planned, rel=0.1)


def test_the_experts_are_off_the_device_while_the_vae_decodes(tiny: Path) -> None:
    pipeline = make_pipeline(str(tiny), torch.float32, enable_cpu_offload=True)
    experts = [pipeline.transformer, pipeline.transformer_2]
    digests = [tensor_digest(parameter) for expert in experts for parameter in expert.parameters()]
    sizes: list[int] = []
    pipeline.vae.decoder.register_forward_pre_hook(
        lambda module, inputs: sizes.append(sum(p.untyped_storage().nbytes() for e in experts for p in e.parameters()))
    )
    latents = make_latents(2, 4, 4)
    with pipeline.vae_alone("decoding"):
        video = pipeline.decode(latents)
    assert sizes == [0, 0]
    assert [tensor_digest(parameter) for expert in experts for parameter in expert.parameters()] == digests
    pipeline.od_config.enable_cpu_offload = False
    with pipeline.vae_alone("decoding"):
        assert torch.equal(pipeline.decode(latents), video)
    assert min(sizes[2:]) > 0
