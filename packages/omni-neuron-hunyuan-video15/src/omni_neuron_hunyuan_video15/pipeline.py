# SPDX-License-Identifier: Apache-2.0
"""`NeuronHunyuanVideo15Pipeline`: HunyuanVideo-1.5 text-to-video for vLLM-Omni, over the ranks of a layout."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor

from omni_neuron_hunyuan_video15.checkpoint import HunyuanVideo15Checkpoint
from omni_neuron_hunyuan_video15.rope import MAX_POSITIONS
from omni_neuron_hunyuan_video15.spec import SPEC
from omni_neuron_hunyuan_video15.text import MAX_TEXT_LENGTH, encode_glyphs, encode_text
from omni_neuron_parallel import get_group
from vllm_omni_neuron.sdk import (
    GenerationRequest,
    NeuronDiffusionPipeline,
    RequestError,
    RequestRules,
    Setting,
    Trajectory,
    check_number,
    check_tensor_parallel,
    load_diffusers_vae,
    load_transformers,
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


class Conditioning(NamedTuple):
    """What a branch is conditioned on; the names are those of the DiT's arguments."""

    encoder_hidden_states: torch.Tensor
    encoder_attention_mask: torch.Tensor
    encoder_hidden_states_2: torch.Tensor
    encoder_attention_mask_2: torch.Tensor


class NeuronHunyuanVideo15Pipeline(NeuronDiffusionPipeline):
    """HunyuanVideo-1.5 text-to-video; see `NeuronDiffusionPipeline`."""

    spec = SPEC
    checkpoint: HunyuanVideo15Checkpoint

    @classmethod
    def open_checkpoint(cls, od_config: Any) -> HunyuanVideo15Checkpoint:
        """See the base class."""
        return HunyuanVideo15Checkpoint(super().open_checkpoint(od_config).path)

    @classmethod
    def check_engine(cls, od_config: Any, checkpoint: Any) -> None:
        """See the base class."""
        checkpoint.check()
        heads = checkpoint.transformer_config.num_attention_heads
        check_tensor_parallel(od_config.parallel_config.tensor_parallel_size, heads)

    @classmethod
    def request_rules(cls, od_config: Any, checkpoint: Any) -> RequestRules:
        """See the base class."""
        vae = checkpoint.vae_config
        processor = HunyuanVideo15ImageProcessor(vae_scale_factor=vae.spatial_compression_ratio)
        height, width = processor.calculate_default_height_width(
            *ASPECT_RATIO, checkpoint.transformer_config.target_size
        )
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
            guidance_scale=checkpoint.guider.scale,
            fps=24,
            max_sequence_length=MAX_TEXT_LENGTH,
            spatial_stride=vae.spatial_compression_ratio * checkpoint.transformer_config.patch_size,
            temporal_stride=vae.temporal_compression_ratio,
            settings=(flow_shift,),
            request_class=HunyuanVideo15Request,
        )

    @classmethod
    def check_request(cls, request: Any, checkpoint: Any, od_config: Any) -> None:
        """See the base class."""
        if request.max_sequence_length > MAX_TEXT_LENGTH:
            raise RequestError(f"max_sequence_length = {request.max_sequence_length}: valid are 1 to {MAX_TEXT_LENGTH}")
        patches = checkpoint.patches(request.height, request.width, request.num_frames)
        for name, number in zip(("num_frames", "height", "width"), patches, strict=True):
            if number > MAX_POSITIONS:
                raise RequestError(
                    f"{name} = {getattr(request, name)}: it makes {number} patches, and the model's positions end at "
                    f"{MAX_POSITIONS}"
                )

    @classmethod
    def num_tokens(cls, request: Any, checkpoint: Any) -> int:
        """See the base class."""
        return checkpoint.num_tokens(request.height, request.width, request.num_frames)

    def load_components(self) -> None:
        """See the base class."""
        checkpoint, dtype = self.checkpoint, self.dtype
        self.tokenizer, self.tokenizer_2 = (checkpoint.tokenizer(name) for name in ("tokenizer", "tokenizer_2"))
        self.text_encoder = self.text_encoder_2 = self.vae = None
        if self.is_output_rank:
            self.text_encoder = load_transformers(checkpoint, "text_encoder", dtype=dtype)
            self.text_encoder_2 = load_transformers(checkpoint, "text_encoder_2", dtype=dtype)
        self.transformer = checkpoint.load_transformer(
            dtype=dtype,
            device=self.device,
            sequence_parallel=self.sequence_parallel,
            context_method=self.context_method,
        )
        if self.decodes:
            self.vae = load_diffusers_vae(checkpoint, dtype=dtype, device=self.device)
            if self.od_config.vae_use_tiling:
                self.vae.enable_tiling()

    def encode_prompt(self, text: str, request: Any) -> Conditioning:
        """See the base class; the encoders run on the host of the output rank."""

        def encode() -> tuple[torch.Tensor, ...]:
            length = request.max_sequence_length
            return (
                *encode_text(self.tokenizer, self.text_encoder, text, length),
                *encode_glyphs(self.tokenizer_2, self.text_encoder_2, text),
            )

        return Conditioning(*on_output_rank(encode, self.device))

    def latent_shape(self, request: Any) -> tuple[int, ...]:
        """See the base class."""
        vae = self.checkpoint.vae_config
        return 1, vae.latent_channels, *vae.latent_size(request.height, request.width, request.num_frames)

    def make_scheduler(self, request: Any) -> Any:
        """See the base class; unlike the scheduler's own, the schedule ends one step before the last noise level."""
        scheduler = self.checkpoint.scheduler()
        scheduler.set_shift(request.flow_shift)
        sigmas = np.linspace(1.0, 0.0, request.num_inference_steps + 1)[:-1]
        scheduler.set_timesteps(sigmas=sigmas, device=self.device)
        return scheduler

    def model_inputs(
        self, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Conditioning, trajectory: Trajectory
    ) -> dict[str, Any]:
        """See the base class; the condition's latents and the mask of a text-to-video model are zero."""
        added = self.checkpoint.transformer_config.in_channels - latents.shape[1]
        with_condition = F.pad(latents, (0, 0, 0, 0, 0, 0, 0, added))
        return {"hidden_states": with_condition, "timestep": timestep, **conditioning._asdict()}

    def decode(self, latents: torch.Tensor) -> torch.Tensor | None:
        """See the base class."""
        assert self.vae is not None
        return self.vae.decode(self.vae.denormalize(latents), group=get_group("vae_patch"))

    def report(self, request: Any, trajectory: Trajectory) -> dict[str, Any]:
        """See the base class."""
        return {"flow_shift": request.flow_shift}


# Where vLLM-Omni looks for them.
get_hunyuan_video15_pre_process_func = NeuronHunyuanVideo15Pipeline.get_pre_process_func
get_hunyuan_video15_post_process_func = NeuronHunyuanVideo15Pipeline.get_post_process_func
