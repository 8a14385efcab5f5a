# SPDX-License-Identifier: Apache-2.0
"""Wan2.2 image-to-video as vLLM-Omni runs it."""

from __future__ import annotations

from typing import ClassVar

from omni_neuron_wan22.pipeline import NeuronWanPipeline
from omni_neuron_wan22.spec import I2V
from vllm_omni_neuron.sdk import ModelSpec


class NeuronWanI2VPipeline(NeuronWanPipeline):
    """Image-to-video (architecture `WanImageToVideoPipeline`): I2V-A14B, Wan2.1's I2V, TI2V-5B with an image.

    As `NeuronWanPipeline`; a request must bring an image.
    """

    spec: ClassVar[ModelSpec] = I2V
    # vLLM-Omni's declaration of image input: a dummy run gets an image by it, and so does our warm-up.
    support_image_input: ClassVar[bool] = True
    color_format: ClassVar[str] = "RGB"


# vLLM-Omni looks for them in the module of the pipeline.
get_neuron_wan22_pre_process_func = NeuronWanI2VPipeline.get_pre_process_func
get_neuron_wan22_post_process_func = NeuronWanI2VPipeline.get_post_process_func
