# SPDX-License-Identifier: Apache-2.0
"""Cache-DiT: the library's decisions and values, states that do not mix, and off that is off. Layouts: test_layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cache_dit
import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file
from vllm_omni.diffusion.cache.selector import get_cache_backend
from vllm_omni.diffusion.data import DiffusionCacheConfig
from vllm_omni.inputs.data import OmniDiffusionSamplingParams
from vllm_omni.lora.request import LoRARequest
from wan22_reference import make_pipeline, relative_l2

from omni_neuron_runtime import COUNTERS
from omni_neuron_wan22 import NeuronWanPipeline, TinyWan, WanCheckpoint, WanConfigError, make_tiny_checkpoint
from omni_neuron_wan22.cache import BlockCache
from omni_neuron_wan22.cache_rule import DBCacheRule
from omni_neuron_wan22.cache_settings import CacheSettings, check_cache_config
from omni_neuron_wan22.checkpoint import load_transformer

SETTINGS = {"height": 32, "width": 48, "num_frames": 9, "num_inference_steps": 8, "max_sequence_length": 16}
# Random weights change more from step to step than trained ones.
CACHE = {"max_warmup_steps": 2, "residual_diff_threshold": 0.9, "max_continuous_cached_steps": 2}


def cached_pipeline(path: Path, cache_config: dict[str, Any] | None = CACHE, **config: Any) -> NeuronWanPipeline:
    """A pipeline whose cache vLLM-Omni's own backend has switched on, as the model runner does."""
    if cache_config is None:
        return make_pipeline(str(path), torch.float32, **config)
    pipeline = make_pipeline(str(path), torch.float32, cache_backend="cache_dit", cache_config=cache_config, **config)
    backend = get_cache_backend("cache_dit", pipeline.od_config.cache_config)
    assert backend is not None
    backend.enable(pipeline)
    backend.refresh(pipeline, pipeline.default_num_inference_steps)
    return pipeline


@torch.inference_mode()
def latents_of(pipeline: NeuronWanPipeline, **changes: Any) -> torch.Tensor:
    settings = {"seed": 1, "guidance_scale_provided": "guidance_scale" in changes, **SETTINGS, **changes}
    request = pipeline.resolve("a cat", OmniDiffusionSamplingParams(**settings))
    return pipeline.diffuse(pipeline.prepare_latents(request), pipeline.encode(request))


def cached_steps(pipeline: NeuronWanPipeline) -> dict[tuple[str, str], list[int]]:
    assert pipeline.block_cache is not None
    experts = pipeline.block_cache.report()["experts"]
    return {(name, branch): of["cached_steps"] for name, branches in experts.items() for branch, of in branches.items()}


def test_steps_and_values_are_those_of_cache_dit(tmp_path: Path) -> None:
    """The library's own hooks on diffusers' model, against ours on the same weights."""
    settings = CacheSettings(
        Fn_compute_blocks=1,
        Bn_compute_blocks=1,
        max_warmup_steps=2,
        max_cached_steps=6,
        residual_diff_threshold=0.12,
        max_continuous_cached_steps=2,
    )
    path = make_tiny_checkpoint(tmp_path, TinyWan(num_layers=4, experts=1))
    theirs = WanTransformer3DModel.from_pretrained(path / "transformer")
    cache_dit.enable_cache(
        cache_dit.BlockAdapter(
            transformer=theirs,
            blocks=[theirs.blocks],
            forward_pattern=[cache_dit.ForwardPattern.Pattern_2],
            has_separate_cfg=False,
        ),
        cache_config=cache_dit.DBCacheConfig(**vars(settings), num_inference_steps=20, enable_separate_cfg=False),
    )
    ours = load_transformer(WanCheckpoint(path), "transformer", dtype=torch.float32)
    cache = BlockCache({"transformer": ours}, settings, DBCacheRule(settings))
    cache.begin(20)
    generator = torch.Generator().manual_seed(0)
    start, drift = (torch.randn(1, 16, 3, 6, 8, generator=generator) for _ in range(2))
    text = torch.randn(1, 16, 64, generator=generator)
    keys_and_values = ours.project_cross_attention_kv(text)
    for step in range(20):
        # Faster and faster, so that the threshold comes into force.
        inputs = {"hidden_states": start + 0.004 * step**2 * drift, "timestep": torch.tensor([900.0 - 2.0 * step**2])}
        expected = theirs(**inputs, encoder_hidden_states=text, return_dict=False)[0]
        actual = cache.predict(ours, "positive", **inputs, cross_attention_kv_cache=keys_and_values)
        assert relative_l2(actual, expected) <= 1e-5
    cache.end()
    [stats, *_] = cache_dit.summary(theirs, logging=False)
    report = cache.report()["experts"]["transformer"]["positive"]
    assert report["cached_steps"] == stats.cached_steps
    assert len(report["cached_steps"]) == 6
    for step, difference in stats.residual_diffs.items():
        assert report["changes"][int(step)] == pytest.approx(difference, abs=1e-4)

    # A computed step is the model's own forward, also where the first frame has a timestep of its own.
    cache.begin(1)
    inputs |= {"first_frame_timestep": torch.zeros(1), "cross_attention_kv_cache": keys_and_values}
    assert torch.equal(cache.predict(ours, "positive", **inputs), ours(**inputs).sample)


@pytest.fixture(scope="module")
def expected(tiny: Path) -> torch.Tensor:
    """The latents without a cache."""
    return latents_of(cached_pipeline(tiny, None))


def test_a_cache_that_never_hits_changes_no_bit(tiny: Path, expected: torch.Tensor) -> None:
    for config in ({"max_warmup_steps": 8}, {"max_warmup_steps": 0, "residual_diff_threshold": 1e-9}):
        pipeline = cached_pipeline(tiny, config)
        assert torch.equal(latents_of(pipeline), expected)
        assert cached_steps(pipeline) == {
            (name, branch): [] for name in ("transformer", "transformer_2") for branch in ("positive", "negative")
        }


def test_states_are_separate_and_new_for_every_video(
    tiny: Path, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = cached_pipeline(tiny)
    first = latents_of(pipeline)
    steps = cached_steps(pipeline)
    # Each expert and branch counts its own steps, of which the first two are the warm-up.
    assert set(steps) == {(name, branch) for name in pipeline._dit_modules for branch in ("positive", "negative")}
    assert all(reused and min(reused) >= 2 for reused in steps.values())
    assert 0 < relative_l2(first, expected) < 1
    assert pipeline.block_cache is not None
    assert not pipeline.block_cache._kept

    # A video with another number of steps, one without guidance and one that fails leave nothing behind.
    latents_of(pipeline, num_inference_steps=5)
    latents_of(pipeline, guidance_scale=1.0)
    assert set(cached_steps(pipeline)) == {("transformer", "positive"), ("transformer_2", "positive")}
    predict, calls = pipeline.block_cache.predict, iter(range(7))

    def fails_at_last(*arguments: Any, **inputs: Any) -> torch.Tensor:
        if next(calls, None) is None:
            raise RuntimeError("aborted")
        return predict(*arguments, **inputs)

    with monkeypatch.context() as patched:
        patched.setattr(pipeline.block_cache, "predict", fails_at_last)
        with pytest.raises(RuntimeError, match="aborted"):
            latents_of(pipeline)
    assert torch.equal(latents_of(pipeline), first)
    assert cached_steps(pipeline) == steps


def test_one_expert_is_cached_too(tiny: Path) -> None:
    pipeline = cached_pipeline(tiny, boundary_ratio=1.0)
    latents_of(pipeline)
    steps = cached_steps(pipeline)
    assert {name for name, _ in steps} == {"transformer_2"}
    assert all(steps.values())


def test_a_cached_generation_is_full_graphs_and_its_later_ones_compile_nothing(tiny: Path, tmp_path: Path) -> None:
    torch._dynamo.reset()
    # Bit for bit the eager one's decisions: on the CPU the graphs run the same operations.
    eager = cached_pipeline(tiny, boundary_ratio=1.0)
    eager.compiled = True  # so that the padding of the text is not folded
    expected = latents_of(eager)
    pipeline = cached_pipeline(tiny, boundary_ratio=1.0)
    pipeline.compile(backend="neuron_check")
    before = COUNTERS.graphs
    torch.testing.assert_close(latents_of(pipeline), expected, rtol=1e-4, atol=1e-5)
    assert cached_steps(pipeline) == cached_steps(eager)
    # The text encoder; of the one expert the text's projection, the front, the rest computed and the rest reused.
    assert COUNTERS.graphs - before == 1 + 4
    for changes in ({}, {"seed": 2}, {"num_inference_steps": 5}, {"guidance_scale": 1.0}):
        latents_of(pipeline, **changes)
    # Nor does an adapter, being merged into the weights that the graphs take.
    layer = "blocks.1.attn1.to_v"
    changes = {f"{layer}.lora_A.weight": torch.ones(1, 128), f"{layer}.lora_B.weight": torch.ones(128, 1)}
    save_file(changes, tmp_path / "adapter.safetensors")
    manager = pipeline.make_lora_manager()
    manager.set_active_adapter(LoRARequest("adapter", 1, str(tmp_path / "adapter.safetensors")))
    assert relative_l2(latents_of(pipeline), expected) > 0.01
    manager.set_active_adapter(None)
    torch.testing.assert_close(latents_of(pipeline), expected, rtol=1e-4, atol=1e-5)
    assert COUNTERS.graphs - before == 5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"Fn_compute_block": 1}, "unknown setting 'Fn_compute_block'; valid are Fn_compute_blocks, Bn"),
        ({"enable_taylorseer": True}, "enable_taylorseer = True has no effect"),
        ({"max_warmup_steps": -1}, "max_warmup_steps = -1; valid are whole numbers from 0"),
        ({"max_cached_steps": 2.5}, "max_cached_steps = 2.5; valid are whole numbers from -1"),
        ({"residual_diff_threshold": 0}, "residual_diff_threshold = 0; valid are numbers above 0"),
        ({"Fn_compute_blocks": 20, "Bn_compute_blocks": 20}, "= 40, of 40 blocks: none is left"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_cache_config(config: dict[str, Any], message: str) -> None:
    with pytest.raises(WanConfigError, match=message):
        check_cache_config(DiffusionCacheConfig.from_dict(config), num_layers=40)
