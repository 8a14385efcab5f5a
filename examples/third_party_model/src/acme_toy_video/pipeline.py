# SPDX-License-Identifier: Apache-2.0
"""The pipeline: what of it is this model's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from omni_neuron_parallel import AxisGroup
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni_neuron.sdk import (
    ComponentKind,
    DiffusersCheckpoint,
    GenerationRequest,
    ModelSpec,
    NeuronDiffusionPipeline,
    RequestRules,
    Trajectory,
    check_tensor_parallel,
    tokenize,
)

from .spec import SPEC
from .text_encoder import TEXT_ENCODER
from .transformer import TRANSFORMER, TextKeysValues
from .vae import VAE

TextRows = tuple[torch.Tensor, torch.Tensor]


class AcmeToyVideoPipeline(NeuronDiffusionPipeline):
    """Text to video over any mix of tensor, sequence, context and CFG parallelism."""

    spec: ClassVar[ModelSpec] = SPEC

    @classmethod
    def check_engine(cls, od_config: OmniDiffusionConfig, checkpoint: DiffusersCheckpoint) -> None:
        """Refuse a checkpoint that lacks something or does not fit, and a TP size that does not divide the heads."""
        checkpoint.check_components("tokenizer", "text_encoder", "transformer", "vae", "scheduler")
        heads = TRANSFORMER.config(checkpoint).num_heads
        check_tensor_parallel(od_config.parallel_config.tensor_parallel_size, heads)
        TRANSFORMER.check(checkpoint, context_group=AxisGroup("cp"))  # of one rank: there are no workers yet
        TEXT_ENCODER.check(checkpoint)
        VAE.check(checkpoint)

    @classmethod
    def request_rules(cls, od_config: OmniDiffusionConfig, checkpoint: DiffusersCheckpoint) -> RequestRules:
        """Defaults, and the sizes that patches and decoder allow."""
        patch = TRANSFORMER.config(checkpoint).patch
        return RequestRules(
            height=32,
            width=48,
            num_frames=5,
            fps=8,
            num_inference_steps=8,
            guidance_scale=4.0,
            max_sequence_length=32,
            spatial_stride=patch * VAE.config(checkpoint).stride,
            temporal_stride=1,
        )

    @classmethod
    def num_tokens(cls, request: GenerationRequest, checkpoint: DiffusersCheckpoint) -> int:
        """Patches of all frames."""
        patch = TRANSFORMER.config(checkpoint).patch
        pixels = patch * VAE.config(checkpoint).stride
        return request.num_frames * (request.height // pixels) * (request.width // pixels)

    def load_components(self) -> None:
        """Every rank has its shards of text encoder and DiT; the decoder is where it is used."""
        self.tokenizer = self.checkpoint.tokenizer()
        self.text_encoder = self.load_sharded(TEXT_ENCODER)
        self.config = TRANSFORMER.config(self.checkpoint)
        self.transformer = self.load_sharded(
            TRANSFORMER, sequence_parallel=self.sequence_parallel, context_method=self.context_method
        )
        self.vae_config = VAE.config(self.checkpoint)
        self.vae = self.load_sharded(VAE) if self.decodes else None

    def encode_prompt(self, text: str, request: GenerationRequest) -> TextRows:
        """The encoded text `[1, L, text_width]` and which rows of it are text, bool `[1, L]`."""
        token_ids, mask = tokenize(self.tokenizer, text, request.max_sequence_length)
        return self.text_encoder(token_ids.to(self.device)), mask.bool().to(self.device)

    def condition_model(self, name: str, encoded: TextRows, trajectory: Trajectory) -> TextKeysValues:
        """The text's keys and values in every block, which are those of all steps."""
        return self.transformer.project_text(*encoded)

    def extra_compiled(self) -> Iterator[tuple[str, Any, str, ComponentKind]]:
        """What runs beside the components' forward."""
        yield "transformer.project_text", self.transformer, "project_text", "transformer"

    def latent_shape(self, request: GenerationRequest) -> tuple[int, ...]:
        """`[1, C, T, h, w]`."""
        stride = self.vae_config.stride
        return (1, self.config.channels, request.num_frames, request.height // stride, request.width // stride)

    def model_inputs(
        self, latents: torch.Tensor, timestep: torch.Tensor, conditioning: TextKeysValues, trajectory: Trajectory
    ) -> dict[str, Any]:
        """The keywords of `Transformer.forward`."""
        return {"latents": latents, "timestep": timestep, "text": conditioning}

    def decode(self, latents: torch.Tensor) -> torch.Tensor | None:
        """Frames `[1, 3, F, H, W]` within ±1."""
        return None if self.vae is None else self.vae.decoder(latents)


# vLLM-Omni looks for these in this module, by the names that registry.py has.
get_pre_process_func = AcmeToyVideoPipeline.get_pre_process_func
get_post_process_func = AcmeToyVideoPipeline.get_post_process_func
