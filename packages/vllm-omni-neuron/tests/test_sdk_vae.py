# SPDX-License-Identifier: Apache-2.0
"""Autoencoders of diffusers behind one interface: their own results whole, tiles that no number of ranks changes."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from omni_neuron_parallel import AxisGroup
from omni_neuron_runtime import CheckpointError
from vllm_omni_neuron.sdk import (
    DiffusersCheckpoint,
    DiffusersVae,
    ModelConfigError,
    VaeTiling,
    load_diffusers_vae,
    perturb_constants,
)

IMAGE, VIDEO, CHUNKED = "AutoencoderKL", "AutoencoderKLHunyuanVideo15", "AutoencoderKLWan"
OPTIONS: dict[str, dict[str, Any]] = {
    IMAGE: {
        "block_out_channels": (4, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "norm_num_groups": 2,
        "latent_channels": 4,
        "scaling_factor": 0.36,
        "shift_factor": 0.12,
    },
    VIDEO: {
        "block_out_channels": (8, 16, 16),
        "layers_per_block": 1,
        "latent_channels": 4,
        "spatial_compression_ratio": 4,
        "temporal_compression_ratio": 2,
    },
    CHUNKED: {
        "base_dim": 4,
        "z_dim": 4,
        "dim_mult": [1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [True],
        "latents_mean": [0.1, 0.2, 0.3, 0.4],
        "latents_std": [1.0, 2.0, 3.0, 4.0],
    },
}
SCALES = {IMAGE: 2, VIDEO: 4, CHUNKED: 2}
LATENTS = {IMAGE: (1, 4, 12, 10), VIDEO: (1, 4, 3, 8, 6), CHUNKED: (1, 4, 3, 12, 10)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder with one autoencoder of each class, under its name."""
    path = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    for name, options in OPTIONS.items():
        model = getattr(diffusers, name)(**options)
        perturb_constants(model)
        model.save_pretrained(path / name)
    return path


def load(folder: Path, name: str, encoder: bool = True) -> DiffusersVae:
    return load_diffusers_vae(DiffusersCheckpoint(folder), dtype=torch.float32, component=name, encoder=encoder)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


@dataclass(frozen=True)
class Threads(AxisGroup):
    """Ranks that are threads, with the one collective that tiles need."""

    barrier: Any = None
    sent: Any = None

    def __post_init__(self) -> None:
        pass

    def gather_to_first(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        self.sent[self.rank] = tensor
        self.barrier.wait()
        gathered = [self.sent[rank] for rank in self.ranks] if self.rank == 0 else None
        self.barrier.wait()
        return gathered


def on_two_ranks(function: Callable[[int, AxisGroup], Any]) -> list[Any]:
    barrier, sent = threading.Barrier(2, timeout=30), {}
    groups = [Threads("vae_patch", (0, 1), rank, barrier=barrier, sent=sent) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(function, (0, 1), groups))


@torch.no_grad()
@pytest.mark.parametrize("name", OPTIONS)
def test_whole_it_is_diffusers_and_tiles_are_alike_on_any_number_of_ranks(folder: Path, name: str) -> None:
    theirs = getattr(diffusers, name).from_pretrained(folder / name)
    vae, latents = load(folder, name), random(*LATENTS[name])
    scale = SCALES[name]
    assert vae.spatial_scale == scale
    expected = theirs.decode(latents, return_dict=False)[0].clamp(-1, 1)
    assert torch.equal(vae.decode(latents), expected)
    pixels = expected * 0.9
    encoded = theirs.encode(pixels).latent_dist.mode()
    assert torch.equal(vae.encode(pixels), encoded)

    one_tile = VaeTiling(*(64,) * 4)
    assert torch.equal(vae.decode(latents, tiling=one_tile), expected)
    assert torch.equal(vae.encode(pixels, tiling=one_tile), encoded)
    several = VaeTiling(4 * scale, 4 * scale, 3 * scale, 2 * scale)
    # Each rank has its own: some of these models keep state while they run.
    vaes = (vae, load(folder, name))
    for direction, inputs, shape in (("decode", latents, expected.shape), ("encode", pixels, encoded.shape)):
        runs = [functools.partial(getattr(vae, direction), inputs) for vae in vaes]
        alone = runs[0](tiling=several)
        assert alone.shape == shape and not torch.equal(alone, runs[0]())
        first, other = on_two_ranks(lambda rank, group: runs[rank](tiling=several, group=group))  # noqa: B023
        assert torch.equal(first, alone) and other is None
    # Ranks that decode nothing return at once.
    assert vae.decode(latents, group=Threads("vae_patch", (2, 3), 0)) is None


def test_the_configs_statistics(folder: Path) -> None:
    latents = random(1, 4, 2, 2)
    scaled = load(folder, IMAGE)
    assert torch.allclose(scaled.normalize(latents), (latents - 0.12) * 0.36)
    assert torch.allclose(scaled.denormalize(scaled.normalize(latents)), latents)
    only_factor = load(folder, VIDEO)
    assert torch.allclose(only_factor.denormalize(latents[:, :, None]), latents[:, :, None] / 1.03682)
    by_channel = load(folder, CHUNKED)
    mean, std = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    expected = (latents - mean[:, None, None]) / std[:, None, None]
    assert torch.allclose(by_channel.normalize(latents[:, :, None]), expected[:, :, None])
    assert torch.allclose(by_channel.denormalize(expected[:, :, None]), latents[:, :, None])
    halves = load_diffusers_vae(DiffusersCheckpoint(folder), dtype=torch.bfloat16, component=IMAGE)
    assert halves.denormalize(latents).dtype == halves.decode(latents).dtype == torch.bfloat16


@torch.no_grad()
@pytest.mark.parametrize("name", [IMAGE, VIDEO])
def test_the_decoder_is_one_graph(folder: Path, name: str) -> None:
    vae, latents = load(folder, name, encoder=False), random(*LATENTS[name])
    expected = vae.decode(latents)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    vae.decoder.compile(fullgraph=True, dynamic=False, backend=backend)
    torch.testing.assert_close(vae.decode(latents), expected)
    assert len(graphs) == 1


def test_what_cannot_be_loaded_is_named(folder: Path, tmp_path: Path) -> None:
    checkpoint, path = DiffusersCheckpoint(tmp_path), tmp_path / "vae"
    with pytest.raises(ModelConfigError, match=r"config\.json is missing"):
        load_diffusers_vae(checkpoint, dtype=torch.float32)
    diffusers.AutoencoderKL.from_pretrained(folder / IMAGE).save_pretrained(path)
    file = path / "diffusion_pytorch_model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-64])
    with pytest.raises(CheckpointError, match=r"diffusion_pytorch_model\.safetensors: .*bytes"):
        load_diffusers_vae(checkpoint, dtype=torch.float32)
    # A tensor under another name.
    file.write_bytes(whole.replace(b"decoder.conv_out.bias", b"decoder.conv_out.sail"))
    with pytest.raises(CheckpointError, match=r"missing 1 tensor\(s\) of AutoencoderKL: decoder\.conv_out\.bias"):
        load_diffusers_vae(checkpoint, dtype=torch.float32)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"has no \*\.safetensors file"):
        load_diffusers_vae(checkpoint, dtype=torch.float32)
    (path / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKLNoSuch"}))
    with pytest.raises(ModelConfigError, match="has no class 'AutoencoderKLNoSuch'"):
        load_diffusers_vae(checkpoint, dtype=torch.float32)
    with pytest.raises(ModelConfigError, match="Linear has no 'decoder'"):
        DiffusersVae(torch.nn.Linear(1, 1))


def test_sizes_that_do_not_fit_are_named(folder: Path) -> None:
    vae = load(folder, VIDEO)
    with pytest.raises(ValueError, match="height = 6 to encode: valid are multiples of 4"):
        vae.encode(torch.zeros(1, 3, 1, 6, 8))
    with pytest.raises(ModelConfigError, match="tile_sample_min_height = 6: valid values are positive multiples of 4"):
        vae.decode(torch.zeros(1, 4, 1, 2, 2), tiling=VaeTiling(6, 8, 4, 4))
    with pytest.raises(ModelConfigError, match="tile_sample_stride_width = 12 leaves gaps"):
        vae.decode(torch.zeros(1, 4, 1, 2, 2), tiling=VaeTiling(8, 8, 4, 12))
    with pytest.raises(ValueError, match="loaded without its encoder"):
        load(folder, VIDEO, encoder=False).encode(torch.zeros(1, 3, 1, 8, 8))
