# SPDX-License-Identifier: Apache-2.0
"""What the kit does with a pipeline on one rank, without an engine around it. Importable by spawned processes."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from omni_neuron_parallel import tensor_digest
from omni_neuron_runtime import COUNTERS, CompileError, partition_of

from .case import KitRequest, Layout


def load(named: Any) -> Any:
    """The object of "module:NAME"; anything else as it is."""
    if not isinstance(named, str):
        return named
    module, _, name = named.partition(":")
    return getattr(importlib.import_module(module), name)


@dataclass(frozen=True)
class Target:
    """What a rank needs to make the pipeline.

    Attributes:
        pipeline: "module:Class".
        architecture: of the spec.
        folder: the checkpoint.
        dtype: "float32" or "bfloat16".
        engine: further settings of vLLM-Omni's `OmniDiffusionConfig`.
        layout: the parallel sizes that the engine is told.
    """

    pipeline: str
    architecture: str
    folder: str
    dtype: str = "float32"
    engine: Mapping[str, Any] = field(default_factory=dict)
    layout: Layout = field(default_factory=Layout)

    def changed(self, **changes: Any) -> Target:
        """With other values; names that are no field here go to `engine`."""
        own = {name: value for name, value in changes.items() if name in ("folder", "dtype", "layout")}
        engine = {name: value for name, value in changes.items() if name not in own}
        return replace(self, **own, engine={**self.engine, **engine})

    def engine_settings(self) -> dict[str, Any]:
        """The settings beside model and dtype, the layout's sizes not among them."""
        additional = dict(self.engine.get("additional_config", {}))
        if self.layout.sequence_parallel:
            additional["tp_sequence_parallel"] = True
        rest = {name: value for name, value in self.engine.items() if name != "additional_config"}
        return {**rest, **({"additional_config": additional} if additional else {})}

    def pipeline_class(self) -> Any:
        """The class."""
        return load(self.pipeline)

    def config(self) -> Any:
        """vLLM-Omni's configuration, as the engine has it."""
        from vllm_omni.diffusion.data import DiffusionParallelConfig, OmniDiffusionConfig

        layout = self.layout
        settings = self.engine_settings()
        sizes = settings.pop("parallel_config", None) or {
            "tensor_parallel_size": layout.tp,
            "ring_degree": layout.cp,
            "cfg_parallel_size": layout.cfg,
            "vae_patch_parallel_size": layout.vae_patch,
        }
        return OmniDiffusionConfig(
            model=self.folder,
            model_class_name=self.architecture,
            dtype=getattr(torch, self.dtype),
            parallel_config=DiffusionParallelConfig(**sizes),
            **settings,
        )


@dataclass
class Run:
    """What one rank saw of one request.

    Attributes:
        noise: digest of each output's initial noise.
        steps: digests of the latents after each step, of all outputs one after the other.
        final: digest of the final latents of each output.
        step_latents: the latents after each step, on rank 0.
        latents: the final latents of all outputs, on rank 0.
        output: what the pipeline returned, on rank 0: latents or frames.
        report: its generation report.
        plan: of each step the component that takes it and the number of its branches of guidance.
        graphs: graphs that were compiled for it.
    """

    noise: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    final: list[str] = field(default_factory=list)
    step_latents: list[torch.Tensor] = field(default_factory=list)
    latents: torch.Tensor | None = None
    output: torch.Tensor | None = None
    report: dict[str, Any] = field(default_factory=dict)
    plan: list[tuple[str, int]] = field(default_factory=list)
    graphs: int = 0


@dataclass
class RankRuns:
    """What one rank saw of several requests to one pipeline.

    Attributes:
        runs: of each request.
        groups: every process group that a collective used, by name; what is wrong with it, or "".
        collectives: names of the collectives.
        host_copies: lines of compiled graphs that copy to the host.
        warm_up_graphs: graphs that were compiled for the warm-up.
    """

    runs: list[Run]
    groups: dict[str, str]
    collectives: set[str]
    host_copies: list[str]
    warm_up_graphs: int = 0


def make_pipeline(target: Target) -> Any:
    """The pipeline as a worker has it after loading."""
    pipeline = target.pipeline_class()(od_config=target.config())
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def prepared(target: Target, request: KitRequest, output_type: str) -> Any:
    """vLLM-Omni's request after the pipeline's pre-processing, as it reaches a worker."""
    pre_process = target.pipeline_class().get_pre_process_func(target.config())
    return pre_process(omni_request(request, output_type))


def omni_request(request: KitRequest, output_type: str | None = "latent") -> Any:
    """The request as vLLM-Omni's engine makes it."""
    from vllm_omni.diffusion.request import OmniDiffusionRequest
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    sampling = {**request.sampling(), **({} if output_type is None else {"output_type": output_type})}
    return OmniDiffusionRequest(
        prompt=request.prompt_input(),
        sampling_params=OmniDiffusionSamplingParams(**sampling),
        request_id="conformance",
    )


def run_requests(
    target: Target, requests: list[KitRequest], compiled: bool = False, warmup_shapes: Sequence[str] = ()
) -> RankRuns:
    """Latents of `requests`, one after the other on one pipeline; compiled by `neuron_check`, pixels too.

    Pixels also of a request whose `more` asks for that `output_type`. Of `warmup_shapes` there is a warm-up first, by
    the requests that a worker sends itself.
    """
    from vllm_omni_neuron import warmup_requests

    pipeline = make_pipeline(target)
    backend, collectives = CheckBackend(), Collectives()
    if compiled:
        torch._dynamo.reset()
        pipeline.compile(backend=backend)
    runs, before = [], COUNTERS.graphs
    for warm_up in warmup_requests(warmup_shapes, pipeline):
        pipeline.forward(_batch(warm_up))
    warm_up_graphs = COUNTERS.graphs - before
    # Dynamo does not compile under such a mode; what is compiled has its collectives checked by the backend.
    with contextlib.nullcontext() if compiled else collectives:
        for request in requests:
            before = COUNTERS.graphs
            # Pixels where it is compiled: the VAE's graphs are to be seen, too.
            output_type = request.more.get("output_type", "pt" if compiled else "latent")
            run = generate(pipeline, prepared(target, request, output_type))
            run.graphs = COUNTERS.graphs - before
            runs.append(run)
    return RankRuns(runs, collectives.groups, collectives.names, backend.host_copies, warm_up_graphs)


def trace(target: Target, request: KitRequest) -> None:
    """Compile and run one request in a world that is only declared: what collectives return means nothing."""
    pipeline = make_pipeline(target)
    torch._dynamo.reset()
    pipeline.compile(backend="neuron_check")
    pipeline.forward(_batch(prepared(target, request, "latent")))


def decode_noise(target: Target, request: KitRequest) -> tuple[torch.Tensor | None, int]:
    """The request's initial noise through the VAE alone: what this rank has of it, and calls of the VAE's layers."""
    pipeline = make_pipeline(target)
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    for component in type(pipeline).spec.of_kind("vae"):
        vae = getattr(pipeline, component.name, None)
        for layer in [] if vae is None else vae.modules():
            if not list(layer.children()):
                layer.register_forward_hook(count)
    pipeline.diffuse = lambda latents, trajectory: latents
    result = pipeline.forward(_batch(prepared(target, request, "pt")))
    return (None if result.output is None else _payload(result)), calls


def refusals(cases: list[tuple[Target, KitRequest | None]]) -> list[tuple[str, str]]:
    """What comes of settings and requests that cannot be served, before there is a worker.

    Args:
        cases: the engine's settings; the request, or None to try the settings alone.

    Returns:
        For each the type of the error ("" if there is none) and its message.
    """
    found = []
    for target, request in cases:
        try:
            pre_process = target.pipeline_class().get_pre_process_func(target.config())
            if request is not None:
                pre_process(omni_request(request, None))
        except Exception as error:
            found.append((type(error).__name__, str(error)))
        else:
            found.append(("", ""))
    return found


def generate(pipeline: Any, ready: Any) -> Run:
    """One request, as `prepared` made it ready, through the pipeline."""
    with _recording(pipeline) as run:
        result = pipeline.forward(_batch(ready))
    if result.output is not None:
        run.output = _payload(result)
        run.report = dict(result.output["metadata"].get("generation", {}))
    request = pipeline.request
    steps = (pipeline.choose_model(value, request) for value in pipeline.scheduler.timesteps.tolist())
    run.plan = [(component, len(pipeline.branches(request, scale))) for component, scale in steps]
    return run


def _payload(result: Any) -> torch.Tensor:
    # A copy: what is made in inference mode cannot be used outside of it.
    [payload] = result.output["payload"].values()
    return payload.clone()


def _batch(ready: Any) -> Any:
    from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch

    return DiffusionRequestBatch([ready])


@contextlib.contextmanager
def _recording(pipeline: Any) -> Iterator[Run]:
    """Records noise, steps and latents of what the pipeline does meanwhile."""
    run, keep = Run(), pipeline.is_output_rank
    finals: list[torch.Tensor] = []
    originals = {"make_scheduler": pipeline.make_scheduler, "diffuse": pipeline.diffuse}

    def make_scheduler(*arguments: Any, **options: Any) -> Any:
        scheduler = originals["make_scheduler"](*arguments, **options)
        # A pipeline may hand out one scheduler again and again.
        step = getattr(scheduler.step, "not_recorded", scheduler.step)
        scheduler.step = _recorded_step(step, run, keep)
        return scheduler

    def diffuse(latents: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        run.noise.append(tensor_digest(latents))
        result = originals["diffuse"](latents, *arguments, **options)
        run.final.append(tensor_digest(result))
        if keep:
            finals.append(result.float().clone())
        return result

    pipeline.make_scheduler, pipeline.diffuse = make_scheduler, diffuse
    try:
        yield run
    finally:
        for name in originals:
            delattr(pipeline, name)
    if keep and finals:
        run.latents = torch.cat(finals)


def _recorded_step(step: Callable[..., Any], run: Run, keep: bool) -> Callable[..., Any]:
    def recorded(*arguments: Any, **options: Any) -> Any:
        result = step(*arguments, **options)
        parts = result.prev_sample if isinstance(result.prev_sample, tuple) else (result.prev_sample,)
        run.steps.append("".join(map(tensor_digest, parts)))
        if keep:
            run.step_latents.append(parts[0].float().clone())
        return result

    recorded.not_recorded = step  # type: ignore[attr-defined]
    return recorded


class CheckBackend:
    """The compile backend `neuron_check`, looking at the captured graphs as well.

    Attributes:
        host_copies: lines of the graphs' code that copy to the host, which a device would wait for in every call.
    """

    def __init__(self) -> None:
        self.host_copies: list[str] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: Any) -> Callable[..., Any]:
        """Look at a graph, then hand it on."""
        copies = (".to('cpu')", ".cpu()", ".item()")
        self.host_copies += [line.strip() for line in graph.code.splitlines() if any(copy in line for copy in copies)]
        return torch._dynamo.lookup_backend("neuron_check")(graph, inputs, **options)


class Collectives(TorchDispatchMode):
    """Remembers the process groups of all collectives that run meanwhile.

    Attributes:
        groups: by name; what is wrong with the group's partition of the world, or "".
        names: of the collectives.
    """

    def __init__(self) -> None:
        super().__init__()
        self.groups: dict[str, str] = {}
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note the group of a collective, then run the operation."""
        if func.namespace in ("_c10d_functional", "c10d", "omni_neuron"):
            for argument in (*args, *(kwargs or {}).values()):
                name = _group_name(argument)
                if name is None:
                    continue
                self.names.add(func.overloadpacket.__name__)
                if name not in self.groups:
                    self.groups[name] = _problem_of(name)
        return func(*args, **(kwargs or {}))


def _group_name(argument: Any) -> str | None:
    import torch.distributed as dist

    if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
        return dist.ProcessGroup.unbox(argument).group_name
    if isinstance(argument, str) and argument not in ("sum", "max", "min", "avg", "product"):
        return argument
    return None


def _problem_of(name: str) -> str:
    try:
        partition_of(name)
    except CompileError as error:
        return str(error)
    return ""
