# SPDX-License-Identifier: Apache-2.0
"""Z-Image's pipeline: what of it is the model's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from vllm_omni.diffusion.data import OmniDiffusionConfig

from omni_neuron_parallel import AxisGroup
from omni_neuron_zimage.config import padded_length
from omni_neuron_zimage.mapping import TRANSFORMER
from omni_neuron_zimage.spec import SPEC
from omni_neuron_zimage.transformer import Caption
from vllm_omni_neuron.sdk import (
    ComponentKind,
    DiffusersCheckpoint,
    GenerationRequest,
    ModelSpec,
    NeuronDiffusionPipeline,
    RequestError,
    RequestRules,
    Setting,
    Trajectory,
    check_number,
    flow_match_timesteps,
    on_output_rank,
    tokenize,
)

LAST_TIMESTEP = 1000.0  # the scheduler's, at pure noise


@dataclass(frozen=True, kw_only=True)
class ZImageRequest(GenerationRequest):
    """A request with the settings of diffusers' Z-Image pipeline.

    Attributes:
        cfg_normalization: the guided prediction is no longer than this times the prompt's own; 0 for no limit.
        cfg_truncation: guidance ends where the image is further on than this, from 0 for noise to 1.
    """

    cfg_normalization: float
    cfg_truncation: float


def _check_normalization(name: str, value: Any) -> float:
    """A number, or as in diffusers a bool: true for 1."""
    value = float(value) if isinstance(value, bool) else value
    return check_number(name, value, needed="true, false or a number of at least 0", at_least=0)


class NeuronZImagePipeline(NeuronDiffusionPipeline):
    """Text to image over any mix of tensor, sequence, context, CFG and VAE patch parallelism."""

    spec: ClassVar[ModelSpec] = SPEC

    @classmethod
    def check_engine(cls, od_config: OmniDiffusionConfig, checkpoint: DiffusersCheckpoint) -> None:
        """Refuse a checkpoint that does not fit, and a TP size that does not divide the heads."""
        checkpoint.check_components("tokenizer", "text_encoder", "transformer", "vae", "scheduler")
        flow_match_timesteps(checkpoint.scheduler(), 1, tokens=1)  # refuses another scheduler
        TRANSFORMER.config(checkpoint).check_tensor_parallel(od_config.parallel_config.tensor_parallel_size)
        TRANSFORMER.check(checkpoint, context_group=AxisGroup("cp"))

    @classmethod
    def request_rules(cls, od_config: OmniDiffusionConfig, checkpoint: DiffusersCheckpoint) -> RequestRules:
        """The defaults of diffusers' pipeline."""
        return RequestRules(
            height=1024,
            width=1024,
            num_inference_steps=50,
            guidance_scale=5.0,
            max_sequence_length=512,
            spatial_stride=_token_pixels(checkpoint),
            settings=(
                Setting("cfg_normalization", 0.0, _check_normalization),
                Setting("cfg_truncation", 1.0, partial(check_number, needed="a number of at least 0", at_least=0)),
            ),
            request_class=ZImageRequest,
        )

    @classmethod
    def check_request(
        cls, request: ZImageRequest, checkpoint: DiffusersCheckpoint, od_config: OmniDiffusionConfig
    ) -> None:
        """Refuse an image or a caption that is longer than the model's rotary positions."""
        config, stride = TRANSFORMER.config(checkpoint), _token_pixels(checkpoint)
        for name, tokens, positions in zip(
            ("height", "width"), _grid(request, checkpoint), config.axes_lens[1:], strict=True
        ):
            if tokens > positions:
                raise RequestError(f"{name} = {tokens * stride}: the model's largest is {positions * stride}")
        if request.max_sequence_length > config.longest_caption:
            raise RequestError(
                f"max_sequence_length = {request.max_sequence_length}: the model's largest is {config.longest_caption}"
            )

    @classmethod
    def num_tokens(cls, request: ZImageRequest, checkpoint: DiffusersCheckpoint) -> int:
        """The image's or the caption's, whichever are fewer: each is split for itself."""
        rows, columns = _grid(request, checkpoint)
        return min(padded_length(rows * columns), padded_length(request.max_sequence_length))

    def load_components(self) -> None:
        """Every rank has its shards of the transformer; encoder and VAE are where they are used."""
        self.tokenizer = self.checkpoint.tokenizer()
        self.text_encoder = self.load_on_output_rank("text_encoder")
        self.config = TRANSFORMER.config(self.checkpoint)
        self.transformer = self.load_sharded(
            TRANSFORMER, sequence_parallel=self.sequence_parallel, context_method=self.context_method
        )
        self.vae = self.load_vae()

    def encode_prompt(self, text: str, request: ZImageRequest) -> tuple[torch.Tensor, torch.Tensor]:
        """What `refine_caption` takes: the states before Qwen3's last layer, and how many rows of them are text."""

        def encode() -> tuple[torch.Tensor, torch.Tensor]:
            assert self.text_encoder is not None
            turn = [{"role": "user", "content": text}]
            chat = self.tokenizer.apply_chat_template(
                turn, tokenize=False, add_generation_prompt=True, enable_thinking=True
            )
            ids, mask = tokenize(self.tokenizer, chat, request.max_sequence_length)
            states = self.text_encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
            features, rows = states[-2], states[-2].shape[1]
            return F.pad(features, (0, 0, 0, padded_length(rows) - rows)), mask.sum(1)

        return on_output_rank(encode, self.device)

    def condition_model(self, name: str, encoded: tuple[torch.Tensor, torch.Tensor], trajectory: Trajectory) -> Caption:
        """The refined caption, which is that of all steps."""
        return self.transformer.refine_caption(*encoded)

    def extra_compiled(self) -> Iterator[tuple[str, Any, str, ComponentKind]]:
        """What `condition_model` calls."""
        yield "transformer_caption", self.transformer, "refine_caption", "transformer"

    def latent_shape(self, request: ZImageRequest) -> tuple[int, ...]:
        """`[1, C, h, w]`."""
        rows, columns = _grid(request, self.checkpoint)
        return (1, self.config.in_channels, rows * self.config.patch_size, columns * self.config.patch_size)

    def make_scheduler(self, request: ZImageRequest) -> Any:
        """The checkpoint's, which may shift its steps by the image's size."""
        rows, columns = _grid(request, self.checkpoint)
        return flow_match_timesteps(self.checkpoint.scheduler(), request.num_inference_steps, tokens=rows * columns)

    def choose_model(self, timestep: float, request: ZImageRequest) -> tuple[str, float]:
        """The request's guidance until `cfg_truncation`, none from there on."""
        truncated = request.cfg_truncation <= 1 and _progress(timestep) > request.cfg_truncation
        return "transformer", 0.0 if truncated else request.guidance_scale

    def branches(self, request: ZImageRequest, scale: float) -> tuple[str, ...]:
        """A scale of 0, not of 1, means no guidance here."""
        return ("positive", "negative") if scale > 0 else ("positive",)

    def model_inputs(
        self, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Caption, trajectory: Trajectory
    ) -> dict[str, Any]:
        """The keywords of `ZImageTransformer2DModel.forward`."""
        return {"hidden_states": latents, "timestep": _progress(timestep), "caption": conditioning}

    def combine_branches(self, predictions: list[Any], scale: float) -> torch.Tensor:
        """positive + scale · (positive − negative), no longer than `cfg_normalization` allows."""
        positive, negative = (prediction.float() for prediction in predictions)
        guided = positive + scale * (positive - negative)
        if self.request.cfg_normalization == 0:
            return guided
        longest = self.request.cfg_normalization * torch.linalg.vector_norm(positive)
        return guided * (longest / torch.linalg.vector_norm(guided)).clamp(max=1.0)

    def postprocess_prediction(self, prediction: Any, latents: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        """The scheduler's velocity points to the noise, the transformer's to the image."""
        return -prediction


def _token_pixels(checkpoint: DiffusersCheckpoint) -> int:
    """Pixels of one token, in height and in width: of the VAE's resampling blocks and of the patch."""
    blocks = len(checkpoint.raw_config("vae")["block_out_channels"])
    return 2 ** (blocks - 1) * TRANSFORMER.config(checkpoint).patch_size


def _grid(request: ZImageRequest, checkpoint: DiffusersCheckpoint) -> tuple[int, int]:
    """Rows and columns of the image's tokens."""
    stride = _token_pixels(checkpoint)
    return request.height // stride, request.width // stride


def _progress(timestep: Any) -> Any:
    """From the scheduler's timesteps, 1000 for noise, to the transformer's: 0 for noise, 1 for an image."""
    return (LAST_TIMESTEP - timestep) / LAST_TIMESTEP


# vLLM-Omni looks for these in this module, by the names that registry.py has.
get_zimage_pre_process_func = NeuronZImagePipeline.get_pre_process_func
get_zimage_post_process_func = NeuronZImagePipeline.get_post_process_func
