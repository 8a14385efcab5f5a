# SPDX-License-Identifier: Apache-2.0
"""The SDK's pipeline with made-up models, in one process and without an engine."""

from __future__ import annotations

import dataclasses
import functools
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import nn
from vllm_omni.diffusion.cancellation import RequestCancellationRegistry, request_cancellation_scope
from vllm_omni.diffusion.data import DiffusionRequestAbortedError
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from omni_neuron_parallel import cfg
from vllm_omni_neuron.compilation import warmup_requests
from vllm_omni_neuron.model_runner import place
from vllm_omni_neuron.sdk import (
    FEATURES,
    ComponentSpec,
    GenerationRequest,
    ModelSpec,
    NeuronDiffusionPipeline,
    Prediction,
    RequestRules,
    Setting,
    Trajectory,
    check_number,
    denoising,
    resolve_request,
)

SIZES = {"height": 16, "width": 24, "num_inference_steps": 4, "seed": 5, "guidance_scale": 3.0}


def spec_of(output: str, *components: ComponentSpec) -> ModelSpec:
    return ModelSpec("ToyPipeline", "Toy", output, components, features=dict.fromkeys(FEATURES, True))  # type: ignore[arg-type]


class Denoiser(nn.Module):
    """Predicts weight · x + text · t / 1000."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight), requires_grad=False)

    def forward(self, x: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.weight * x + text * timestep / 1000


class Reader(nn.Module):
    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return text * 1.0


class Decoder(nn.Module):
    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        return latents[:, :3].tanh()


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()


class ToyPipeline(NeuronDiffusionPipeline):
    """An image model whose text is its length, and which counts what is asked of it."""

    spec: ClassVar[ModelSpec] = spec_of(
        "image",
        ComponentSpec("reader", "text_encoder"),
        ComponentSpec("denoiser", "transformer"),
        ComponentSpec("second_denoiser", "transformer", optional=True),
        ComponentSpec("vae", "vae"),
    )

    @classmethod
    def open_checkpoint(cls, od_config: Any) -> Any:
        return types.SimpleNamespace(path=Path("toy"), scheduler=lambda: FlowMatchEulerDiscreteScheduler(shift=3.0))

    @classmethod
    def request_rules(cls, od_config: Any, checkpoint: Any) -> RequestRules:
        return RequestRules(
            height=64,
            width=64,
            num_inference_steps=8,
            guidance_scale=4.0,
            max_sequence_length=16,
            spatial_stride=8,
            temporal_stride=None if cls.spec.output == "image" else 4,
        )

    def load_components(self) -> None:
        self.asked: list[str] = []
        self.reader = Reader()
        self.denoiser, self.second_denoiser = Denoiser(0.5), None
        self.vae = Vae() if self.decodes else None

    def encode_prompt(self, text: str, request: Any) -> torch.Tensor:
        self.asked.append(f"encode {text}")
        return self.reader(torch.tensor(float(len(text))))

    def latent_shape(self, request: Any) -> tuple[int, ...]:
        return (1, 4, request.height // 8, request.width // 8)

    def condition_model(self, name: str, encoded: torch.Tensor, trajectory: Trajectory) -> torch.Tensor:
        self.asked.append(f"condition {name}")
        return self.project(encoded)

    def project(self, encoded: torch.Tensor) -> torch.Tensor:
        return encoded / 10

    def model_inputs(
        self, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Any, trajectory: Trajectory
    ) -> dict[str, Any]:
        return {"x": latents, "timestep": timestep, "text": conditioning}

    def decode(self, latents: torch.Tensor) -> torch.Tensor | None:
        assert self.vae is not None
        return self.vae.decoder(latents)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsRequest(GenerationRequest):
    strength: float


class ExpertsPipeline(ToyPipeline):
    """A video model with two experts and a setting of its own."""

    spec: ClassVar[ModelSpec] = spec_of("video", *ToyPipeline.spec.components)

    @classmethod
    def request_rules(cls, od_config: Any, checkpoint: Any) -> RequestRules:
        rules = super().request_rules(od_config, checkpoint)
        setting = Setting("strength", 0.5, functools.partial(check_number, needed="a number"))
        return dataclasses.replace(rules, settings=(setting,), request_class=ExpertsRequest)

    def load_components(self) -> None:
        super().load_components()
        self.second_denoiser = Denoiser(-0.25)

    def latent_shape(self, request: Any) -> tuple[int, ...]:
        return (1, 4, (request.num_frames - 1) // 4 + 1, request.height // 8, request.width // 8)

    def choose_model(self, timestep: float, request: Any) -> tuple[str, float]:
        return ("denoiser", request.guidance_scale) if timestep >= 600 else ("second_denoiser", 1.0)

    def prepare(self, trajectory: Trajectory, prompt: Any) -> None:
        trajectory.condition = 2.0

    def finish(self, latents: torch.Tensor, trajectory: Trajectory) -> torch.Tensor:
        return latents * trajectory.condition

    def report(self, request: Any, trajectory: Trajectory) -> dict[str, Any]:
        return {"boundary": 600, "guidance_per_expert": {"denoiser": request.guidance_scale, "second_denoiser": 1.0}}


class NegatingPipeline(ToyPipeline):
    """Predicts the negative, and guides from the positive branch."""

    def combine_branches(self, predictions: list[Any], scale: float) -> Prediction:
        positive, negative = predictions
        return positive + scale * (positive - negative)

    def postprocess_prediction(
        self, prediction: Prediction, latents: torch.Tensor, timestep: torch.Tensor
    ) -> Prediction:
        assert isinstance(prediction, torch.Tensor)
        return -prediction


class ThreeBranchesPipeline(ToyPipeline):
    def branches(self, request: Any, scale: float) -> tuple[str, ...]:
        return ("positive", "negative", "style")

    def branch_text(self, branch: str, request: Any) -> str:
        return "as an engraving" if branch == "style" else super().branch_text(branch, request)


class PairPipeline(ToyPipeline):
    """Two predictions, the second of which its scheduler adds up."""

    def predict_noise(self, current_model: nn.Module, branch: str, **inputs: Any) -> Prediction:
        prediction = current_model(**inputs)
        return prediction, prediction.sum()

    def make_scheduler(self, request: Any) -> Any:
        inner = super().make_scheduler(request)
        self.sums: list[float] = []

        def step(predictions: Any, timestep: torch.Tensor, latents: torch.Tensor) -> Any:
            self.sums.append(float(predictions[1]))
            return inner.step(predictions[0], timestep, latents)

        return types.SimpleNamespace(timesteps=inner.timesteps, config=inner.config, step=step)


def make(pipeline_class: type[ToyPipeline], **config: Any) -> Any:
    settings = {"dtype": torch.float32, "model_config": {}, "vae_use_tiling": False, "enable_cpu_offload": False}
    pipeline = pipeline_class(od_config=types.SimpleNamespace(**settings, **config))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def run(pipeline: NeuronDiffusionPipeline, **changes: Any) -> Any:
    parameters = OmniDiffusionSamplingParams(guidance_scale_provided=True, **{**SIZES, **changes})
    prompt = {"prompt": "a red circle", "negative_prompt": "dark"}
    batch: Any = types.SimpleNamespace(requests=[types.SimpleNamespace(prompt=prompt)], sampling_params=parameters)
    return pipeline.forward(batch)


def steps(pipeline: Any, shape: tuple[int, ...], seed: int = 5) -> Iterator[tuple[float, torch.Tensor, Any]]:
    """Timesteps with the latents before each, and a function that takes the step: the loop, written again."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(SIZES["num_inference_steps"])
    latents = [torch.randn(shape, generator=torch.Generator().manual_seed(seed))]
    for timestep in scheduler.timesteps:
        yield float(timestep), latents[-1], lambda p, t=timestep: latents.append(scheduler.step(p, t, latents[-1])[0])
    yield -1.0, latents[-1], None


def branches_at(weight: float, latents: torch.Tensor, timestep: float, *lengths: int) -> list[torch.Tensor]:
    return [weight * latents + length / 10 * timestep / 1000 for length in lengths]


class ThreadsGroup:
    """The CFG group of two threads, each of which has its own rank."""

    axis, size, ranks = "cfg", 2, (0, 1)

    def __init__(self) -> None:
        self.local = threading.local()
        self.sent: list[torch.Tensor | None] = [None, None]
        self.barrier = threading.Barrier(2, timeout=20)

    @property
    def rank(self) -> int:
        return self.local.rank

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        self.sent[self.rank] = tensor
        self.barrier.wait()
        gathered = torch.cat([sent for sent in self.sent if sent is not None], dim)
        self.barrier.wait()
        return gathered


def on_two_cfg_ranks(monkeypatch: pytest.MonkeyPatch, pipeline_class: type[ToyPipeline]) -> list[Any]:
    """Final latents and what was asked of the pipeline, by rank."""
    group = ThreadsGroup()
    monkeypatch.setattr(denoising, "get_group", lambda axis: group)
    monkeypatch.setattr(cfg, "get_group", lambda axis: group)

    def of_rank(rank: int) -> tuple[torch.Tensor, list[str]]:
        group.local.rank = rank
        pipeline = make(pipeline_class)
        return run(pipeline, output_type="latent").output["payload"]["image"], pipeline.asked

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(of_rank, range(2)))


def test_what_a_model_must_write_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"methods encode_prompt, latent_shape, load_components, model_inputs$"):
        NeuronDiffusionPipeline(od_config=types.SimpleNamespace())  # type: ignore[abstract]
    monkeypatch.setattr(ToyPipeline, "load_components", lambda self: setattr(self, "reader", None))
    with pytest.raises(AttributeError, match=r"ToyPipeline\.load_components has not set denoiser, vae, which the spec"):
        make(ToyPipeline)


def test_a_video_of_two_experts() -> None:
    pipeline = make(ExpertsPipeline)
    output = run(pipeline, num_frames=5, num_outputs_per_prompt=2, extra_args={"profile": True})
    expected = []
    for seed in (5, 6):
        for timestep, latents, take in steps(pipeline, (1, 4, 2, 2, 3), seed):
            if take is None:
                expected.append((2 * latents)[:, :3].tanh())
            elif timestep >= 600:
                positive, negative = branches_at(0.5, latents, timestep, 12, 4)
                take(negative + 3.0 * (positive - negative))
            else:
                take(branches_at(-0.25, latents, timestep, 12)[0])
    assert set(output.output["payload"]) == {"video"}
    torch.testing.assert_close(output.output["payload"]["video"], torch.cat(expected))
    metadata = output.output["metadata"]
    assert metadata["video"] == {"fps": 16.0}
    report = metadata["generation"]
    assert report["steps_per_expert"] == {"denoiser": 3, "second_denoiser": 1}
    assert report["guidance_per_expert"] == {"denoiser": 3.0, "second_denoiser": 1.0}
    assert report["strength"] == 0.5
    assert (report["boundary"], report["model"], report["dtype"], report["seeds"]) == (600, "toy", "float32", [5, 6])
    assert {name: len(seconds) for name, seconds in report["step_seconds"].items()} == {
        "denoiser": 6,
        "second_denoiser": 2,
    }
    assert set(output.stage_durations) == {"text", "denoise", "vae", "transfer"}
    # Each text once; each expert's conditioning once a run, the first one's again as the second's took its place.
    once = ["condition denoiser"] * 2 + ["condition second_denoiser"]
    assert pipeline.asked == ["encode a red circle", "encode dark", *once, *once]


def test_an_image_of_one_transformer_with_its_own_guidance() -> None:
    pipeline = make(NegatingPipeline)
    output = run(pipeline, num_outputs_per_prompt=2).output
    for timestep, latents, take in steps(pipeline, (1, 4, 2, 3)):
        if take is not None:
            positive, negative = branches_at(0.5, latents, timestep, 12, 4)
            take(-(positive + 3.0 * (positive - negative)))
    assert set(output["payload"]) == {"image"}
    assert output["payload"]["image"].shape == (2, 3, 2, 3)
    torch.testing.assert_close(output["payload"]["image"][:1], latents[:, :3].tanh())
    assert set(output["metadata"]) == {"generation"}
    # A conditioning whose component runs first is kept for the next image.
    assert pipeline.asked.count("condition denoiser") == 2
    # Without guidance the negative prompt is not even encoded.
    pipeline.asked.clear()
    alone = run(pipeline, guidance_scale=1.0, output_type="latent").output["payload"]["image"]
    assert pipeline.asked == ["encode a red circle", "condition denoiser"]
    assert alone.shape == (1, 4, 2, 3)


class OnDevice(torch.Tensor):
    """On a device between graphs: all that can be done with it is to take it to the host, or leave it where it is."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.Tensor.cpu:
                return args[0].as_subclass(torch.Tensor)
            if func is torch.Tensor.to and isinstance(args[1], torch.device) and len(args) == 2 and not kwargs:
                return args[0]  # it is there already
            raise NotImplementedError(f"{func.__name__} between graphs")


class GraphDenoiser(Denoiser):
    def forward(self, x: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return super().forward(x, timestep, text.as_subclass(torch.Tensor)).as_subclass(OnDevice)


class GraphPipeline(ToyPipeline):
    """Whose components' outputs stay where a device would have them."""

    def load_components(self) -> None:
        super().load_components()
        self.denoiser = GraphDenoiser(0.5)

    def encode_prompt(self, text: str, request: Any) -> torch.Tensor:
        return super().encode_prompt(text, request).as_subclass(OnDevice)

    def project(self, encoded: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return super().project(encoded.as_subclass(torch.Tensor)).as_subclass(OnDevice)


def test_nothing_is_computed_on_the_device_between_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(make(ToyPipeline)).output["payload"]["image"]
    final = run(make(ToyPipeline), output_type="latent").output["payload"]["image"]
    assert torch.equal(run(make(GraphPipeline)).output["payload"]["image"], expected)
    with pytest.raises(NotImplementedError, match="between graphs"):
        GraphDenoiser(0.5)(torch.ones(2), torch.ones(1), torch.ones(1)) * 2
    for latents, _ in on_two_cfg_ranks(monkeypatch, GraphPipeline):
        assert torch.equal(latents, final)


def test_a_cancelled_request_ends_before_its_next_step() -> None:
    pipeline = make(ToyPipeline)
    signals = RequestCancellationRegistry()
    name = signals.create("request")
    taken = pipeline.combine_branches

    def cancel(predictions: list[Any], scale: float) -> Any:
        if pipeline.asked.append("step") or pipeline.asked.count("step") == 2:
            signals.cancel(["request"])
        return taken(predictions, scale)

    pipeline.combine_branches = cancel
    try:
        with request_cancellation_scope([name]), pytest.raises(DiffusionRequestAbortedError):
            run(pipeline)
    finally:
        signals.close()
    assert pipeline.asked.count("step") == 2 < SIZES["num_inference_steps"]


def test_branches_of_guidance(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotImplementedError, match="ThreeBranchesPipeline has 3 branches; combine_branches"):
        run(make(ThreeBranchesPipeline))
    monkeypatch.setattr(
        ThreeBranchesPipeline, "combine_branches", lambda _, p, scale: p[0] + scale * (p[1] - 2 * p[2]), raising=False
    )
    pipeline = make(ThreeBranchesPipeline)
    image = run(pipeline, output_type="latent").output["payload"]["image"]
    for timestep, latents, take in steps(pipeline, (1, 4, 2, 3)):
        if take is not None:
            positive, negative, style = branches_at(0.5, latents, timestep, 12, 4, 15)
            take(positive + 3.0 * (negative - 2 * style))
    torch.testing.assert_close(image, latents)
    # Of two CFG ranks the first computes two branches and the second one; both have the same latents, bit for bit.
    ranks = on_two_cfg_ranks(monkeypatch, ThreeBranchesPipeline)
    assert [asked.count("condition denoiser") for _, asked in ranks] == [2, 1]
    for latents, asked in ranks:
        assert len(asked) - asked.count("condition denoiser") == 3  # every text is encoded on every rank
        assert torch.equal(latents, image)


def test_a_prediction_of_two_tensors() -> None:
    pair, single = make(PairPipeline), make(ToyPipeline)
    images = [run(pipeline, output_type="latent").output["payload"]["image"] for pipeline in (pair, single)]
    assert torch.equal(*images)
    # Guidance is linear, so that the sums are guided as the tensors are.
    expected = []
    for timestep, latents, take in steps(pair, (1, 4, 2, 3)):
        if take is not None:
            positive, negative = branches_at(0.5, latents, timestep, 12, 4)
            take(negative + 3.0 * (positive - negative))
            expected.append(float((negative + 3.0 * (positive - negative)).sum()))
    assert pair.sums == pytest.approx(expected, rel=1e-4)


def test_initial_latents() -> None:
    pipeline = make(ToyPipeline)
    own = torch.randn(2, 4, 2, 3)
    made = run(pipeline, latents=own, num_outputs_per_prompt=2, output_type="latent").output["payload"]["image"]
    assert not torch.equal(made[0], made[1])
    second = run(pipeline, latents=own[1:], output_type="latent").output["payload"]["image"]
    assert torch.equal(made[1:], second)
    with pytest.raises(ValueError, match=r"latents have shape \[2, 4, 2, 3\]; this request needs \[1, 4, 2, 3\]"):
        run(pipeline, latents=own)
    with pytest.raises(ValueError, match="neither seed nor generator nor latents"):
        run(pipeline, seed=None)
    generators = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
    request = {"num_outputs_per_prompt": 2, "output_type": "latent"}
    drawn = run(pipeline, seed=None, generator=generators, **request).output["payload"]["image"]
    assert torch.equal(drawn, run(pipeline, **request).output["payload"]["image"])


def test_warm_up_shapes_of_images_have_no_frames() -> None:
    [warm_up] = warmup_requests(["16x24"])
    request = make(ToyPipeline).resolve(warm_up.prompt, warm_up.sampling_params)
    assert (request.height, request.width, request.num_frames) == (16, 24, 1)
    with pytest.raises(ValueError, match="warmup_shapes: '16' is not valid; write height x width x frames"):
        list(warmup_requests(["16"]))


def test_a_warm_up_for_one_frame_is_for_one() -> None:
    """In vLLM-Omni's `num_frames` a 1 means that no number is given."""
    rules = dataclasses.replace(ToyPipeline.request_rules(None, None), temporal_stride=4, num_frames=81)
    frames = [
        resolve_request(warm_up.prompt, warm_up.sampling_params, rules).num_frames
        for warm_up in warmup_requests(["16x24x1", "16x24x5", "16x24"])
    ]
    assert frames == [1, 5, 81]


def test_components_and_their_graphs() -> None:
    class Compiling(ToyPipeline):
        def extra_compiled(self) -> Iterator[tuple[str, Any, str, Any]]:
            yield "denoiser.project", self, "project", "transformer"

    torch._dynamo.reset()
    pipeline = make(Compiling)
    components = (pipeline._dit_modules, pipeline._encoder_modules, pipeline._vae_modules)
    assert components == (["denoiser"], ["reader"], ["vae"])
    eager = run(pipeline).output["payload"]["image"]
    pipeline.asked.clear()
    graphs: list[tuple[str, str]] = []

    def backend(graph: Any, inputs: Any, options: Any) -> Any:
        graphs.append((options["model_name"], options["compiler_args"][0]))
        return graph.forward

    pipeline.compile(backend=backend)
    compiled = run(pipeline)
    torch.testing.assert_close(compiled.output["payload"]["image"], eager)
    assert "compilation" in compiled.output["metadata"]["generation"]
    run(pipeline, seed=6)
    assert sorted(name for name, _ in graphs) == ["denoiser", "denoiser.project", "reader", "vae"]
    kinds = dict(graphs)
    assert kinds["denoiser"] == kinds["denoiser.project"] != kinds["vae"]


def test_what_the_spec_leaves_on_the_host() -> None:
    class Hosted(ToyPipeline):
        spec: ClassVar[ModelSpec] = spec_of(
            "image", ComponentSpec("reader", "text_encoder", host=True), *ToyPipeline.spec.components[1:]
        )

    torch._dynamo.reset()
    pipeline = make(Hosted)
    pipeline.reader.weight = nn.Parameter(torch.ones(1))
    graphs: list[str] = []

    def backend(graph: Any, inputs: Any, options: Any) -> Any:
        graphs.append(options["model_name"])
        return graph.forward

    pipeline.compile(backend=backend)
    run(pipeline)
    assert sorted(graphs) == ["denoiser", "vae"]
    assert pipeline.request.height == 16
    place(pipeline, torch.device("meta"))
    assert pipeline.denoiser.weight.is_meta and not pipeline.reader.weight.is_meta
