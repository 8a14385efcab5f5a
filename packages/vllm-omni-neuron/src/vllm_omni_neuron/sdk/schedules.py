# SPDX-License-Identifier: Apache-2.0
"""Timesteps of flow matching as diffusers' pipelines set them. No vLLM needed."""

from __future__ import annotations

from typing import Any

import torch

FLOW_MATCHING = "FlowMatchEulerDiscreteScheduler"


def flow_match_timesteps(scheduler: Any, steps: int, *, tokens: int | None = None) -> Any:
    """Set the timesteps of a flow-matching scheduler: evenly spaced in sigma, from 1 to 1 / steps, before its shift.

    A scheduler with `use_dynamic_shifting` shifts them by μ, which is linear in the image's tokens (Esser et al. 2024,
    section 5.3.2, in diffusers' form): its configuration has two points, `base_image_seq_len` with `base_shift` and
    `max_image_seq_len` with `max_shift`.

    Args:
        scheduler: diffusers' `FlowMatchEulerDiscreteScheduler`, new.
        steps: of the solver.
        tokens: of the image, where the scheduler shifts dynamically; else without effect.

    Returns:
        The scheduler, ready for the first step.

    Raises:
        ValueError: another scheduler, or one that shifts dynamically and no tokens.
    """
    if type(scheduler).__name__ != FLOW_MATCHING:
        raise ValueError(f"the scheduler is {type(scheduler).__name__}: valid is {FLOW_MATCHING}")
    config = scheduler.config
    mu = None
    if config.use_dynamic_shifting:
        if tokens is None:
            raise ValueError("the scheduler has use_dynamic_shifting: tokens, of the image, are needed")
        fewest, most = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
        low, high = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
        mu = low + (high - low) * (tokens - fewest) / (most - fewest)
    scheduler.set_timesteps(sigmas=torch.linspace(1.0, 1 / steps, steps).tolist(), mu=mu)
    scheduler.set_begin_index(0)
    return scheduler
