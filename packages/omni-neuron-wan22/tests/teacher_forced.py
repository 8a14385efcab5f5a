# SPDX-License-Identifier: Apache-2.0
"""Diffusers' denoising run as a teacher: what its experts see and predict in each step, and ours on the same inputs.

Nothing here imports vLLM, so that ranks start quickly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import WanTransformer3DModel as DiffusersTransformer

from omni_neuron_parallel import (
    NeuronCFGParallelMixin,
    Topology,
    destroy_parallel,
    get_group,
    get_topology,
    initialize_parallel,
)
from omni_neuron_wan22 import WanCheckpoint, WanTransformer3DModel, load_transformer
from vllm_omni_neuron.capture import Ranks, TensorCapture

# Tokens replicated or split over TP, features split over TP.
CAPTURED = ["blocks.0-1", "blocks.0.attn1", "blocks.1.attn2.q", "blocks.1.ffn", "proj_out"]
GUIDANCE = {"transformer": 4.0, "transformer_2": 3.0}


def combine(positive: torch.Tensor, negative: torch.Tensor, scale: float) -> torch.Tensor:
    """Both branches of the guidance in one (Ho and Salimans 2022), as diffusers does it."""
    return negative + scale * (positive - negative)


class Guidance(NeuronCFGParallelMixin):
    """Our guidance over CFG ranks, without vLLM-Omni's mixin, which has it in a CFG group of one."""

    def predict_noise(self, model: Any, **inputs: Any) -> torch.Tensor:
        return model(**inputs).sample

    def combine_cfg_noise(self, positive: Any, negative: Any, scale: float, normalize: bool = False) -> torch.Tensor:
        return combine(positive[0], negative[0], scale)

    def __call__(self, scale: float, positive: dict[str, Any], negative: dict[str, Any]) -> torch.Tensor:
        if get_topology().cfg > 1:
            return self.predict_noise_maybe_with_cfg(True, scale, positive, negative, cfg_normalize=False)
        return combine(self.predict_noise(**positive), self.predict_noise(**negative), scale)


class TeacherStep(NamedTuple):
    """One guided step: `inputs` of the expert beside its text, the texts, and the combined prediction in float32."""

    expert: str
    timestep: float
    inputs: dict[str, torch.Tensor]
    texts: tuple[torch.Tensor, torch.Tensor]
    prediction: torch.Tensor


def record(pipeline: Any, **arguments: Any) -> list[TeacherStep]:
    """The steps of a guided run of a diffusers pipeline, text-to-video or image-to-video."""
    calls: list[tuple[str, dict[str, Any], torch.Tensor]] = []
    for expert in GUIDANCE:
        getattr(pipeline, expert).register_forward_hook(
            lambda module, _, inputs, output, expert=expert: calls.append((expert, dict(inputs), output[0].clone())),
            with_kwargs=True,
        )
    pipeline.set_progress_bar_config(disable=True)
    pipeline(
        **arguments,
        guidance_scale=GUIDANCE["transformer"],
        guidance_scale_2=GUIDANCE["transformer_2"],
        output_type="latent",
    )
    steps = []
    for (expert, inputs, positive), (_, negative_inputs, negative) in zip(calls[::2], calls[1::2], strict=True):
        texts = inputs.pop("encoder_hidden_states"), negative_inputs["encoder_hidden_states"]
        tensors = {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        prediction = combine(positive, negative, GUIDANCE[expert])
        steps.append(TeacherStep(expert, float(inputs["timestep"].flatten()[0]), tensors, texts, prediction))
    return steps


def diffusers_in_low_precision(path: Path, steps: list[TeacherStep]) -> list[torch.Tensor]:
    """Diffusers' experts in bfloat16 on the teacher's inputs."""
    experts = {
        expert: DiffusersTransformer.from_pretrained(path, subfolder=expert, dtype=torch.bfloat16)
        for expert in GUIDANCE
    }
    predictions = []
    for step in steps:
        inputs = _in_dtype(step.inputs, torch.bfloat16)
        branches = [
            experts[step.expert](**inputs, encoder_hidden_states=text.to(torch.bfloat16), return_dict=False)[0]
            for text in step.texts
        ]
        predictions.append(combine(*branches, GUIDANCE[step.expert]).float())
    return predictions


def ours(topology: Topology, path: str, teacher: str, dtypes: list[torch.dtype]) -> list[list[torch.Tensor]]:
    """Our experts' predictions on this rank for the steps in the file `teacher`, by dtype."""
    steps = read_steps(teacher)
    with _layout(topology):
        return [_predict(Guidance(), steps, _experts(path, dtype), dtype) for dtype in dtypes]


def capture(topology: Topology, path: str, teacher: str, folder: str, sequence_parallel: bool) -> None:
    """Capture the modules of `CAPTURED` in the teacher's first and last step, in float32, as an engine's workers do."""
    steps = [read_steps(teacher)[index] for index in (0, -1)]
    with _layout(topology):
        experts = _experts(path, torch.float32, sequence_parallel=sequence_parallel)
        guidance, ranks = Guidance(), Ranks(*(get_group(axis).rank for axis in ("tp", "cp", "cfg")))
        recorder = TensorCapture({"modules": CAPTURED, "capture_dir": folder}, experts, lambda: ranks)
        recorder.observe(guidance)
        recorder.enable()
        _predict(guidance, steps, experts, torch.float32)


def read_steps(teacher: str) -> list[TeacherStep]:
    return [TeacherStep(*step) for step in torch.load(teacher, weights_only=True)]


@contextlib.contextmanager
def _layout(topology: Topology) -> Iterator[None]:
    if topology.world_size > 1:
        initialize_parallel(topology)
    try:
        with torch.no_grad():
            yield
    finally:
        destroy_parallel()  # other tests use the pool with other topologies


def _experts(path: str, dtype: torch.dtype, **options: Any) -> dict[str, WanTransformer3DModel]:
    checkpoint = WanCheckpoint(Path(path))
    return {expert: load_transformer(checkpoint, expert, dtype=dtype, **options) for expert in checkpoint.experts}


def _predict(
    guidance: Guidance, steps: list[TeacherStep], experts: dict[str, WanTransformer3DModel], dtype: torch.dtype
) -> list[torch.Tensor]:
    caches = {
        expert: [model.project_cross_attention_kv(text.to(dtype)) for text in steps[0].texts]
        for expert, model in experts.items()
    }
    predictions = []
    for step in steps:
        shared = {"model": experts[step.expert], **_in_dtype(step.inputs, dtype)}
        positive, negative = (shared | {"cross_attention_kv_cache": cache} for cache in caches[step.expert])
        predictions.append(guidance(GUIDANCE[step.expert], positive, negative).float())
    return predictions


def _in_dtype(inputs: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: value if name == "timestep" else value.to(dtype) for name, value in inputs.items()}
