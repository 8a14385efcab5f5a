# SPDX-License-Identifier: Apache-2.0
"""The pipeline of a diffusion model as vLLM-Omni runs it; a model package writes what is the model's own."""

from __future__ import annotations

import contextlib
import logging
import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from vllm_omni.diffusion.cancellation import check_request_cancellation
from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
from vllm_omni.diffusion.distributed.utils import get_local_device
from vllm_omni.diffusion.models.interface import SupportsComponentDiscovery
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from omni_neuron_parallel import ContextMethod, collective_step, get_group, get_topology
from omni_neuron_runtime import COUNTERS, compile_options, component_compiler_args, is_cpu_mode
from vllm_omni_neuron.compilation import COMPILER_KINDS
from vllm_omni_neuron.offload import weights_on_host
from vllm_omni_neuron.sdk.denoising import Denoising, Trajectory
from vllm_omni_neuron.sdk.engine_hooks import EngineHooks
from vllm_omni_neuron.sdk.request import GenerationRequest, resolve_request
from vllm_omni_neuron.sdk.sharded import ShardedComponent
from vllm_omni_neuron.sdk.spec import ComponentKind
from vllm_omni_neuron.sdk.stage_clock import StageClock
from vllm_omni_neuron.sdk.unsharded import load_transformers
from vllm_omni_neuron.sdk.vae import DiffusersVae, load_diffusers_vae
from vllm_omni_neuron.settings import model_settings

logger = logging.getLogger(__name__)

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class NeuronDiffusionPipeline(EngineHooks, nn.Module, Denoising, SupportsComponentDiscovery):
    """A diffusion model over any mix of TP, SP, CP, CFG and VAE patch parallelism, as far as its spec goes.

    A model writes `spec`, `request_rules`, `load_components`, `encode_prompt`, `latent_shape` and `model_inputs`; most
    also some of `check_engine`, `num_tokens`, `condition_model`, and `decode` unless its `vae` is a `DiffusersVae`.
    Every other method has a default that it may replace.

    Every rank encodes the text and denoises. What decodes lives on the first `vae_patch` ranks; rank 0 has the output,
    and vLLM-Omni takes it from there.

    vLLM-Omni looks for functions in the pipeline's module: give `get_pre_process_func` and `get_post_process_func` of
    the class the names there that the registry's entry has.

    Args:
        od_config: vLLM-Omni's configuration of this stage.
        prefix: not used; part of vLLM-Omni's signature.

    Attributes:
        checkpoint: what `open_checkpoint` returned.
        rules: what `request_rules` returned.
        device, dtype: of the components.
        compiled: whether `compile` has been called.
        clock: seconds of the running request; `with self.clock("image"): …` adds a stage to them.
    """

    supports_request_batch: ClassVar[bool] = False
    # An aborted request ends before its next step, its decoding or its next output.
    supports_request_cancellation: ClassVar[bool] = True
    # Context, CFG and VAE patch parallelism and CPU offload are this pipeline's own, not vLLM-Omni's.
    owns_parallelism: ClassVar[bool] = True
    # A warm-up at vLLM-Omni's 512×512 would compile graphs of a shape that nobody asked for.
    dummy_run_num_frames: ClassVar[int] = 0
    # What vLLM-Omni's loader would stream to every rank, whole; a pipeline reads its own shards.
    weights_sources: ClassVar[tuple[()]] = ()
    # vLLM-Omni's declaration of components, by what this rank has.
    _dit_modules: list[str]
    _encoder_modules: list[str]
    _vae_modules: list[str]
    compiled = False

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = ""):
        super().__init__()
        self.od_config = od_config
        self.dtype: torch.dtype = od_config.dtype
        self.device = get_local_device()
        self.checkpoint = self.open_checkpoint(od_config)
        self.rules = self.request_rules(od_config, self.checkpoint)
        self.load_components()
        self._check_components()
        self._dit_modules = self._names_of("transformer")
        self._encoder_modules = self._names_of("text_encoder", "image_encoder")
        self._vae_modules = self._names_of("vae", "vae_encoder")

    @abstractmethod
    def load_components(self) -> None:
        """Set the attributes that `spec.components` names; those that this rank does without to None.

        Weights go to `self.device` in `self.dtype`, this rank's shards only.
        """

    @abstractmethod
    def encode_prompt(self, text: str, request: Any) -> Any:
        """What a branch is conditioned on, on the device. Called once for a branch of a request, on every rank."""

    @abstractmethod
    def latent_shape(self, request: Any) -> tuple[int, ...]:
        """The shape of one output's latents: `[1, C, T, h, w]` or `[1, C, h, w]`."""

    def decode(self, latents: torch.Tensor) -> torch.Tensor | None:
        """Frames `[1, 3, F, H, W]` or an image `[1, 3, H, W]` within ±1 on the output rank, None elsewhere.

        Called on the ranks where `decodes`, in `vae_alone`. By default by `self.vae`, a `DiffusersVae` or one with the
        same methods.

        Args:
            latents: float32, as `finish` leaves them, on the host.
        """
        vae: Any = self.vae
        return vae.decode(vae.denormalize(latents), group=get_group("vae_patch"))

    def prepare(self, trajectory: Trajectory, prompt: Any) -> None:
        """Set `trajectory.condition` from what else the request brings, such as an image; by default nothing.

        Args:
            trajectory: of the request.
            prompt: vLLM-Omni's, as the pre-process function left it.
        """

    def report(self, request: Any, trajectory: Trajectory) -> dict[str, Any]:
        """What the model adds to a generation's report, or says otherwise than the base, which has its settings."""
        return {}

    def extra_compiled(self) -> Iterator[tuple[str, Any, str, ComponentKind]]:
        """Further functions to compile: the graph's name, the object, its attribute, and the component's kind."""
        yield from ()

    @property
    def sequence_parallel(self) -> bool:
        """Whether tokens are split over TP between row-parallel layers (the setting `tp_sequence_parallel`)."""
        return bool(model_settings(self.od_config).get("tp_sequence_parallel")) and get_topology().tp > 1

    @property
    def context_method(self) -> ContextMethod:
        """How context parallelism shares keys and values (the setting `context_method`; "auto" without it)."""
        return model_settings(self.od_config).get("context_method", "auto")

    @property
    def decodes(self) -> bool:
        """Whether this rank holds the VAE and decodes the output or some of its tiles."""
        return get_topology().decodes(_global_rank())

    @property
    def is_output_rank(self) -> bool:
        """Whether this rank answers."""
        return _global_rank() == 0

    def load_vae(self, *, encoder: bool = False) -> DiffusersVae | None:
        """The checkpoint's `vae` on the ranks that decode, in tiles where the engine says so; None elsewhere.

        Args:
            encoder: whether its encoder is needed, too.
        """
        if not self.decodes:
            return None
        vae = load_diffusers_vae(self.checkpoint, dtype=self.dtype, device=self.device, encoder=encoder)
        if self.od_config.vae_use_tiling:
            vae.enable_tiling()
        return vae

    def load_sharded(self, component: ShardedComponent[Any, ModuleT], **options: Any) -> ModuleT:
        """This rank's shards of `component` on this rank's device; `options` are those of its module class."""
        return component.load(self.checkpoint, dtype=self.dtype, device=self.device, **options)

    def load_on_output_rank(self, name: str) -> nn.Module | None:
        """The component `name` of transformers, whole, on the host of the output rank; None elsewhere.

        `on_output_rank` calls it for all ranks.
        """
        return load_transformers(self.checkpoint, name, dtype=self.dtype) if self.is_output_rank else None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """The names of all parameters, for vLLM-Omni's completeness check; `load_components` has loaded them.

        Args:
            weights: empty, as `weights_sources` is.
        """
        return {name for name, _ in self.named_parameters()}

    @torch.inference_mode()
    def forward(self, batch: DiffusionRequestBatch) -> DiffusionOutput:
        """Generate the request's N outputs, one after the other: no graph sees another shape than for one.

        Returns:
            On the output rank `{"payload": {"video" or "image": …}, "metadata": {"generation": …}}`: what `decode`
            returns, N in one, float32; or latents `[N, …]` float32 for output type "latent". Elsewhere nothing.
        """
        prompt, sampling_params = batch.requests[0].prompt, batch.sampling_params
        request = self.resolve(prompt, sampling_params)
        self.clock = StageClock(measure_steps=bool(sampling_params.extra_args.get("profile")))
        with self.clock("text"):
            trajectory = self.encode(request)
        self.prepare(trajectory, prompt)
        outputs = []
        for number in range(request.num_outputs_per_prompt):
            noise = self.prepare_latents(request, sampling_params.generator, sampling_params.latents, number)
            output = self.generate(noise, trajectory)
            if output is not None:
                outputs.append(output)
        if not self.is_output_rank:
            return DiffusionOutput()
        kind = self.spec.output
        metadata: dict[str, Any] = {"generation": self._report(request, trajectory)}
        if kind == "video":
            metadata["video"] = {"fps": request.fps}
        return DiffusionOutput(
            output={"payload": {kind: torch.cat(outputs)}, "metadata": metadata}, stage_durations=self.clock.seconds
        )

    def resolve(self, prompt: Any, sampling_params: OmniDiffusionSamplingParams) -> GenerationRequest:
        """The request as this engine and checkpoint will serve it; see `resolve_request`."""
        return resolve_request(prompt, sampling_params, self.rules)

    def encode(self, request: Any) -> Trajectory:
        """Encode the text of every branch that some step of the request needs."""
        self.scheduler = self.make_scheduler(request)
        with collective_step("encoding the prompt"):
            texts = {branch: self.branch_text(branch, request) for branch in self.branches_of(request)}
            return Trajectory(request, {branch: self.encode_prompt(text, request) for branch, text in texts.items()})

    def prepare_latents(
        self,
        request: Any,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: torch.Tensor | None = None,
        number: int = 0,
    ) -> torch.Tensor:
        """The initial noise of `latent_shape`, float32 on the host, the same on every rank: drawn whole.

        Args:
            request: sizes and the seed, where the noise comes from one.
            generator: the caller's: one that goes on from output to output, or one for each. Noise is drawn where it
                is. Of a request with a seed it is what the runner made of that, and only its device counts.
            latents: the caller's own initial latents `[N, …]`, instead of drawn ones.
            number: of the output, from 0 to N − 1.

        Raises:
            ValueError: latents of another shape, or nothing to draw from.
        """
        shape = self.latent_shape(request)
        if latents is not None:
            needed = [request.num_outputs_per_prompt, *shape[1:]]
            if list(latents.shape) != needed:
                raise ValueError(f"latents have shape {list(latents.shape)}; this request needs {needed}")
            return latents[number : number + 1].cpu().float()
        if isinstance(generator, list):
            generator = generator[number]
        elif request.seed is not None:
            device = torch.device("cpu") if generator is None else generator.device
            generator = torch.Generator(device).manual_seed(request.seed + number)
        elif generator is None:
            raise ValueError("neither seed nor generator nor latents: ranks would draw different noise")
        noise = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
        return noise.cpu()

    def generate(self, noise: torch.Tensor, trajectory: Trajectory) -> torch.Tensor | None:
        """One output from its noise: `decode`'s or latents in the host's memory, float32; None where there is none."""
        with self.clock("denoise"):
            latents = self.diffuse(noise, trajectory)
        output: torch.Tensor | None = latents
        check_request_cancellation()
        if trajectory.request.output_type != "latent" and self.decodes:
            with self.clock("vae"), collective_step("decoding"), self.vae_alone("decoding"):
                output = self.decode(latents)
        if not self.is_output_rank:
            return None
        assert output is not None
        with self.clock("transfer"):
            return output.float().cpu()

    @contextlib.contextmanager
    def vae_alone(self, doing: str) -> Iterator[None]:
        """What decodes has the cores of waiting ranks, and with `enable_cpu_offload` the transformers' memory, too.

        Args:
            doing: for the log, such as "encoding".
        """
        offload = self.od_config.enable_cpu_offload and self.decodes
        transformers = [getattr(self, name) for name in self._dit_modules] if offload else []
        with _waiting_ranks_cores(), weights_on_host(transformers) as moved:
            if moved:
                logger.info("%.1f MiB of DiT weights are off the device during %s", moved / 2**20, doing)
            yield

    def compile(self, *, backend: Any, **options: Any) -> None:
        """Compile what the requests call, each as one graph a shape: components as the spec has them, then the rest.

        Of a VAE its `decoder` and, where it has one, its `encoder`, which are called once for a chunk or a tile; of
        what the spec leaves on the host nothing. The model runner calls this where the platform has a compile backend;
        a graph is compiled when it is first called.
        """
        self.compiled = True

        def settings(name: str, kind: ComponentKind) -> dict[str, Any]:
            own = compile_options(name, component_compiler_args(COMPILER_KINDS[kind]))
            return {"fullgraph": True, "dynamic": False, **options, "backend": backend, "options": own}

        for component in (one for one in self.spec.components if not one.host):
            for name, module in _graphs(component.name, component.kind, getattr(self, component.name, None)):
                module.compile(**settings(name, component.kind))
        for name, owner, attribute, kind in self.extra_compiled():
            setattr(owner, attribute, torch.compile(getattr(owner, attribute), **settings(name, kind)))

    def _check_components(self) -> None:
        required = [component.name for component in self.spec.components if not component.optional]
        missing = [name for name in required if not hasattr(self, name)]
        if missing:
            raise AttributeError(
                f"{type(self).__name__}.load_components has not set {', '.join(missing)}, which the spec names; set to "
                "None what this rank does without"
            )

    def _names_of(self, *kinds: ComponentKind) -> list[str]:
        """The components of these kinds that this rank has."""
        names = [component.name for component in self.spec.of_kind(*kinds)]
        return [name for name in names if getattr(self, name, None) is not None]

    def _report(self, request: Any, trajectory: Trajectory) -> dict[str, Any]:
        topology = get_topology()
        video = {"num_frames": request.num_frames, "fps": request.fps} if self.spec.output == "video" else {}
        return {
            **({"compilation": COUNTERS.as_dict()} if self.compiled else {}),
            "model": self.checkpoint.path.name,
            "height": request.height,
            "width": request.width,
            **video,
            "num_inference_steps": request.num_inference_steps,
            "steps_per_expert": dict(trajectory.steps),
            "guidance_per_expert": dict.fromkeys(trajectory.steps, request.guidance_scale),
            "num_outputs_per_prompt": request.num_outputs_per_prompt,
            "seed": request.seed,
            "seeds": request.seeds,
            "sources": dict(request.sources),
            "dtype": str(self.dtype).removeprefix("torch."),
            "layout": {"tp": topology.tp, "cp": topology.cp, "cfg": topology.cfg},
            "tp_sequence_parallel": self.sequence_parallel,
            "vae_patch": topology.vae_patch,
            "vae_tiling": self.od_config.vae_use_tiling or topology.vae_patch > 1,
            "seconds": {name: round(value, 4) for name, value in self.clock.seconds.items()},
            "step_seconds": {name: [round(value, 4) for value in steps] for name, steps in self.clock.steps.items()},
            **{setting.name: getattr(request, setting.name) for setting in self.rules.settings},
            **self.report(request, trajectory),
        }


def _graphs(name: str, kind: ComponentKind, component: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules that are compiled of a component, with their graphs' names."""
    if component is None:
        return
    if kind != "vae":
        yield name, component
        return
    yield name, component.decoder
    if getattr(component, "encoder", None) is not None:
        yield f"{name}_encoder", component.encoder


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
