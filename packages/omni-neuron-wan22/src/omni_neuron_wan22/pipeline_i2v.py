# SPDX-License-Identifier: Apache-2.0
"""Wan2.2 image-to-video as vLLM-Omni runs it."""

from __future__ import annotations

from typing import ClassVar

from omni_neuron_wan22.pipeline import NeuronWanPipeline
from omni_neuron_wan22.processing import get_neuron_wan22_post_process_func, get_neuron_wan22_pre_process_func

# vLLM-Omni looks for the functions of `processing` in the module of the pipeline.
__all__ = ["NeuronWanI2VPipeline", "get_neuron_wan22_post_process_func", "get_neuron_wan22_pre_process_func"]


class NeuronWanI2VPipeline(NeuronWanPipeline):
    """Image-to-video (architecture `WanImageToVideoPipeline`): I2V-A14B, Wan2.1's I2V, TI2V-5B with an image.

    As `NeuronWanPipeline`; a request must bring an image.
    """

    # vLLM-Omni's declaration of image input: a dummy run gets an image by it, and so does our warm-up.
    support_image_input: ClassVar[bool] = True
    color_format: ClassVar[str] = "RGB"
