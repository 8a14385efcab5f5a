# SPDX-License-Identifier: Apache-2.0
"""Cache-DiT as vLLM-Omni switches it on: its rule from the cache-dit library, its tensors from `BlockCache`.

vLLM-Omni's own enabler for Wan2.2 hangs the library's hooks into the blocks. They do not serve here:

- every call leaves the graph (`torch.compiler.disable`), which a full graph does not allow;
- they tell the branches of guidance apart by counting calls, which goes wrong where a CFG rank computes one branch
  only, or where guidance covers some of the steps;
- with several ranks they average over the whole world, the other branch and the pads included, by an operation that
  gloo does not have.

What is left of the library is what decides: warm-up, limits and threshold of DBCache.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from cache_dit import DBCacheConfig
from cache_dit.caching.cache_contexts import CachedContextManager
from vllm_omni.diffusion.cache.cachedit import CUSTOM_DIT_ENABLERS, CacheDiTEnableResult

from omni_neuron_wan22.cache import BlockCache
from omni_neuron_wan22.cache_settings import CacheSettings, check_cache_config
from omni_neuron_wan22.transformer import WanTransformer3DModel

_PREFIX = "omni_neuron_wan22_Fn_residual"


class DBCacheRule:
    """DBCache's rule, one state a key; see `omni_neuron_wan22.cache.StepRule`."""

    def __init__(self, settings: CacheSettings):
        self._config = DBCacheConfig(**dataclasses.asdict(settings), enable_separate_cfg=False)
        self._contexts = CachedContextManager("omni_neuron_wan22", persistent_context=True)

    def begin(self) -> None:
        """Forget all steps."""
        self._contexts.clear_contexts()

    def may_reuse(self, key: str, change: float | None) -> bool:
        """Count a step of `key` and decide it, by the relative change since its last computed step."""
        contexts = self._contexts
        contexts.set_context(key, cache_config=self._config)
        contexts.mark_step_begin()
        # The library compares mean|a − b| / mean|a| of two tensors with the threshold. Two numbers of that ratio stand
        # for the tokens of all ranks, which no rank has.
        if change is None:
            return bool(contexts.can_cache(torch.zeros(1), prefix=_PREFIX))
        contexts.set_Fn_buffer(torch.ones(1, dtype=torch.float64), prefix=_PREFIX)
        reuse = bool(contexts.can_cache(torch.tensor([1.0 - change], dtype=torch.float64), prefix=_PREFIX))
        if reuse:
            contexts.add_cached_step()
        return reuse


def enable_cache_dit(pipeline: Any, cache_config: Any) -> CacheDiTEnableResult:
    """Give a pipeline its `block_cache`; vLLM-Omni's cache backend calls this once, after loading.

    The pipeline itself begins a new state for every video, whose steps it knows.
    """
    experts: dict[str, WanTransformer3DModel] = {name: getattr(pipeline, name) for name in pipeline._dit_modules}
    settings = check_cache_config(cache_config, min(len(expert.blocks) for expert in experts.values()))
    pipeline.block_cache = BlockCache(experts, settings, DBCacheRule(settings))

    def refresh(pipeline: Any, num_inference_steps: int, verbose: bool = True) -> None:
        pipeline.block_cache.begin(num_inference_steps)

    return CacheDiTEnableResult(refresh, tuple(experts.values()))


def register_cache_dit(class_name: str) -> None:
    """Have vLLM-Omni's cache backend call `enable_cache_dit` for pipelines of this class."""
    CUSTOM_DIT_ENABLERS[class_name] = enable_cache_dit
