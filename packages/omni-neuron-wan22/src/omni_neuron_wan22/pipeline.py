# SPDX-License-Identifier: Apache-2.0
"""Wan2.2 as vLLM-Omni runs it: text and image encoded, one or two experts in turn, VAE on the ranks that decode."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoTokenizer
from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
from vllm_omni.diffusion.distributed.utils import get_local_device
from vllm_omni.diffusion.models.interface import SupportsComponentDiscovery
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from omni_neuron_parallel import check_rank_agreement, collective_step, get_group, get_topology
from omni_neuron_runtime import COUNTERS, Component, compile_options, component_compiler_args, env, is_cpu_mode
from omni_neuron_wan22.checkpoint import load_text_encoder, load_transformer, load_vae, quantization_report
from omni_neuron_wan22.conditioning import ClipImageEncoder, ImageCondition, encode_images
from omni_neuron_wan22.denoising import Trajectory, WanDenoising
from omni_neuron_wan22.engine_config import checkpoint_of, engine_defaults
from omni_neuron_wan22.image import fit_images, image_report, load_images
from omni_neuron_wan22.lora import LoraManager
from omni_neuron_wan22.processing import get_neuron_wan22_post_process_func, get_neuron_wan22_pre_process_func
from omni_neuron_wan22.prompt import tokenize_prompt
from omni_neuron_wan22.request import (
    DEFAULT_FLOW_SHIFT,
    DEFAULT_NUM_INFERENCE_STEPS,
    GenerationRequest,
    media_of,
    resolve_request,
)
from omni_neuron_wan22.scheduler import make_scheduler
from omni_neuron_wan22.stage_clock import StageClock
from omni_neuron_wan22.text_encoder import NeuronTextEncoderWrapper
from omni_neuron_wan22.transformer import WanTransformer3DModel, fold_padding
from omni_neuron_wan22.vae import NeuronAutoencoderKLWan
from vllm_omni_neuron import model_settings, weights_on_host

# vLLM-Omni looks for the functions of `processing` in the module of the pipeline.
__all__ = ["NeuronWanPipeline", "get_neuron_wan22_post_process_func", "get_neuron_wan22_pre_process_func"]

logger = logging.getLogger(__name__)


class NeuronWanPipeline(nn.Module, WanDenoising, SupportsComponentDiscovery):
    """Text-to-video and TI2V-5B (architecture `WanPipeline`) over any mix of TP, SP, CP, CFG and VAE patch parallelism.

    Every rank encodes the text and denoises. The VAE lives on the first `vae_patch` ranks; rank 0 has the video, and
    vLLM-Omni takes its output. What images a request may bring depends on the checkpoint (`WanCheckpoint.task`).

    Args:
        od_config: vLLM-Omni's configuration of this stage.
        prefix: not used; part of vLLM-Omni's signature.
    """

    supports_request_batch: ClassVar[bool] = False
    # Context, CFG and VAE patch parallelism and CPU offload are this pipeline's own, not vLLM-Omni's.
    owns_parallelism: ClassVar[bool] = True
    # A warm-up at vLLM-Omni's 512×512 would compile graphs of a shape that nobody asked for.
    dummy_run_num_frames: ClassVar[int] = 0
    # vLLM-Omni's declaration of components, by what this rank has: see the constructor.
    _dit_modules: list[str]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: list[str]
    # vLLM-Omni warns if it finds no number of steps to refresh a cache with; the cache here is told the request's.
    default_num_inference_steps: ClassVar[int] = DEFAULT_NUM_INFERENCE_STEPS
    # What vLLM-Omni's loader would stream to every rank, whole; this pipeline reads its own shards.
    weights_sources: ClassVar[tuple[()]] = ()
    text_encoder: NeuronTextEncoderWrapper
    transformer: WanTransformer3DModel
    transformer_2: WanTransformer3DModel
    vae: NeuronAutoencoderKLWan
    compiled = False
    lora_manager: LoraManager | None = None  # what the worker has asked for

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = ""):
        super().__init__()
        self.od_config = od_config
        self.checkpoint = checkpoint_of(od_config)
        self.defaults = engine_defaults(od_config, self.checkpoint)
        self.device = get_local_device()
        self.tokenizer = AutoTokenizer.from_pretrained(self.checkpoint.path / "tokenizer", local_files_only=True)
        self.scheduler = make_scheduler("unipc", DEFAULT_FLOW_SHIFT)
        # Shards go from the files to the device one by one, so there is no stage at which a component exists unloaded.
        dtype, experts = od_config.dtype, self.checkpoint.experts_in_use(od_config.boundary_ratio)
        self.text_encoder = load_text_encoder(self.checkpoint, dtype=dtype, device=self.device)
        for expert in experts:
            model = load_transformer(
                self.checkpoint,
                expert,
                dtype=dtype,
                device=self.device,
                sequence_parallel=self.sequence_parallel,
                context_method=model_settings(od_config).get("context_method", "auto"),
            )
            setattr(self, expert, model)
        self.quantization = quantization_report(self.checkpoint, {expert: getattr(self, expert) for expert in experts})
        if self.decodes:
            self.vae = load_vae(
                self.checkpoint, dtype=dtype, device=self.device, encoder=self.checkpoint.encodes_images
            )
            if od_config.vae_use_tiling:
                self.vae.enable_tiling()
        self.takes_image_embeds = self.checkpoint.transformer_config(experts[0]).image_dim is not None
        needs_clip = self.takes_image_embeds and self.is_output_rank
        self.clip = ClipImageEncoder(self.checkpoint.path) if needs_clip else None
        self._dit_modules = list(experts)
        if od_config.cache_backend == "cache_dit":
            # Here, because the library is slow to import.
            from omni_neuron_wan22.cache_rule import register_cache_dit

            register_cache_dit(type(self).__name__)
        self._vae_modules = ["vae"] if self.decodes else []

    @property
    def sequence_parallel(self) -> bool:
        """Whether tokens are split over TP between row-parallel layers (the setting `tp_sequence_parallel`)."""
        return bool(model_settings(self.od_config).get("tp_sequence_parallel")) and get_topology().tp > 1

    @property
    def decodes(self) -> bool:
        """Whether this rank holds the VAE and decodes the video or some of its tiles."""
        return get_topology().decodes(_global_rank())

    @property
    def is_output_rank(self) -> bool:
        """Whether this rank answers."""
        return _global_rank() == 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """The names of all parameters, for vLLM-Omni's completeness check; the constructor has loaded them.

        Args:
            weights: empty, as `weights_sources` is.
        """
        return {name for name, _ in self.named_parameters()}

    @torch.inference_mode()
    def forward(self, batch: DiffusionRequestBatch) -> DiffusionOutput:
        """Generate the request's N videos, one after the other: no graph sees another shape than for one.

        Returns:
            On the output rank `{"payload": {"video": …}, "metadata": {"generation": …}}`: frames `[N, 3, F, H, W]`
            float32 within ±1, or latents `[N, C, T, h, w]` float32 for output type "latent". Elsewhere nothing.
        """
        sampling_params = batch.sampling_params
        request = self.resolve(batch.requests[0].prompt, sampling_params)
        self.clock = StageClock(measure_steps=bool(sampling_params.extra_args.get("profile")))

        with self.clock("text"):
            trajectory = self.encode(request)
        prompt = fit_images(load_images(batch.requests[0].prompt), request)
        if media_of(prompt):
            with self.clock("image"), collective_step("encoding the image"):
                trajectory.condition = self.encode_images(prompt, request)
        videos = []
        for number in range(request.num_outputs_per_prompt):
            noise = self.prepare_latents(request, sampling_params.generator, sampling_params.latents, number)
            video = self.generate_video(noise, trajectory)
            if video is not None:
                videos.append(video)
        if not self.is_output_rank:
            return DiffusionOutput()
        return DiffusionOutput(
            output={
                "payload": {"video": torch.cat(videos)},
                "metadata": {"video": {"fps": request.fps}, "generation": self._report(request, trajectory, prompt)},
            },
            stage_durations=self.clock.seconds,
        )

    def generate_video(self, noise: torch.Tensor, trajectory: Trajectory) -> torch.Tensor | None:
        """One video from its noise: frames or latents in the host's memory, float32; None where this rank has none."""
        with self.clock("denoise"):
            latents = self.diffuse(noise, trajectory)
        video: torch.Tensor | None = latents
        if trajectory.request.output_type != "latent" and self.decodes:
            with self.clock("vae"), collective_step("decoding"):
                video = self.decode(latents)
        if not self.is_output_rank:
            return None
        assert video is not None
        with self.clock("transfer"):
            return video.float().cpu()

    def compile(self, *, backend: Any, **options: Any) -> None:
        """Compile what the requests call, each as one graph (the decoder as two: first chunk and later ones).

        The model runner calls this where the platform has a compile backend.
        """
        self.compiled = True

        def settings(name: str, component: Component) -> dict[str, Any]:
            own = compile_options(name, component_compiler_args(component))
            return {"fullgraph": True, "dynamic": False, **options, "backend": backend, "options": own}

        self.text_encoder.compile(**settings("text_encoder", "text_encoder"))
        for name in self._dit_modules:
            expert: WanTransformer3DModel = getattr(self, name)
            expert.compile(**settings(name, "transformer"))
            expert.project_cross_attention_kv = torch.compile(  # type: ignore[method-assign]
                expert.project_cross_attention_kv, **settings(f"{name}.project_cross_attention_kv", "transformer")
            )
        if self.block_cache is not None:
            self.block_cache.compile(settings)
        if self.decodes:
            self.vae.decoder.compile(**settings("vae", "vae"))
            if self.vae.has_encoder:
                self.vae.encoder.compile(**settings("vae_encoder", "vae"))

    def make_lora_manager(self) -> LoraManager:
        """What loads LoRA adapters and merges them into the experts; the worker asks for it."""
        experts = {name: getattr(self, name) for name in self.checkpoint.experts if name in self._dit_modules}
        self.lora_manager = LoraManager(experts, self.checkpoint, self.od_config.max_cpu_loras)
        return self.lora_manager

    def resolve(self, prompt: Any, sampling_params: OmniDiffusionSamplingParams) -> GenerationRequest:
        """The request as this engine and checkpoint will serve it; see `resolve_request`."""
        return resolve_request(prompt, sampling_params, self.defaults)

    def encode(self, request: GenerationRequest) -> Trajectory:
        """Encode the prompt, and the negative prompt where guidance needs it."""
        length = request.max_sequence_length
        negative = self.encode_prompt(request.negative_prompt, length) if request.uses_guidance else None
        return Trajectory(request, self.encode_prompt(request.prompt, length), negative)

    def encode_prompt(self, prompt: str, max_sequence_length: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The encoded prompt and the bias that its cross-attention needs.

        Returns:
            `[1, max_sequence_length, text_dim]`, zero at padded positions, and None: one shape for every prompt. In CPU
            mode, unless compiled, the padding is folded into one row (`fold_padding`).
        """
        input_ids, attention_mask = tokenize_prompt(self.tokenizer, prompt, max_sequence_length)
        output = self.text_encoder(input_ids.to(self.device), attention_mask.to(self.device))
        if is_cpu_mode() and not self.compiled:
            return fold_padding(output.last_hidden_state, int(attention_mask.sum()))
        return output.last_hidden_state, None

    def encode_images(self, prompt: Any, request: GenerationRequest) -> ImageCondition:
        """What the request's images are to the DiT, the same on every rank. Collective over the world.

        Args:
            prompt: with images as `fit_images` leaves them.
            request: what `resolve` made of it.
        """
        with self._vae_alone("encoding"):
            condition = encode_images(
                media_of(prompt),
                request.num_frames,
                temporal_stride=self.defaults.temporal_stride,
                is_first_frame=self.checkpoint.task == "ti2v",
                vae=self.vae if self.decodes else None,
                image_encoder=self.clip,
                takes_embeds=self.takes_image_embeds,
                device=self.device,
            )
        if env.get("OMNI_NEURON_CHECK_RANK_AGREEMENT"):
            check_rank_agreement(condition.latents, "image condition")
        return condition

    def prepare_latents(
        self,
        request: GenerationRequest,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: torch.Tensor | None = None,
        number: int = 0,
    ) -> torch.Tensor:
        """The initial noise `[1, C, T, h, w]`, float32, the same on every rank: drawn whole, on the generator's device.

        Args:
            request: sizes and the seed, where the noise comes from one.
            generator: the caller's: one that goes on from video to video, or one for each. Of a request with a seed it
                is what the runner made of that, and only its device counts.
            latents: the caller's own initial latents `[N, C, T, h, w]`, instead of drawn ones.
            number: of the video, from 0 to N − 1.

        Raises:
            ValueError: latents of another shape.
        """
        vae = self.checkpoint.vae_config
        shape = (
            1,
            vae.z_dim,
            (request.num_frames - 1) // vae.scale_factor_temporal + 1,
            request.height // vae.scale_factor_spatial,
            request.width // vae.scale_factor_spatial,
        )
        if latents is not None:
            needed = [request.num_outputs_per_prompt, *shape[1:]]
            if list(latents.shape) != needed:
                raise ValueError(f"latents have shape {list(latents.shape)}; this request needs {needed}")
            return latents[number : number + 1].to(self.device, torch.float32)
        if isinstance(generator, list):
            generator = generator[number]
        elif request.seed is not None:
            device = torch.device("cpu") if generator is None else generator.device
            generator = torch.Generator(device).manual_seed(request.seed + number)
        elif generator is None:
            raise ValueError("neither seed nor generator nor latents: ranks would draw different noise")
        noise = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
        return noise.to(self.device)

    def decode(self, latents: torch.Tensor) -> torch.Tensor | None:
        """Latents `[1, C, T, h, w]` float32 to frames `[1, 3, 4 T − 3, 8 h, 8 w]` (VAE 2.2: 16 h, 16 w) within ±1.

        On the ranks that decode only, each some of the tiles where they are several. With `enable_cpu_offload` the
        experts' weights leave the device meanwhile.

        Returns:
            The frames on the output rank, None elsewhere.
        """
        with self._vae_alone("decoding"):
            return self.vae.decode(self.vae.denormalize(latents), group=get_group("vae_patch"))

    @contextlib.contextmanager
    def _vae_alone(self, doing: str) -> Iterator[None]:
        """The VAE has the cores of waiting ranks, and with `enable_cpu_offload` the memory of the experts, too."""
        offload = self.od_config.enable_cpu_offload and self.decodes
        experts = [getattr(self, name) for name in self._dit_modules] if offload else []
        with _waiting_ranks_cores(), weights_on_host(experts) as moved:
            if moved:
                logger.info("%.1f MiB of DiT weights are off the device during %s", moved / 2**20, doing)
            yield

    def _report(self, request: GenerationRequest, trajectory: Trajectory, prompt: Any) -> dict[str, Any]:
        topology = get_topology()
        compilation = {"compilation": COUNTERS.as_dict()} if self.compiled else {}
        quantization = {} if self.quantization is None else {"quantization": self.quantization}
        cache = {} if self.block_cache is None else {"cache": self.block_cache.report()}
        lora = None if self.lora_manager is None else self.lora_manager.merged()
        image = image_report(prompt)
        return {
            **compilation,
            **({} if image is None else {"image": image}),
            **cache,
            **({} if lora is None else {"lora": lora}),
            **quantization,
            "model": self.checkpoint.path.name,
            "height": request.height,
            "width": request.width,
            "num_frames": request.num_frames,
            "fps": request.fps,
            "num_inference_steps": request.num_inference_steps,
            "steps_per_expert": dict(trajectory.steps),
            "guidance_per_expert": {"transformer": request.guidance_scale, "transformer_2": request.guidance_scale_2},
            "boundary_ratio": request.boundary_ratio,
            "flow_shift": request.flow_shift,
            "sample_solver": request.sample_solver,
            "num_outputs_per_prompt": request.num_outputs_per_prompt,
            "seed": request.seed,
            "seeds": request.seeds,
            "sources": dict(request.sources),
            "dtype": str(self.od_config.dtype).removeprefix("torch."),
            "layout": {"tp": topology.tp, "cp": topology.cp, "cfg": topology.cfg},
            "tp_sequence_parallel": self.sequence_parallel,
            "vae_patch": topology.vae_patch,
            "vae_tiling": self.vae.tiling is not None or topology.vae_patch > 1,
            "seconds": {name: round(value, 4) for name, value in self.clock.seconds.items()},
            "step_seconds": {name: [round(value, 4) for value in steps] for name, steps in self.clock.steps.items()},
        }


def _global_rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


@contextlib.contextmanager
def _waiting_ranks_cores() -> Iterator[None]:
    """In CPU mode, let the ranks that decode also use the threads of those that wait for them."""
    before, topology = torch.get_num_threads(), get_topology()
    if is_cpu_mode() and topology.world_size > topology.vae_patch:
        threads = before * topology.world_size // topology.vae_patch
        torch.set_num_threads(max(1, min(threads, len(os.sched_getaffinity(0)) // topology.vae_patch)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
