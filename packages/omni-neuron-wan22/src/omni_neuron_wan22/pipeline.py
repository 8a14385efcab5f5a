# SPDX-License-Identifier: Apache-2.0
"""Wan2.2 as vLLM-Omni runs it: text and image encoded, one or two experts in turn, VAE on the ranks that decode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from omni_neuron_parallel import collective_step
from omni_neuron_runtime import is_cpu_mode
from omni_neuron_wan22.cache import BlockCache
from omni_neuron_wan22.checkpoint import (
    WanCheckpoint,
    load_text_encoder,
    load_transformer,
    load_vae,
    quantization_report,
)
from omni_neuron_wan22.conditioning import ClipImageEncoder, ImageCondition, encode_images
from omni_neuron_wan22.engine_config import WanHooks
from omni_neuron_wan22.lora import LoraManager
from omni_neuron_wan22.prompt import tokenize_prompt
from omni_neuron_wan22.request import DEFAULT_NUM_INFERENCE_STEPS, GenerationRequest
from omni_neuron_wan22.scheduler import FlowEulerScheduler, NeuronFlowUniPCMultistepScheduler, make_scheduler
from omni_neuron_wan22.spec import T2V
from omni_neuron_wan22.text_encoder import NeuronTextEncoderWrapper
from omni_neuron_wan22.transformer import CrossAttentionKV, WanTransformer3DModel, fold_padding
from omni_neuron_wan22.vae import NeuronAutoencoderKLWan
from vllm_omni_neuron.sdk import (
    ComponentKind,
    ModelSpec,
    NeuronDiffusionPipeline,
    Prediction,
    Trajectory,
    fit_images,
    load_images,
    media_of,
)

# The encoded text, and the bias that goes with it; see `fold_padding`.
EncodedText = tuple[torch.Tensor, torch.Tensor | None]


class NeuronWanPipeline(WanHooks, NeuronDiffusionPipeline):
    """Text-to-video and TI2V-5B (architecture `WanPipeline`) over any mix of TP, SP, CP, CFG and VAE patch parallelism.

    What images a request may bring depends on the checkpoint (`WanCheckpoint.task`).

    Attributes:
        quantization: of FP8 weights, for the report; None without them.
        block_cache: where the engine's cache_backend is cache_dit.
        lora_manager: where the worker has asked for it.
    """

    spec: ClassVar[ModelSpec] = T2V
    # vLLM-Omni warns if it finds no number of steps to refresh a cache with; the cache here is told the request's.
    default_num_inference_steps: ClassVar[int] = DEFAULT_NUM_INFERENCE_STEPS
    checkpoint: WanCheckpoint
    text_encoder: NeuronTextEncoderWrapper
    transformer: WanTransformer3DModel | None
    transformer_2: WanTransformer3DModel | None
    vae: NeuronAutoencoderKLWan | None
    block_cache: BlockCache | None = None
    lora_manager: LoraManager | None = None

    def load_components(self) -> None:
        """Load what this rank has; of two experts, those whose steps the engine's `boundary_ratio` leaves any."""
        checkpoint, dtype = self.checkpoint, self.dtype
        # Shards go from the files to the device one by one, so there is no stage at which a component exists unloaded.
        self.tokenizer = checkpoint.tokenizer()
        self.text_encoder = load_text_encoder(checkpoint, dtype=dtype, device=self.device)
        self.transformer = self.transformer_2 = None
        experts = {
            expert: load_transformer(
                checkpoint,
                expert,
                dtype=dtype,
                device=self.device,
                sequence_parallel=self.sequence_parallel,
                context_method=self.context_method,
            )
            for expert in checkpoint.experts_in_use(self.od_config.boundary_ratio)
        }
        for name, expert in experts.items():
            setattr(self, name, expert)
        self.quantization = quantization_report(checkpoint, experts)
        self.vae = None
        if self.decodes:
            self.vae = load_vae(checkpoint, dtype=dtype, device=self.device, encoder=checkpoint.encodes_images)
            if self.od_config.vae_use_tiling:
                self.vae.enable_tiling()
        self.takes_image_embeds = checkpoint.transformer_config(checkpoint.experts[0]).image_dim is not None
        needs_clip = self.takes_image_embeds and self.is_output_rank
        self.image_encoder = ClipImageEncoder(checkpoint.path) if needs_clip else None
        if self.od_config.cache_backend == "cache_dit":
            # Here, because the library is slow to import.
            from omni_neuron_wan22.cache_rule import register_cache_dit

            register_cache_dit(type(self).__name__)

    def encode_prompt(self, text: str, request: GenerationRequest) -> EncodedText:
        """The encoded text and the bias that its cross-attention needs.

        Returns:
            `[1, max_sequence_length, text_dim]`, zero at padded positions, and None: one shape for every prompt. In CPU
            mode, unless compiled, the padding is folded into one row (`fold_padding`).
        """
        input_ids, attention_mask = tokenize_prompt(self.tokenizer, text, request.max_sequence_length)
        output = self.text_encoder(input_ids.to(self.device), attention_mask.to(self.device))
        if is_cpu_mode() and not self.compiled:
            return fold_padding(output.last_hidden_state, int(attention_mask.sum()))
        return output.last_hidden_state, None

    def prepare(self, trajectory: Trajectory, prompt: Any) -> None:
        """Encode the request's image, if it brings one."""
        prompt = fit_images(load_images(prompt), trajectory.request)
        if media_of(prompt):
            with self.clock("image"), collective_step("encoding the image"):
                trajectory.condition = self.encode_images(prompt, trajectory.request)

    def encode_images(self, prompt: Any, request: GenerationRequest) -> ImageCondition:
        """What the request's images are to the DiT, the same on every rank. Collective over the world.

        Args:
            prompt: with images as `fit_images` leaves them.
            request: what `resolve` made of it.
        """
        with self.vae_alone("encoding"):
            condition = encode_images(
                prompt,
                request.num_frames,
                temporal_stride=self.checkpoint.vae_config.scale_factor_temporal,
                is_first_frame=self.checkpoint.task == "ti2v",
                vae=self.vae,
                image_encoder=self.image_encoder,
                takes_embeds=self.takes_image_embeds,
                device=self.device,
            )
        self.check_agreement(condition.latents, "image condition")
        return condition

    def latent_shape(self, request: GenerationRequest) -> tuple[int, ...]:
        """`[1, z, T, h, w]`."""
        vae = self.checkpoint.vae_config
        return 1, vae.z_dim, *vae.latent_size(request.height, request.width, request.num_frames)

    def make_scheduler(self, request: GenerationRequest) -> NeuronFlowUniPCMultistepScheduler | FlowEulerScheduler:
        """The request's solver with its shift."""
        scheduler = make_scheduler(request.sample_solver, request.flow_shift)
        scheduler.set_timesteps(request.num_inference_steps)
        return scheduler

    def choose_model(self, timestep: float, request: GenerationRequest) -> tuple[str, float]:
        """The expert of a timestep and its guidance; at the boundary itself it is still the high-noise one."""
        boundary = request.boundary_ratio * self.scheduler.config.num_train_timesteps
        low_noise = request.boundary_ratio == 1.0 or timestep < boundary
        scale = request.guidance_scale_2 if low_noise else request.guidance_scale
        return "transformer_2" if low_noise and "transformer_2" in self.checkpoint.experts else "transformer", scale

    def condition_model(self, name: str, encoded: EncodedText, trajectory: Trajectory) -> CrossAttentionKV:
        """The text's and an image's keys and values in every block of an expert."""
        condition: ImageCondition | None = trajectory.condition
        image = [] if condition is None or condition.image_embeds is None else [condition.image_embeds]
        return getattr(self, name).project_cross_attention_kv(*encoded, *image)

    def model_inputs(
        self, latents: torch.Tensor, timestep: torch.Tensor, conditioning: CrossAttentionKV, trajectory: Trajectory
    ) -> dict[str, Any]:
        """Latents with the image's, if there is one; the latter may have a timestep of its own."""
        condition: ImageCondition | None = trajectory.condition
        inputs = {"hidden_states": latents} if condition is None else condition.inputs(latents, timestep)
        inputs |= {"hidden_states": inputs["hidden_states"].to(self.dtype), "timestep": timestep}
        return {**inputs, "cross_attention_kv_cache": conditioning}

    def predict_noise(self, current_model: nn.Module, branch: str, **inputs: Any) -> Prediction:
        """One forward of an expert, or what the cache has of it."""
        if self.block_cache is not None:
            return self.block_cache.predict(current_model, branch, **inputs)
        return super().predict_noise(current_model, branch, **inputs, return_dict=False)

    def diffuse(self, latents: torch.Tensor, trajectory: Trajectory) -> torch.Tensor:
        """As the base class; the cache is told of every video's begin and end."""
        if self.block_cache is None:
            return super().diffuse(latents, trajectory)
        self.block_cache.begin(trajectory.request.num_inference_steps)
        latents = super().diffuse(latents, trajectory)
        self.block_cache.end()
        return latents

    def finish(self, latents: torch.Tensor, trajectory: Trajectory) -> torch.Tensor:
        """With the given first frame, where that takes the noisy one's place."""
        return latents if trajectory.condition is None else trajectory.condition.finish(latents)

    def extra_compiled(self) -> Iterator[tuple[str, Any, str, ComponentKind]]:
        """The projection of the text's keys and values, and the cache's parts of the experts."""
        for name in self._dit_modules:
            yield f"{name}.project_cross_attention_kv", getattr(self, name), "project_cross_attention_kv", "transformer"
        if self.block_cache is not None:
            for name, expert, part in self.block_cache.graphs():
                yield name, expert, part, "transformer"

    def compile(self, *, backend: Any, **options: Any) -> None:
        """As the base class; the decoder is two graphs, of the first chunk and of later ones."""
        super().compile(backend=backend, **options)
        if self.block_cache is not None:
            self.block_cache.compiled = True

    def make_lora_manager(self) -> LoraManager:
        """What loads LoRA adapters and merges them into the experts; the worker asks for it."""
        experts = {name: getattr(self, name) for name in self.checkpoint.experts if name in self._dit_modules}
        self.lora_manager = LoraManager(experts, self.checkpoint, self.od_config.max_cpu_loras)
        return self.lora_manager

    def report(self, request: GenerationRequest, trajectory: Trajectory) -> dict[str, Any]:
        """Guidance by expert; image, cache, adapter and FP8 weights where there are any."""
        optional = {
            "image": None if trajectory.condition is None else trajectory.condition.report,
            "cache": None if self.block_cache is None else self.block_cache.report(),
            "lora": None if self.lora_manager is None else self.lora_manager.merged(),
            "quantization": self.quantization,
        }
        return {
            **{name: value for name, value in optional.items() if value is not None},
            "guidance_per_expert": {"transformer": request.guidance_scale, "transformer_2": request.guidance_scale_2},
        }


# vLLM-Omni looks for them in the module of the pipeline.
get_neuron_wan22_pre_process_func = NeuronWanPipeline.get_pre_process_func
get_neuron_wan22_post_process_func = NeuronWanPipeline.get_post_process_func
