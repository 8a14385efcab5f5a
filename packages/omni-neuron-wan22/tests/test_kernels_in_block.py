# SPDX-License-Identifier: Apache-2.0
"""With the NKI simulator switched on, a block of the DiT and the VAE's layers run through the kernels end to end."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import omni_neuron_nkisim
from omni_neuron_kernels import explain
from omni_neuron_wan22 import WanCheckpoint, load_transformer, load_vae, modulation, transformer, vae_layers
from omni_neuron_wan22.vae_layers import FeatureCache

TOKENS = (3, 6, 8)  # latent frames, rows, columns: 36 tokens of patches of 1 × 2 × 2
Launches = list[tuple[str, str | None]]  # op that a module called, kernel that ran for it


@pytest.fixture
def simulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    asked_for = omni_neuron_nkisim.is_installed()
    monkeypatch.setenv("OMNI_NEURON_NKISIM", "1")
    omni_neuron_nkisim.install()
    yield
    if not asked_for:
        omni_neuron_nkisim.uninstall()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """What the modules' calls of kernels come to, in their order."""
    found: Launches = []
    ops = ("adaln_modulate", "causal_conv3d", "flash_attention", "mlp", "output_projection", "qkv_projection")
    for module in (modulation, transformer, vae_layers):
        for name in (*ops, "rms_norm", "context_attention"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, _spied(getattr(module, name), name, found))
    return found


def _spied(function: Callable[..., Any], name: str, found: Launches) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*tensors: Any, **options: Any) -> Any:
        before = _last_launch()
        result = function(*tensors, **options)
        after = _last_launch()
        found.append((name, None if after is before or after is None else after.kernel))
        return result

    return call


def _last_launch() -> Any:
    try:
        return omni_neuron_nkisim.last_stats()
    except LookupError:
        return None


def relative_l2(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def run_block(tiny: Path, dtype: torch.dtype) -> torch.Tensor:
    model = load_transformer(WanCheckpoint(tiny), "transformer", dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(1, 36, model.config.hidden_size, generator=generator).to(dtype)
    modulation = torch.randn(1, 6, model.config.hidden_size, generator=generator).to(dtype)
    text = torch.randn(1, 32, model.config.text_dim, generator=generator)
    rotary_emb = model.rope(torch.empty(1, 16, *TOKENS))
    block = model.blocks[0]
    return block(hidden, modulation, rotary_emb, model.project_cross_attention_kv(text).blocks[0])  # type: ignore[no-any-return]


BLOCK = [
    ("rms_norm", "rms_norm"),  # of the text's keys, in both blocks
    ("rms_norm", "rms_norm"),
    ("adaln_modulate", "adaln_modulate"),
    ("qkv_projection", "qkv_projection"),
    ("context_attention", "flash_attention"),
    ("output_projection", "output_projection"),
    ("adaln_modulate", "gated_adaln_modulate"),
    ("rms_norm", "rms_norm"),
    ("flash_attention", "flash_attention"),
    ("output_projection", "output_projection"),
    ("adaln_modulate", "adaln_modulate"),
    ("mlp", "mlp"),
]


def test_a_block_runs_through_the_kernels_in_float32(tiny: Path, simulator: None, launches: Launches) -> None:
    simulated = run_block(tiny, torch.float32)
    assert launches == BLOCK
    launches.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_NEURON_DISABLE_NKI_KERNELS", "1")
        expected = run_block(tiny, torch.float32)
    assert launches == [(name, None) for name, _ in BLOCK]
    assert relative_l2(simulated, expected) <= 1e-5


def test_a_block_in_bfloat16_is_as_near_to_float32_as_torch(tiny: Path, simulator: None, launches: Launches) -> None:
    simulated = run_block(tiny, torch.bfloat16)
    assert launches == BLOCK
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_NEURON_DISABLE_NKI_KERNELS", "1")
        exact, torchs = run_block(tiny, torch.float32), run_block(tiny, torch.bfloat16)
    assert simulated.dtype == torchs.dtype == torch.bfloat16
    assert relative_l2(simulated, exact) <= 1.25 * relative_l2(torchs, exact)


def test_the_vaes_middle_and_upsampling_run_through_the_kernels(
    tiny: Path, simulator: None, launches: Launches
) -> None:
    decoder = load_vae(WanCheckpoint(tiny), dtype=torch.float32).decoder
    latents = torch.randn(1, 16, 1, 3, 5, generator=torch.Generator().manual_seed(4))
    past = [torch.randn_like(frames) for frames in decoder.empty_feature_cache(latents)]

    def run() -> list[torch.Tensor]:
        cache = FeatureCache(past)
        frames = decoder.mid_block(decoder.conv_in(latents, cache), cache)
        return [decoder.up_blocks[0](frames, cache, False), *cache.future]

    simulated = run()
    assert launches.count(("flash_attention", "flash_attention")) == 1
    assert {launch for launch in launches if launch[0] != "flash_attention"} == {("causal_conv3d", "causal_conv3d")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_NEURON_DISABLE_NKI_KERNELS", "1")
        expected = run()
    for ours, torchs in zip(simulated, expected, strict=True):
        assert ours.shape == torchs.shape
        assert relative_l2(ours, torchs) <= 1e-5


def test_the_choice_is_explained(tiny: Path, simulator: None) -> None:
    feed_forward = load_transformer(WanCheckpoint(tiny), "transformer", dtype=torch.float32).blocks[0].ffn
    up, down = feed_forward.up, feed_forward.down
    weights = (up.weight.t(), up.bias, down.weight.t(), down.bias)
    assert explain("mlp", torch.zeros(1, 4, up.weight.shape[1]), *weights).provider == "nki-simulator"
