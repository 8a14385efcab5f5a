# SPDX-License-Identifier: Apache-2.0
"""`NeuronHunyuanVideo15Pipeline`: HunyuanVideo-1.5 text-to-video for vLLM-Omni, over the ranks of a layout."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor

from omni_neuron_hunyuan_video15.checkpoint import TRANSFORMER, HunyuanVideo15Checkpoint
from omni_neuron_hunyuan_video15.config import MAX_POSITIONS
from omni_neuron_hunyuan_video15.spec import SPEC
from omni_neuron_hunyuan_video15.text import MAX_TEXT_LENGTH, encode_glyphs, encode_text
from omni_neuron_hunyuan_video15.vae import attend_frame_by_frame
from vllm_omni_neuron.sdk import (
    GenerationRequest,
    NeuronDiffusionPipeline,
    RequestError,
    RequestRules,
    Setting,
    Trajectory,
    check_compiled_ring,
    check_number,
    check_tensor_parallel,
    on_output_rank,
)

ASPECT_RATIO = (9, 16)  # height, width: of a video whose size is not asked for


@dataclass(frozen=True, kw_only=True)
class HunyuanVideo15Request(GenerationRequest):
    """A checked request.

    Attributes:
        flow_shift: of the schedule: larger values spend more steps on noise.
    """

    flow_shift: float


class NeuronHunyuanVideo15Pipeline(NeuronDiffusionPipeline):
    """HunyuanVideo-1.5 text-to-video; see `NeuronDiffusionPipeline`."""

    spec = SPEC
    checkpoint_class = HunyuanVideo15Checkpoint
    checkpoint: HunyuanVideo15Checkpoint

    @classmethod
    def check_engine(cls, od_config: Any, checkpoint: Any) -> None:
        """See the base class."""
        checkpoint.check()
        heads = checkpoint.transformer_config.num_attention_heads
        check_tensor_parallel(od_config.parallel_config.tensor_parallel_size, heads)
        check_compiled_ring(od_config, "its text joins self-attention")

    @classmethod
    def request_rules(cls, od_config: Any, checkpoint: Any) -> RequestRules:
        """See the base class."""
        vae, dit = checkpoint.vae_config, checkpoint.transformer_config
        processor = HunyuanVideo15ImageProcessor(vae_scale_factor=vae.spatial_compression_ratio)
        height, width = processor.calculate_default_height_width(*ASPECT_RATIO, dit.target_size)
        flow_shift = Setting(
            "flow_shift",
            1.0,
            functools.partial(check_number, needed="a number above 0", above=0.0),
            engine=od_config.flow_shift,
            checkpoint=checkpoint.scheduler().config.shift,
        )
        return RequestRules(
            height=int(height),
            width=int(width),
            num_frames=121,
            num_inference_steps=50,
            guidance_scale=checkpoint.guider_config.scale,
            fps=24,
            max_sequence_length=MAX_TEXT_LENGTH,
            spatial_stride=vae.spatial_compression_ratio,
            temporal_stride=vae.temporal_compression_ratio,
            settings=(flow_shift,),
            request_class=HunyuanVideo15Request,
        )

    @classmethod
    def check_request(cls, request: Any, checkpoint: Any, od_config: Any) -> None:
        """See the base class."""
        longest = max(_latent_size(request, checkpoint))
        if longest > MAX_POSITIONS:
            raise RequestError(
                f"height {request.height}, width {request.width}, num_frames {request.num_frames}: {longest} latents "
                f"on an axis; the model's positions end at {MAX_POSITIONS}"
            )

    @classmethod
    def num_tokens(cls, request: Any, checkpoint: Any) -> int:
        """See the base class."""
        return math.prod(_latent_size(request, checkpoint))

    def load_components(self) -> None:
        """See the base class."""
        self.tokenizer, self.tokenizer_2 = map(self.checkpoint.tokenizer, ("tokenizer", "tokenizer_2"))
        self.text_encoder, self.text_encoder_2 = map(self.load_on_output_rank, ("text_encoder", "text_encoder_2"))
        self.transformer = self.load_sharded(
            TRANSFORMER, sequence_parallel=self.sequence_parallel, context_method=self.context_method
        )
        self.vae = self.load_vae()
        attend_frame_by_frame(self.vae)

    def encode_prompt(self, text: str, request: Any) -> dict[str, torch.Tensor]:
        """See the base class; by the names of the DiT's arguments. The encoders run on the host of the output rank."""

        def encode() -> dict[str, torch.Tensor]:
            states, mask = encode_text(self.tokenizer, self.text_encoder, text, request.max_sequence_length)
            glyphs, glyph_mask = encode_glyphs(self.tokenizer_2, self.text_encoder_2, text)
            return {
                "encoder_hidden_states": states,
                "encoder_attention_mask": mask,
                "encoder_hidden_states_2": glyphs,
                "encoder_attention_mask_2": glyph_mask,
            }

        return on_output_rank(encode, self.device)

    def latent_shape(self, request: Any) -> tuple[int, ...]:
        """See the base class."""
        return 1, self.checkpoint.vae_config.latent_channels, *_latent_size(request, self.checkpoint)

    def make_scheduler(self, request: Any) -> Any:
        """See the base class; unlike the scheduler's own, the schedule ends one step before the last noise level."""
        scheduler = self.checkpoint.scheduler()
        scheduler.set_shift(request.flow_shift)
        sigmas = np.linspace(1.0, 0.0, request.num_inference_steps + 1)[:-1]
        scheduler.set_timesteps(sigmas=sigmas)
        return scheduler

    def model_inputs(
        self, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Any, trajectory: Trajectory
    ) -> dict[str, Any]:
        """See the base class; the condition's latents and the mask of a text-to-video model are zero."""
        added = self.checkpoint.transformer_config.in_channels - latents.shape[1]
        with_condition = F.pad(latents, (0, 0, 0, 0, 0, 0, 0, added))
        return {"hidden_states": with_condition, "timestep": timestep, **conditioning}


def _latent_size(request: Any, checkpoint: HunyuanVideo15Checkpoint) -> tuple[int, int, int]:
    return checkpoint.vae_config.latent_size(request.height, request.width, request.num_frames)


# Where vLLM-Omni looks for them.
get_hunyuan_video15_pre_process_func = NeuronHunyuanVideo15Pipeline.get_pre_process_func
get_hunyuan_video15_post_process_func = NeuronHunyuanVideo15Pipeline.get_post_process_func
