# SPDX-License-Identifier: Apache-2.0
"""The denoising loop: the expert and guidance of every step, what it keeps between steps, checks of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.distributed.cfg_parallel import CFGParallelMixin
from vllm_omni.diffusion.forward_context import DenoiseProgressMixin
from vllm_omni.diffusion.models.progress_bar import ProgressBarMixin

from omni_neuron_parallel import (
    NeuronCFGParallelMixin,
    check_rank_agreement,
    collective_step,
    get_group,
    get_topology,
)
from omni_neuron_runtime import env
from omni_neuron_wan22.cache import BlockCache, Branch
from omni_neuron_wan22.checkpoint import Expert, WanCheckpoint
from omni_neuron_wan22.conditioning import ImageCondition
from omni_neuron_wan22.request import GenerationRequest
from omni_neuron_wan22.scheduler import make_scheduler
from omni_neuron_wan22.stage_clock import StageClock
from omni_neuron_wan22.transformer import CrossAttentionKV, WanTransformer3DModel


@dataclass
class Trajectory:
    """What one denoising run uses and records.

    Attributes:
        request: what was asked for.
        prompt_embeds: the encoded prompt `[1, L, text_dim]` and the bias that goes with it; see `fold_padding`.
        negative_prompt_embeds: the same of the negative prompt; None where no step uses guidance.
        cross_attention: keys and values in every block, by expert and by whether the text is the negative one.
        condition: what the request's image became; None without one.
        steps: steps taken so far of the video that is made, by expert.
    """

    request: GenerationRequest
    prompt_embeds: tuple[torch.Tensor, torch.Tensor | None]
    negative_prompt_embeds: tuple[torch.Tensor, torch.Tensor | None] | None
    condition: ImageCondition | None = None
    cross_attention: dict[tuple[Expert, bool], CrossAttentionKV] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=lambda: {"transformer": 0, "transformer_2": 0})


class WanDenoising(NeuronCFGParallelMixin, CFGParallelMixin, ProgressBarMixin, DenoiseProgressMixin):
    """The loop of a pipeline whose experts are its attributes `transformer` and `transformer_2`."""

    od_config: OmniDiffusionConfig
    checkpoint: WanCheckpoint
    device: torch.device
    clock = StageClock()  # a running request has its own
    block_cache: BlockCache | None = None  # where the engine's cache_backend is cache_dit
    if TYPE_CHECKING:  # from vLLM-Omni's mixins, whose types mypy does not follow (see pyproject.toml)
        progress_bar: Callable[..., Any]
        record_denoise_step: Callable[..., None]

    def diffuse(self, latents: torch.Tensor, trajectory: Trajectory) -> torch.Tensor:
        """Denoise `latents` (float32) over all steps of the request, with the expert that each timestep belongs to."""
        request = trajectory.request
        # A scheduler of its own for every request: nothing of the last one's shift or solver can stick.
        self.scheduler = make_scheduler(request.sample_solver, request.flow_shift)
        self.scheduler.set_timesteps(request.num_inference_steps, device=self.device)
        trajectory.steps = dict.fromkeys(trajectory.steps, 0)
        if self.block_cache is not None:
            self.block_cache.begin(request.num_inference_steps)
        check_ranks = env.get("OMNI_NEURON_CHECK_RANK_AGREEMENT")
        if check_ranks:
            check_rank_agreement(latents, "initial noise")
        timesteps = self.scheduler.timesteps
        with self.progress_bar(total=len(timesteps)) as progress:
            for step, (timestep, value) in enumerate(zip(timesteps, timesteps.tolist(), strict=True)):
                self.record_denoise_step(step, timestep, total_steps=len(timesteps))
                expert, scale = self._expert(value, request)
                with self.clock.step(expert):
                    with collective_step(f"denoising step {step + 1} of {len(timesteps)}"):
                        prediction = self._predict(latents, timestep, expert, scale, trajectory)
                    latents = self.scheduler.step(prediction.float(), timestep, latents).prev_sample
                trajectory.steps[expert] += 1
                if check_ranks:
                    check_rank_agreement(latents, f"latents after step {step + 1} of {len(timesteps)}")
                progress.update()
        if self.block_cache is not None:
            self.block_cache.end()
        return latents if trajectory.condition is None else trajectory.condition.finish(latents)

    def predict_noise(
        self, current_model: nn.Module | None = None, branch: Branch = "positive", **kwargs: Any
    ) -> torch.Tensor:
        """One forward of an expert; vLLM-Omni's guidance mixin calls it once a branch."""
        assert current_model is not None
        if self.block_cache is not None:
            assert isinstance(current_model, WanTransformer3DModel)
            return self.block_cache.predict(current_model, branch, **kwargs)
        return current_model(**kwargs, return_dict=False)[0]

    def _expert(self, timestep: float, request: GenerationRequest) -> tuple[Expert, float]:
        """The expert of a timestep and its guidance; at the boundary itself it is still the high-noise one."""
        boundary = request.boundary_ratio * self.scheduler.config.num_train_timesteps
        low_noise = request.boundary_ratio == 1.0 or timestep < boundary
        scale = request.guidance_scale_2 if low_noise else request.guidance_scale
        expert: Expert = "transformer_2" if low_noise and "transformer_2" in self.checkpoint.experts else "transformer"
        return expert, scale

    def _predict(
        self, latents: torch.Tensor, timestep: torch.Tensor, expert: Expert, scale: float, trajectory: Trajectory
    ) -> torch.Tensor:
        guided = scale > 1.0
        # With CFG parallelism this rank computes one branch, and needs the text of that one only.
        branches, branch = get_topology().cfg, get_group("cfg").rank
        # Of one dtype, whichever solver made it: another one would be another graph.
        timestep = timestep.float().expand(latents.shape[0])
        shared: dict[str, Any] = {"current_model": getattr(self, expert), "hidden_states": latents}
        if trajectory.condition is not None:
            shared |= trajectory.condition.inputs(latents, timestep)
        shared |= {"hidden_states": shared["hidden_states"].to(self.od_config.dtype), "timestep": timestep}

        def inputs(negative: bool) -> dict[str, Any]:
            if guided and branches > 1 and branch != int(negative):
                return shared
            return shared | {
                "branch": "negative" if negative else "positive",
                "cross_attention_kv_cache": self._cross_attention(expert, negative, trajectory),
            }

        prediction = self.predict_noise_maybe_with_cfg(
            do_true_cfg=guided,
            true_cfg_scale=scale,
            positive_kwargs=inputs(negative=False),
            negative_kwargs=inputs(negative=True) if guided else None,
            cfg_normalize=False,
        )
        assert isinstance(prediction, torch.Tensor)
        return prediction

    def _cross_attention(self, expert: Expert, negative: bool, trajectory: Trajectory) -> CrossAttentionKV:
        """The text's keys and values in this expert: projected at its first step, reused at all others."""
        key = (expert, negative)
        if key not in trajectory.cross_attention:
            # The experts follow each other and never alternate, so the last one's need not be kept.
            trajectory.cross_attention = {k: v for k, v in trajectory.cross_attention.items() if k[0] == expert}
            model: WanTransformer3DModel = getattr(self, expert)
            embeds = trajectory.negative_prompt_embeds if negative else trajectory.prompt_embeds
            assert embeds is not None
            condition = trajectory.condition
            image = [] if condition is None or condition.image_embeds is None else [condition.image_embeds]
            trajectory.cross_attention[key] = model.project_cross_attention_kv(*embeds, *image)
        return trajectory.cross_attention[key]
