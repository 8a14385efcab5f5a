# SPDX-License-Identifier: Apache-2.0
"""The class that a model package subclasses, with the tests that say whether its model is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from omni_neuron_testkit.pass_rule import FLOAT32_ALLOWANCE, compare_three_way

from . import captured, coverage, engine, ranks, refusals
from .case import (
    STANDARD_LAYOUTS,
    KitRequest,
    Layout,
    Published,
    ReferenceRun,
    diffusers_reference,
    supported,
)
from .kit import ONE, Kit, first_run
from .ranks import load

NOT_SUPPORTED = "not supported: "
Latents = torch.Tensor | ReferenceRun


class ModelConformance:
    """The conformance kit for one model: subclass it in a test file, as `class TestMyModel(ModelConformance)`.

    `spec`, `pipeline`, `checkpoint` and `reference_pipeline` or `reference` must be given, `published` too unless it is
    in `not_supported`. A test that can neither run nor is declared as not supported fails. Every figure and reason is
    in the report (`pytest --conformance-report FOLDER`).

    Attributes:
        spec: the `ModelSpec`, or "module:NAME" of it.
        pipeline: the pipeline class, or "module:Class"; a module that a spawned process can import.
        reference_pipeline: the class of diffusers that makes the reference; "" where `reference` is replaced.
        request: small, with a few late steps; the defaults suit an image model with strides of 32 pixels or less.
        layouts: what is compared with one rank; None for `STANDARD_LAYOUTS`, as far as the spec has their axes.
        engine: further settings of vLLM-Omni's engine, such as {"flow_shift": 5.0}.
        not_supported: reasons by the name of a test ("memory_plan"), of one with its case ("layout[tp2-sp]"), or of an
            axis of the spec ("cp").
        allowance: relative L2 error that float32 arithmetic in another order may have, of final latents and frames.
        vae_request: of a size that gives the VAE several tiles; None for the request with a width of 320.
        other_size: sizes of a second request, for graphs; None for the request with a double width.
        graphs: graphs of the first request and of one of `other_size`; None checks only that the second one needs no
            more than the first.
        same_graphs: further changes of the request that must compile nothing, such as {"sample_solver": "euler"}.
        other_graphs: further changes of the request, each with the number of graphs that it needs.
        captured_modules: patterns of the modules whose results are captured, as the engine's setting has them; the
            default means the members of the transformers' lists, such as "blocks.0".
        real_size: height, width and frames of the published model's usual output.
        published_name: which of `spec.plans` is that model; "" for the only one.
        tp_sizes: tensor-parallel sizes of the published model whose shards are checked.
    """

    spec: ClassVar[Any]
    pipeline: ClassVar[Any]
    reference_pipeline: ClassVar[str] = ""
    request: ClassVar[KitRequest] = KitRequest()
    layouts: ClassVar[Sequence[Layout] | None] = None
    engine: ClassVar[Mapping[str, Any]] = {}
    not_supported: ClassVar[Mapping[str, str]] = {}
    allowance: ClassVar[float] = FLOAT32_ALLOWANCE
    vae_request: ClassVar[KitRequest | None] = None
    other_size: ClassVar[Mapping[str, int] | None] = None
    graphs: ClassVar[tuple[int, int] | None] = None
    same_graphs: ClassVar[Sequence[Mapping[str, Any]]] = ()
    other_graphs: ClassVar[Sequence[tuple[Mapping[str, Any], int]]] = ()
    captured_modules: ClassVar[Sequence[str]] = (r"\w+\.\w+\.\d+",)
    real_size: ClassVar[tuple[int, int, int]] = (480, 832, 81)
    published_name: ClassVar[str] = ""
    tp_sizes: ClassVar[Sequence[int]] = (1, 2)

    @staticmethod
    def checkpoint(folder: Path) -> Path:
        """Write the tiny checkpoint, in diffusers' layout with random weights; returns its folder."""
        raise NotImplementedError("the suite needs `checkpoint(folder)`, which writes a tiny checkpoint")

    @classmethod
    def reference(cls, folder: Path, request: KitRequest, dtype: torch.dtype) -> Latents:
        """The final latents of `request` by other code, from the same checkpoint: by default `reference_pipeline`'s.

        A static method in its place, for a reference of another kind, may return those after each step and the output,
        too; see `diffusers_reference`.

        Args:
            folder: of the checkpoint.
            request: the suite's own.
            dtype: float32, or bfloat16 for the three-way comparison.
        """
        if not cls.reference_pipeline:
            raise NotImplementedError(
                "the suite needs `reference_pipeline`, or `reference(folder, request, dtype)`, which returns latents"
            )
        import diffusers

        return diffusers_reference(getattr(diffusers, cls.reference_pipeline), folder, request, dtype)

    @staticmethod
    def published() -> Mapping[str, Published]:
        """The published model's components by name, on the meta device, for the parallel groups in force."""
        raise NotImplementedError("the suite needs `published()`, or a reason in not_supported['loader_coverage']")

    # What pytest needs.

    @pytest.fixture(scope="class")
    @classmethod
    def _shared_kit(cls, tmp_path_factory: pytest.TempPathFactory) -> Kit:
        return Kit(cls, tmp_path_factory.mktemp("conformance"))

    @pytest.fixture
    def kit(self, _shared_kit: Kit, request: pytest.FixtureRequest) -> Kit:
        """What the tests share; a test that is declared as not supported ends here, with the reason."""
        _shared_kit.figures = {}
        name = request.node.name.removeprefix("test_")
        for declared in (name, name.partition("[")[0]):
            if declared in self.not_supported:
                pytest.skip(NOT_SUPPORTED + self.not_supported[declared])
        return _shared_kit

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """A test for every layout."""
        if "layout" in metafunc.fixturenames:
            metafunc.parametrize("layout", layouts_of(self), ids=str)

    # The tests, those that need no process first.

    def test_spec(self, kit: Kit) -> None:
        """The spec loads, its pipeline declares it, and no test of the kit is replaced or taken away."""
        spec, pipeline = kit.spec, load(self.pipeline)
        assert pipeline.spec is spec or pipeline.spec == spec, (
            f"{pipeline.__name__}.spec is another one than {spec.title}'s"
        )
        for name in dir(ModelConformance):
            if name.startswith("test_"):
                own = getattr(type(self), name) is getattr(ModelConformance, name)
                assert own, f"{name} is replaced; declare what is not supported in not_supported, with the reason"
        known = {*names_of_tests(), *("tp", "sp", "cp", "cfg", "vae_patch", "bfloat16")}
        unknown = [name for name in self.not_supported if name.partition("[")[0] not in known]
        assert not unknown, f"not_supported names {', '.join(unknown)}; known are {', '.join(sorted(known))}"
        empty = [name for name, reason in self.not_supported.items() if not reason.strip()]
        assert not empty, f"not_supported gives no reason for {', '.join(empty)}"
        shown = {"vae_patch", *self.not_supported, *(axis for layout in layouts_of(self) for axis in layout.axes)}
        unseen = [axis for axis in spec.axes if axis not in shown]
        assert not unseen, f"the spec has the axes {', '.join(unseen)}, which no layout of the suite uses"

    def test_loader_coverage(self, kit: Kit) -> None:
        """Of the published model every checkpoint key is used or declared unused, and every parameter is filled."""
        found = coverage.problems(self.published, kit.spec, self.tp_sizes)
        kit.figures["parameters"] = coverage.count_parameters(self.published())
        assert not found, "\n".join(found)

    def test_memory_plan(self, kit: Kit) -> None:
        """`spec.plans` knows the published model's weights, and some layout of it fits a trn2's memory."""
        kit.figures |= coverage.check_plan(kit.spec, self.published_name, self.real_size, self.published)

    def test_bad_input(self, kit: Kit) -> None:
        """Settings and requests that cannot be served are refused by name, before a worker starts; nothing hangs."""
        cases = refusals.cases(kit)
        [found] = kit.on_ranks(ONE, ranks.refusals, [(case.target, case.request) for case in cases])
        kit.figures["cases"] = len(cases)
        wrong = [case.problem(*answer) for case, answer in zip(cases, found, strict=True)]
        assert not any(wrong), "\n".join(filter(None, wrong))

    def test_sizes(self, kit: Kit) -> None:
        """Sizes that are no multiple of the strides come out as announced, or are refused."""
        cases = refusals.odd_sizes(kit)
        outputs = kit.on_ranks(ONE, refusals.run_odd_sizes, kit.target(), cases)[0]
        wrong = [text for text in outputs if text]
        kit.figures["sizes"] = len(cases)
        assert not wrong, "\n".join(wrong)

    def test_parity_float32(self, kit: Kit) -> None:
        """Final latents, and those after every step that the reference records, are the reference's."""
        reference, ours = kit.reference("float32"), first_run(kit.denoised())
        if reference.steps:
            kit.measure_steps("largest step error", reference.steps, ours.step_latents, self.allowance)
        kit.measure(
            "error", compare_three_way(reference.latents, None, ours.latents, "latents", allowance=self.allowance)
        )

    def test_output(self, kit: Kit) -> None:
        """What the final latents are decoded to is what the reference decodes its own to, in float32."""
        expected, ours = kit.reference("float32").output, first_run(kit.denoised()).output
        assert expected is not None, "the reference does not decode; say why in not_supported['output']"
        kit.measure("error", compare_three_way(expected, None, ours, "the output", allowance=self.allowance))

    def test_parity_bfloat16(self, kit: Kit) -> None:
        """In bfloat16 our error is of the size of the reference's own."""
        _need(self, "bfloat16", "bfloat16" in kit.spec.dtypes, "the spec has no bfloat16")
        float32, low = kit.reference("float32"), kit.reference("bfloat16")
        ours = first_run(kit.denoised(dtype="bfloat16"))
        comparison = compare_three_way(float32.latents, low.latents, ours.latents, "latents", allowance=self.allowance)
        if comparison.low_precision is not None:
            kit.figures["reference's error"] = comparison.low_precision.l2
        kit.measure("error", comparison)

    def test_layout(self, kit: Kit, layout: Layout) -> None:
        """The latents of several ranks are those of one, after every step."""
        _need_layout(self, kit, layout)
        alone, ours = first_run(kit.denoised()), first_run(kit.denoised(layout))
        kit.measure_steps("largest step error", alone.step_latents, ours.step_latents, self.allowance)
        kit.measure("error", compare_three_way(alone.latents, None, ours.latents, "latents", allowance=self.allowance))

    def test_context_ring(self, kit: Kit) -> None:
        """Keys that travel in a ring over CP give the latents of one rank, too."""
        _need(self, "context_ring", kit.spec.supports("context_ring"), kit.spec.why_not("context_ring"))
        layout = Layout(cp=2)
        _need_layout(self, kit, layout)
        settings = {**self.engine.get("additional_config", {}), "context_method": "ring"}
        target = kit.target(layout, additional_config=settings)
        results = kit.on_ranks(layout, ranks.run_requests, target, [kit.request])
        assert "collective_permute" in results[0].collectives, (
            "context_method = 'ring' was set, and nothing was rotated"
        )
        alone, ours = first_run(kit.denoised()), first_run(results)
        kit.measure_steps("largest step error", alone.step_latents, ours.step_latents, self.allowance)
        kit.measure("error", compare_three_way(alone.latents, None, ours.latents, "latents", allowance=self.allowance))

    def test_rank_agreement(self, kit: Kit) -> None:
        """All ranks of a layout hold the same bits: the noise, the latents after every step, the final ones."""
        layouts = _need_ranks(self, kit)
        for layout in layouts:
            runs = [rank.runs[0] for rank in kit.denoised(layout)]
            for rank, run in enumerate(runs):
                for what, theirs, own in (
                    ("the initial noise", runs[0].noise, run.noise),
                    *(
                        (f"step {n}", [a], [b])
                        for n, (a, b) in enumerate(zip(runs[0].steps, run.steps, strict=True), 1)
                    ),
                    ("the final latents", runs[0].final, run.final),
                ):
                    assert own == theirs, f"{layout}: {what} of rank {rank} are not rank 0's"
        kit.figures["layouts"] = len(layouts)

    def test_seeds(self, kit: Kit) -> None:
        """A seed is a noise whatever the layout, two seeds are two noises, and output k has the seed's plus k."""
        first, again, second, two = _short_runs(kit)
        assert again.final == first.final, "one seed gave two results"
        assert second.noise != first.noise, "two seeds gave one noise"
        assert two.noise == [*first.noise, *second.noise], "output k of a request has not the noise of the seed plus k"
        assert two.final == [*first.final, *second.final], "an output depends on the others of its request"
        for layout in _multi_rank_layouts(self, kit):
            for rank, run in enumerate(kit.denoised(layout)):
                same = run.runs[0].noise == first.noise
                assert same, f"{layout}: the noise of rank {rank} is another than one rank's, of the same seed"

    def test_vae_patch(self, kit: Kit) -> None:
        """Ranks that share the VAE's tiles make what one rank makes of all tiles, and each of them decodes some."""
        layout = next((one for one in _multi_rank_layouts(self, kit) if one.world_size == 2), None)
        assert layout is not None, "no layout of two ranks, which could share the VAE's tiles"
        shared = Layout(tp=layout.tp, cp=layout.cp, cfg=layout.cfg, vae_patch=2)
        _need_layout(self, kit, shared)
        request = self.vae_request or kit.request.changed(width=320)
        tiled: dict[str, Any] = {"vae_use_tiling": True} if kit.spec.supports("vae_tiling") else {}
        [(alone, _)] = kit.on_ranks(ONE, ranks.decode_noise, kit.target(**tiled), request)
        results = kit.on_ranks(shared, ranks.decode_noise, kit.target(shared, **tiled), request)
        idle = [rank for rank, (_, calls) in enumerate(results) if not calls]
        assert not idle, f"ranks {idle} decoded no tile of {request.height}×{request.width} pixels"
        assert [rank for rank, (frames, _) in enumerate(results) if frames is not None] == [0]
        kit.measure("error", compare_three_way(alone, None, results[0][0], "the output", allowance=self.allowance))

    def test_replica_groups(self, kit: Kit) -> None:
        """The groups of every eager collective are part of a partition of the world; `graphs` sees compiled ones."""
        names = 0
        for layout in _need_ranks(self, kit):
            for rank, run in enumerate(kit.denoised(layout)):
                assert run.groups, f"{layout}, rank {rank}: no collective was seen, so ranks share no work"
                wrong = {name: problem for name, problem in run.groups.items() if problem}
                assert not wrong, f"{layout}, rank {rank}: " + "; ".join(wrong.values())
                names += len(run.groups)
        kit.figures["groups"] = names

    def test_graphs(self, kit: Kit) -> None:
        """What is compiled is one full graph each, of operations that Neuron has, and computes what eager code does."""
        _need(self, "compile", kit.spec.supports("compile"), kit.spec.why_not("compile"))
        [compiled] = kit.once("compiled", lambda: _compile(kit))
        first, eager = compiled.runs[0], _short_runs(kit)[0]
        kit.figures["graphs"] = graphs = compiled.warm_up_graphs + first.graphs
        assert graphs, "the pipeline's `compile` compiled nothing that a request calls"
        assert not compiled.host_copies, f"a graph copies to the host: {'; '.join(compiled.host_copies)}"
        for what, theirs, ours in (
            ("latents", eager.latents, first.latents),
            ("output", eager.output, first.output),
        ):
            kit.measure(f"error of {what}", compare_three_way(theirs, None, ours, what, allowance=self.allowance))
        widest = max(_multi_rank_layouts(self, kit), key=lambda one: one.world_size, default=None)
        if widest is not None:
            # On paper: one rank traces what all of them run, groups included; in the dtype of devices.
            dtype = "bfloat16" if "bfloat16" in kit.spec.dtypes else "float32"
            target, request = kit.target(widest, dtype), kit.request.changed(num_inference_steps=1)
            kit.on_ranks(widest, ranks.trace, target, request, paper=True)

    def test_recompilation(self, kit: Kit) -> None:
        """A second request compiles nothing, whatever its text, seed, steps, guidance; another size its graphs."""
        _need(self, "compile", kit.spec.supports("compile"), kit.spec.why_not("compile"))
        [compiled] = kit.once("compiled", lambda: _compile(kit))
        first, *rest = (run.graphs for run in compiled.runs)
        first += compiled.warm_up_graphs
        resized, limit = rest[len(_same_graphs(self))], self.graphs
        kit.figures |= {"graphs": first, "graphs of another size": resized}
        assert limit is None or (first, resized) == tuple(limit), f"{first} and {resized} graphs; expected are {limit}"
        assert 0 < resized <= first, f"a request of another size compiled {resized} graphs, the first one {first}"
        expected = [0] * len(_same_graphs(self)) + [resized] + [count for _, count in self.other_graphs] + [0]
        for changes, graphs, wanted in zip(_changes(self, kit.request), rest, expected, strict=True):
            assert graphs == wanted, (
                f"a request with {changes or 'the first size again'} compiled {graphs} graphs, not {wanted}"
            )

    def test_warmup_shapes(self, kit: Kit) -> None:
        """After a warm-up for the request's size the first request compiles nothing."""
        _need(self, "warmup_shapes", kit.spec.supports("warmup_shapes"), kit.spec.why_not("warmup_shapes"))
        _need(self, "compile", kit.spec.supports("compile"), kit.spec.why_not("compile"))
        [compiled] = kit.once("compiled", lambda: _compile(kit))
        kit.figures["graphs"] = compiled.warm_up_graphs
        assert compiled.warm_up_graphs, "the warm-up compiled nothing"
        graphs = compiled.runs[0].graphs
        assert not graphs, f"after the warm-up of {_warmup_shapes(kit)} a request of that size compiled {graphs} graphs"

    def test_discovery(self, kit: Kit) -> None:
        """The installed package is found by its entry point, and an engine with spawned workers runs the model."""
        layout, found = _engine_run(self, kit)
        kit.figures |= {"distribution": found.distribution, "layout": str(layout)}
        assert found.status == "registered", f"{kit.spec.architecture} is {found.status or 'not found'}: {found.reason}"
        assert found.class_name == load(self.pipeline).__name__, f"the entry point names {found.class_name}"
        alone = first_run(kit.denoised(layout)).latents
        kit.measure("error", compare_three_way(alone, None, found.latents, "latents", allowance=self.allowance))
        assert found.output_problem == "", found.output_problem

    def test_isolation(self, kit: Kit) -> None:
        """A broken package beside this one is named, and changes nothing for it."""
        _, found = _engine_run(self, kit)
        assert found.broken_status == "failed", f"the broken package beside this one is {found.broken_status!r}"
        assert engine.BROKEN_REASON in found.broken_reason, found.broken_reason
        assert found.status == "registered" and found.latents is not None

    def test_tensor_capture(self, kit: Kit) -> None:
        """Tensors of every step, rank and branch of guidance are captured, and that changes no bit of the latents."""
        layout, found = _feature_run(self, kit, "tensor_capture")
        assert found.capture_folder is not None
        kit.figures |= captured.check(found.capture_folder, first_run(kit.denoised()).plan, layout)
        assert _same(found.captured_latents, found.latents), "other latents while tensors are captured"

    def test_sleep(self, kit: Kit) -> None:
        """Asleep, ranks have their weights out of memory; awake again they give the same bits as before."""
        _, found = _feature_run(self, kit, "sleep")
        kit.figures["bytes freed by rank 0"] = found.freed[0]
        assert all(found.freed), f"asleep the ranks freed {found.freed} bytes"
        assert _same(found.latents_after_sleep, found.latents), "other latents after sleep than before"
        assert found.output_is_back, "another output after sleep than before, though the latents are the same"


def layouts_of(suite: Any) -> Sequence[Layout]:
    """What a suite compares with one rank, whether its spec allows it or not."""
    return suite.layouts or STANDARD_LAYOUTS


def names_of_tests() -> list[str]:
    """The kit's tests without `test_`, in the order in which they run."""
    return [name.removeprefix("test_") for name in vars(ModelConformance) if name.startswith("test_")]


def _need(suite: ModelConformance, name: str, has: bool, reason: str) -> None:
    """Skip the test where the spec declares that it lacks something; fail where it gives no reason."""
    if has:
        return
    reason = suite.not_supported.get(name) or reason
    assert reason, f"the spec lacks {name} and neither it nor not_supported says why"
    pytest.skip(NOT_SUPPORTED + reason)


def _need_layout(suite: ModelConformance, kit: Kit, layout: Layout) -> None:
    if supported(layout, kit.spec):
        return
    lacking = [axis for axis in layout.axes if not supported(_only(axis), kit.spec)] or list(layout.axes)
    reasons = [suite.not_supported[axis] for axis in lacking if axis in suite.not_supported]
    assert len(reasons) == len(lacking), (
        f"{layout} needs {', '.join(lacking)}, which the spec's axes have not or not as large; say why in "
        f"not_supported[{lacking[0]!r}]"
    )
    pytest.skip(NOT_SUPPORTED + "; ".join(reasons))


def _only(axis: str) -> Layout:
    return {
        "tp": Layout(tp=2),
        "sp": Layout(tp=2, sequence_parallel=True),
        "cp": Layout(cp=2),
        "cfg": Layout(cfg=2),
        "vae_patch": Layout(cp=2, vae_patch=2),
    }[axis]


def _engine_run(suite: ModelConformance, kit: Kit) -> tuple[Layout, engine.EngineRun]:
    """The one engine's run, and its layout."""
    layout = next(iter(_multi_rank_layouts(suite, kit)), ONE)
    return layout, kit.once("engine", lambda: engine.run(kit, layout))


def _feature_run(suite: ModelConformance, kit: Kit, feature: str) -> tuple[Layout, engine.EngineRun]:
    """`_engine_run`; the test ends here where the spec lacks the feature, or the engine failed in it."""
    _need(suite, feature, kit.spec.supports(feature), kit.spec.why_not(feature))
    layout, found = _engine_run(suite, kit)
    assert found.status == "registered", f"{kit.spec.architecture} is {found.status or 'not found'}: {found.reason}"
    assert feature not in found.errors, found.errors[feature]
    return layout, found


def _same(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    return first is not None and second is not None and torch.equal(first, second)


def _multi_rank_layouts(suite: ModelConformance, kit: Kit) -> list[Layout]:
    """The suite's layouts that the spec allows and that are not declared as not supported."""
    return [
        layout
        for layout in layouts_of(suite)
        if supported(layout, kit.spec) and not {"layout", f"layout[{layout}]"} & set(suite.not_supported)
    ]


def _need_ranks(suite: ModelConformance, kit: Kit) -> list[Layout]:
    """`_multi_rank_layouts`; skip the test where there are none; the layouts' own tests say why."""
    layouts = _multi_rank_layouts(suite, kit)
    if not layouts:
        pytest.skip(NOT_SUPPORTED + "no layout of several ranks is")
    return layouts


def _short_runs(kit: Kit) -> list[ranks.Run]:
    """The short request with pixels; the same again, the next seed, two outputs."""
    short = _short(kit)
    requests = [
        short.changed(output_type="pt"),
        short,
        short.changed(seed=short.seed + 1),
        short.changed(num_outputs_per_prompt=2),
    ]
    [alone] = kit.once("short", lambda: kit.on_ranks(ONE, ranks.run_requests, kit.target(), requests))
    return alone.runs


def _short(kit: Kit) -> KitRequest:
    """Two steps of the request; with a warm-up, what that leaves to the model, such as the text's length, is left."""
    short = kit.request.changed(num_inference_steps=2)
    return replace(short, more={}) if _warmup_shapes(kit) else short


def _warmup_shapes(kit: Kit) -> list[str]:
    """The request's size in the engine's setting of that name; empty where it is not tested."""
    sizes = (kit.request.height, kit.request.width, kit.request.num_frames)
    return ["x".join(str(size) for size in sizes if size)] if kit.examines("warmup_shapes") else []


def _same_graphs(suite: Any) -> list[Mapping[str, Any]]:
    others = {"seed": 1, "prompt": "Another text.", "num_inference_steps": 3}
    return [others, {"guidance_scale": 1.0}, *suite.same_graphs]


def _changes(suite: Any, request: KitRequest) -> list[Mapping[str, Any]]:
    """What each compiled request changes: same graphs first, then another size, further ones, and the first again."""
    size = suite.other_size or {"width": 2 * request.width}
    return [*_same_graphs(suite), size, *(changes for changes, _ in suite.other_graphs), {}]


def _compile(kit: Kit) -> Any:
    short = _short(kit)
    requests = [short, *(short.changed(**changes) for changes in _changes(kit.suite, short))]
    return kit.on_ranks(ONE, ranks.run_requests, kit.target(), requests, True, _warmup_shapes(kit))
