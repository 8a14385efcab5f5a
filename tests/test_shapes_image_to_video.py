# SPDX-License-Identifier: Apache-2.0
"""Image-to-video on the trained sibling: the image decides what moves, the prompt where to.

The pipeline is ours as a worker has it, without an engine around it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from omni_neuron_shapes import FLOW_SHIFT, FRAMES, HEIGHT, WIDTH, write_image_to_video
from omni_neuron_testkit import judge, random_scenes, render, subject_of
from omni_neuron_wan22 import NeuronWanI2VPipeline

SIZE = {"height": HEIGHT, "width": WIDTH, "num_frames": FRAMES}


def first_frame(caption: str, seed: int) -> Image.Image:
    scene = next(random_scenes(seed, frames=FRAMES, height=HEIGHT, width=WIDTH))
    clip = render(subject_of(caption), scene, frames=FRAMES, height=HEIGHT, width=WIDTH)
    return Image.fromarray((clip[0] * 255).round().astype(np.uint8))


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> NeuronWanI2VPipeline:
    folder = write_image_to_video(tmp_path_factory.mktemp("i2v"))
    pipeline = NeuronWanI2VPipeline(
        od_config=OmniDiffusionConfig(model=str(folder), dtype=torch.float32, flow_shift=FLOW_SHIFT)
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.parametrize("caption", ["a red circle moving right", "a yellow square moving up"])
@torch.no_grad()
def test_the_image_moves_as_the_prompt_says(pipeline: NeuronWanI2VPipeline, caption: str) -> None:
    image = first_frame(caption, seed=5)
    prompt = {"prompt": caption, "negative_prompt": "", "multi_modal_data": {"image": image}}
    settings = {"num_inference_steps": 12, "guidance_scale": 4.0, "guidance_scale_provided": True}
    request = pipeline.resolve(prompt, OmniDiffusionSamplingParams(**SIZE, **settings, seed=0))
    trajectory = pipeline.encode(request)
    pipeline.prepare(trajectory, prompt)
    [video] = pipeline.decode(pipeline.diffuse(pipeline.prepare_latents(request), trajectory))
    frames = ((video + 1) / 2).permute(1, 2, 3, 0).numpy()
    assert judge(frames).matches(subject_of(caption))
    # The first frame is the image: the shape stands where it was put.
    assert np.abs(frames[0] - np.asarray(image) / 255).mean() < 0.03


def test_the_sibling_is_what_the_training_writes(pipeline: NeuronWanI2VPipeline) -> None:
    assert pipeline.checkpoint.task == "i2v"
    assert Path(pipeline.checkpoint.path, "README.md").is_file()
