# SPDX-License-Identifier: Apache-2.0
"""The settings of Cache-DiT: which of vLLM-Omni's `cache_config` mean something here, and what values they may have."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from omni_neuron_wan22.config import WanConfigError


@dataclass(frozen=True)
class CacheSettings:
    """When a step may reuse what the middle blocks of an earlier one added; vLLM-Omni's names and defaults.

    Each expert counts its own steps, and so does each of the two branches of guidance.

    Attributes:
        Fn_compute_blocks: first blocks, which every step computes and whose change decides.
        Bn_compute_blocks: last blocks, which every step computes.
        max_warmup_steps: steps that are computed whole, from the expert's first one.
        max_cached_steps: steps that reuse, at most; -1 for no limit.
        residual_diff_threshold: reuse below this relative change of what the first blocks add; 1 or more for always.
        max_continuous_cached_steps: steps in a row that reuse, at most; -1 for no limit.
    """

    Fn_compute_blocks: int = 1
    Bn_compute_blocks: int = 0
    max_warmup_steps: int = 4
    max_cached_steps: int = -1
    residual_diff_threshold: float = 0.24
    max_continuous_cached_steps: int = 3


_LEAST = {
    "Fn_compute_blocks": 1,
    "Bn_compute_blocks": 0,
    "max_warmup_steps": 0,
    "max_cached_steps": -1,
    "max_continuous_cached_steps": -1,
}


def check_cache_config(config: Any, num_layers: int) -> CacheSettings:
    """The settings in vLLM-Omni's `cache_config`.

    Args:
        config: vLLM-Omni's `DiffusionCacheConfig`, which holds the settings of all its cache backends.
        num_layers: blocks of the model.

    Raises:
        WanConfigError: an unknown setting, one of another backend or of a part of cache-dit that is not here, or a
            value that is not valid.
    """
    names = [field.name for field in dataclasses.fields(CacheSettings)]
    known = f"valid are {', '.join(names)}"
    for name in config._extra_params:
        raise WanConfigError(f"cache_config has the unknown setting {name!r}; {known}")
    defaults = type(config)()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in names and not field.name.startswith("_") and value != getattr(defaults, field.name):
            raise WanConfigError(
                f"cache_config: {field.name} = {value!r} has no effect with omni-neuron-wan22, leave it unset; {known}"
            )
    settings = CacheSettings(**{name: getattr(config, name) for name in names})
    for name, least in _LEAST.items():
        value = getattr(settings, name)
        if type(value) is not int or value < least:
            raise WanConfigError(f"cache_config: {name} = {value!r}; valid are whole numbers from {least} on")
    threshold = settings.residual_diff_threshold
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 < threshold < math.inf:
        raise WanConfigError(
            f"cache_config: residual_diff_threshold = {threshold!r}; valid are numbers above 0, such as 0.24"
        )
    computed = settings.Fn_compute_blocks + settings.Bn_compute_blocks
    if computed >= num_layers:
        raise WanConfigError(
            f"cache_config: Fn_compute_blocks + Bn_compute_blocks = {computed}, of {num_layers} blocks: none is left "
            f"to skip; together they are at most {num_layers - 1}"
        )
    return settings
