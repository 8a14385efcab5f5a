# SPDX-License-Identifier: Apache-2.0
"""The shipped shapes checkpoint follows prompts, and the judge notices an engine that is broken on purpose."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_neuron_shapes import FRAMES, HEIGHT, WIDTH, model_path
from omni_neuron_testkit import judge, subject_of

sys.path.insert(0, str(Path(__file__).parents[1] / "tools" / "shapes"))
from evaluate import FAULTS, load_pipeline

# Pairs of prompt and seed that the sound checkpoint gets right (see its model card for the whole grid).
PROMPTS = {
    "a red circle moving right": 0,
    "the blue square is moving up": 1,
    "green triangle moving left": 2,
    "a square that is yellow moves down": 3,
}


def generate(pipeline: Any, prompt: str, negative_prompt: str, seed: int) -> Any:
    return pipeline(
        prompt=prompt,
        negative_prompt=negative_prompt,
        height=HEIGHT,
        width=WIDTH,
        num_frames=FRAMES,
        num_inference_steps=12,
        guidance_scale=4.0,
        generator=torch.Generator().manual_seed(seed),
    ).frames[0]


def well_formed(pipeline: Any, *, swap_prompts: bool = False) -> int:
    """How many of `PROMPTS` are shown, by the strict gate."""
    right = 0
    for prompt, seed in PROMPTS.items():
        texts = ("", prompt) if swap_prompts else (prompt, "")
        right += judge(generate(pipeline, *texts, seed)).matches(subject_of(prompt), strict=True)
    return right


def test_sound_engine_follows_the_prompts():
    assert well_formed(load_pipeline(model_path(), None)) == len(PROMPTS)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_seen(fault):
    assert well_formed(load_pipeline(model_path(), fault)) <= len(PROMPTS) - 2


def test_swapped_prompts_are_seen():
    assert well_formed(load_pipeline(model_path(), None), swap_prompts=True) == 0
