# SPDX-License-Identifier: Apache-2.0
"""The toy pipeline: prompt, seed, size and steps decide the frames; one weight is split over the ranks."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size, get_tp_group
from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
from vllm_omni.diffusion.request import OmniDiffusionRequest

HIDDEN = 8  # must be divisible by the tensor-parallel size
DEFAULT_STEPS = 4


def get_toy_pre_process_func(od_config: OmniDiffusionConfig) -> Callable[[OmniDiffusionRequest], OmniDiffusionRequest]:
    """Check the configuration once, before any worker starts; the function returned checks each request."""
    tp = od_config.parallel_config.tensor_parallel_size
    if HIDDEN % tp:
        valid = [size for size in range(1, HIDDEN + 1) if HIDDEN % size == 0]
        raise ValueError(
            f"tensor_parallel_size={tp} does not divide the toy model's {HIDDEN} channels; use one of {valid}"
        )

    def pre_process(request: OmniDiffusionRequest) -> OmniDiffusionRequest:
        if not prompt_of(request):
            raise ValueError("the prompt is empty")
        return request

    return pre_process


def prompt_of(request: OmniDiffusionRequest) -> str:
    """The request's text: a prompt is a string or a dict."""
    prompt = request.prompt
    return prompt if isinstance(prompt, str) else prompt.get("prompt") or ""


class PromptColour(nn.Module):
    """The prompt's colour; the hidden channels, over which it sums, are split over the tensor-parallel ranks."""

    def __init__(self) -> None:
        super().__init__()
        tp, self.rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        full = torch.linspace(-1.0, 1.0, HIDDEN * 3, dtype=torch.float32).reshape(HIDDEN, 3)
        self.weight = nn.Parameter(full.chunk(tp)[self.rank].clone(), requires_grad=False)

    def forward(self, embedding: torch.Tensor) -> torch.Tensor:
        """The colour `[3]` of an embedding `[HIDDEN]`; every rank returns the same one."""
        mine = embedding.chunk(HIDDEN // self.weight.shape[0])[self.rank]
        summed: torch.Tensor = get_tp_group().all_reduce(mine @ self.weight)
        return torch.tanh(summed)


class ToyDenoiser(nn.Module):
    """Pulls every pixel towards the prompt's colour."""

    def __init__(self) -> None:
        super().__init__()
        self.colour = PromptColour()

    def forward(self, latents: torch.Tensor, embedding: torch.Tensor, timestep: float) -> torch.Tensor:
        """Noise estimate `[frames, height, width, 3]` for latents of that shape and an embedding `[HIDDEN]`."""
        return (latents - self.colour(embedding)) * timestep


class ToyVideoPipeline(nn.Module):
    """What vLLM-Omni's runner needs of a pipeline: `__init__(od_config=…)`, `load_weights`, `forward`, `device`."""

    # Declared components: the runner compiles and observes these, whatever they are called.
    _dit_modules: ClassVar[list[str]] = ["denoiser"]
    _encoder_modules: ClassVar[list[str]] = []
    _vae_modules: ClassVar[list[str]] = []

    # Nothing for vLLM-Omni's own weight loader; a real model loads its safetensors in `load_weights`.
    weights_sources: ClassVar[tuple[()]] = ()

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = "") -> None:
        super().__init__()
        self.od_config = od_config
        self.device = torch.device("cpu")
        self.denoiser = ToyDenoiser()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Names of the parameters that are loaded; the toy makes its own."""
        return {name for name, _ in self.named_parameters()}

    def predict_noise(self, **inputs: Any) -> torch.Tensor:
        """One call of the denoiser: the seam that tensor capture observes."""
        noise: torch.Tensor = self.denoiser(**inputs)
        return noise

    def forward(self, batch: Any) -> DiffusionOutput:
        """Frames `[frames, height, width, 3]`, uint8."""
        [request] = batch.requests
        sampling = request.sampling_params
        shape = (sampling.num_frames, sampling.height, sampling.width, 3)
        # The runner has made the generator from the seed; the noise is drawn whole, in float32, on every rank.
        latents = torch.randn(shape, generator=sampling.generator, dtype=torch.float32)
        digest = hashlib.sha256(prompt_of(request).encode()).digest()[:HIDDEN]
        embedding = torch.tensor(list(digest), dtype=torch.float32) / 255
        steps = sampling.num_inference_steps or DEFAULT_STEPS
        pause_s = float((sampling.extra_args or {}).get("seconds_per_step", 0.0))
        started = time.perf_counter()
        for step in range(steps):
            timestep = 1.0 - step / steps
            latents = latents - self.predict_noise(latents=latents, embedding=embedding, timestep=timestep) / 2
            time.sleep(pause_s)
        video = ((latents.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        return DiffusionOutput(
            output={"payload": {"video": video}, "metadata": {"video": {"fps": 8}}},
            stage_durations={"denoise": time.perf_counter() - started},
        )
