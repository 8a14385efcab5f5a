# SPDX-License-Identifier: Apache-2.0
"""A denoising run on any layout, in worlds smaller than a pool's as well. Importable by spawned processes.

Nothing here imports vLLM, which would cost each of eight ranks half a minute of CPU time: the loop is that of
`NeuronWanPipeline.diffuse` without the engine around it (see test_parity_trajectory for the pipeline itself).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from omni_neuron_parallel import (
    AxisGroup,
    ContextMethod,
    NeuronCFGParallelMixin,
    SequenceShard,
    Topology,
    destroy_parallel,
    initialize_parallel,
)
from omni_neuron_wan22 import WanCheckpoint, WanTransformer3DModel, load_transformer, make_scheduler
from omni_neuron_wan22.cache import BlockCache
from omni_neuron_wan22.cache_settings import CacheSettings

STEPS, SHIFT, BOUNDARY = 20, 5.0, 0.875


class SequentialGuidance:
    """What vLLM-Omni's mixin does in a CFG group of one, or without guidance."""

    def predict_noise_maybe_with_cfg(
        self,
        do_true_cfg: bool,
        true_cfg_scale: float,
        positive_kwargs: dict[str, Any],
        negative_kwargs: dict[str, Any],
        cfg_normalize: bool = True,
        output_slice: int | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        if not do_true_cfg:
            return self.predict_noise(**positive_kwargs)
        positive, negative = ((self.predict_noise(**branch),) for branch in (positive_kwargs, negative_kwargs))
        return self.combine_cfg_noise(positive, negative, true_cfg_scale, cfg_normalize)

    def combine_cfg_noise(self, positive: Any, negative: Any, scale: float, normalize: bool = False) -> torch.Tensor:
        return negative[0] + scale * (positive[0] - negative[0])


class Guidance(NeuronCFGParallelMixin, SequentialGuidance):
    cache: BlockCache | None = None

    def predict_noise(self, model: WanTransformer3DModel, negative: bool, **inputs: Any) -> torch.Tensor:
        if self.cache is not None:
            return self.cache.predict(model, "negative" if negative else "positive", **inputs)
        return model(**inputs).sample


class ThresholdRule:
    """Reuse where the change is small. cache-dit's rule, which has more to it, takes long to import on eight ranks."""

    def begin(self) -> None: ...

    def may_reuse(self, key: str, change: float | None) -> bool:
        return change is not None and change < 0.15


@contextlib.contextmanager
def nan_pads() -> Iterator[None]:
    """Every shard's pads hold NaN instead of zero: whatever mixed one with a token would turn that to NaN."""
    original = SequenceShard.split

    def split(shard: SequenceShard, tensor: torch.Tensor, dim: int, place: torch.Tensor | None = None) -> torch.Tensor:
        rows = original(shard, tensor, dim, place)
        if shard.num_pad:
            rows.narrow(dim, shard.valid_length, shard.num_pad).fill_(torch.nan)
        return rows

    SequenceShard.split = split
    try:
        yield
    finally:
        SequenceShard.split = original


@nan_pads()
def denoise(
    path: str,
    latent_shape: tuple[int, ...],
    guidance_scale: float,
    sequence_parallel: bool,
    context_method: ContextMethod,
) -> torch.Tensor:
    """Final latents of a run through both experts, guided where the scale is above 1."""
    return _denoise(Guidance(), path, latent_shape, guidance_scale, sequence_parallel, context_method)


@nan_pads()
def denoise_cached(
    path: str, latent_shape: tuple[int, ...], guidance_scale: float, sequence_parallel: bool
) -> tuple[torch.Tensor, dict[tuple[str, str], list[Any]], dict[str, Any]]:
    """As `denoise` with a cache: the latents, what this rank has recorded, and the report."""
    guidance = Guidance()
    latents = _denoise(guidance, path, latent_shape, guidance_scale, sequence_parallel, "auto", cached=True)
    assert guidance.cache is not None
    records = {key: list(steps) for key, steps in guidance.cache._records.items()}
    guidance.cache.end()
    return latents, records, guidance.cache.report()["experts"]


def _denoise(
    guidance: Guidance,
    path: str,
    latent_shape: tuple[int, ...],
    guidance_scale: float,
    sequence_parallel: bool,
    context_method: ContextMethod,
    cached: bool = False,
) -> torch.Tensor:
    checkpoint = WanCheckpoint(Path(path))
    options = {"dtype": torch.float32, "sequence_parallel": sequence_parallel, "context_method": context_method}
    experts = [load_transformer(checkpoint, expert, **options) for expert in checkpoint.experts]
    if cached:
        settings = CacheSettings(max_warmup_steps=1)
        guidance.cache = BlockCache(dict(zip(checkpoint.experts, experts, strict=True)), settings, ThresholdRule())
        guidance.cache.begin(STEPS)
    generator = torch.Generator().manual_seed(7)
    latents = torch.randn(latent_shape, generator=generator)
    texts = [torch.randn(1, 6, experts[0].config.text_dim, generator=generator) for _ in range(2)]
    caches = {expert: [expert.project_cross_attention_kv(text) for text in texts] for expert in experts}
    scheduler = make_scheduler("unipc", SHIFT)
    scheduler.set_timesteps(STEPS)
    for timestep in scheduler.timesteps:
        expert = experts[int(timestep < BOUNDARY * 1000)]
        shared = {"model": expert, "hidden_states": latents, "timestep": timestep.expand(1)}
        positive, negative = (
            shared | {"cross_attention_kv_cache": cache, "negative": number == 1}
            for number, cache in enumerate(caches[expert])
        )
        prediction = guidance.predict_noise_maybe_with_cfg(
            guidance_scale > 1.0, guidance_scale, positive, negative, cfg_normalize=False
        )
        latents = scheduler.step(prediction, timestep, latents).prev_sample
    return latents


@nan_pads()
def forward_once(path: str, latent_shape: tuple[int, ...], context_method: ContextMethod) -> torch.Tensor:
    """One forward of the high-noise expert on random latents."""
    model = _expert(path, context_method=context_method)
    generator = torch.Generator().manual_seed(3)
    latents = torch.randn(latent_shape, generator=generator)
    text = torch.randn(1, 6, model.config.text_dim, generator=generator)
    return model(latents, torch.tensor([500.0]), text).sample


def traced_forward(path: str, sequence_parallel: bool) -> tuple[bool, int]:
    """Whether a compiled forward gives the eager one's values, and the number of full graphs that it took."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    model = _expert(path, sequence_parallel=sequence_parallel)
    inputs = _small_inputs(model)
    eager = model(*inputs).sample
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)(*inputs).sample
    return torch.allclose(compiled, eager, rtol=1e-4, atol=1e-5), len(graphs)


def collectives_by_module(path: str, axis: str) -> list[str]:
    """What one forward asks of the groups of `axis`, as "module: collective"; "model" outside of the blocks' parts."""
    model = _expert(path)
    asked: list[str] = []
    running = ["model"]

    def leave(*_: Any) -> None:
        running.pop()

    for name, module in model.named_modules():
        if name.endswith(("attn1", "attn2", "ffn")):
            module.register_forward_pre_hook(lambda *_, name=name: running.append(name))
            module.register_forward_hook(leave)

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: AxisGroup, *arguments: Any, **options: Any) -> Any:
            if group.axis == axis and group.size > 1:
                asked.append(f"{running[-1]}: {name}")
            return original(group, *arguments, **options)

        return call

    originals = {name: getattr(AxisGroup, name) for name in ("all_reduce", "all_gather", "reduce_scatter")}
    for name, original in originals.items():
        setattr(AxisGroup, name, counting(name, original))
    try:
        model(*_small_inputs(model))
    finally:
        for name, original in originals.items():
            setattr(AxisGroup, name, original)
    return asked


def _expert(path: str, **options: Any) -> WanTransformer3DModel:
    return load_transformer(WanCheckpoint(Path(path)), "transformer", dtype=torch.float32, **options)


def _small_inputs(model: WanTransformer3DModel) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latents of 9 tokens, a timestep and a text."""
    return torch.ones(1, 16, 1, 6, 6), torch.tensor([500.0]), torch.ones(1, 6, model.config.text_dim)


@functools.cache
def _rank_in_pool() -> int:
    # Asked for the first time in the pool's own world.
    return dist.get_rank()


def in_world(topology: Topology, store: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """`function(*arguments)` in a world of the first `topology.world_size` ranks of the pool; the others return None.

    One pool serves every world that is not larger than it: to start a process costs more than a denoising run.
    """
    rank = _rank_in_pool()
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank >= topology.world_size:
        return None
    deadline = timedelta(seconds=120)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=topology.world_size, timeout=deadline
    )
    initialize_parallel(topology)
    try:
        with torch.no_grad():
            return function(*arguments)
    finally:
        destroy_parallel()
