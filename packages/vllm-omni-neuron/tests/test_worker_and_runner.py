# SPDX-License-Identifier: Apache-2.0
"""The worker and the model runner without an engine: order of loading, generators, refusals, the parallel layer."""

from __future__ import annotations

import logging
import os
import tempfile
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from vllm_omni.diffusion.worker import diffusion_worker
from vllm_omni.diffusion.worker.diffusion_model_runner import DiffusionModelRunner

import omni_neuron_runtime as runtime
from vllm_omni_neuron import (
    NeuronDiffusionModelRunner,
    NeuronDiffusionWorker,
    capture,
    compat,
    model_runner,
    sleep,
    worker,
)


class Component(nn.Module):
    def __init__(self, name: str, events: list[str]) -> None:
        super().__init__()
        self.part = nn.Linear(2, 2)
        self.label, self.events = name, events

    def compile(self, *args: Any, **kwargs: Any) -> None:
        hooks = sum(len(module._forward_hooks) for module in self.modules())
        self.events.append(f"compile {self.label} {kwargs['backend']} hooks={hooks}")


class Pipeline(nn.Module):
    """Names that no runner can know."""

    _dit_modules: ClassVar[list[str]] = ["first_expert", "second_expert"]
    _encoder_modules: ClassVar[list[str]] = ["reader"]

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.first_expert = Component("first_expert", events)
        self.second_expert = None
        self.reader = Component("reader", events)
        self.events = events

    def to(self, device: Any, *args: Any) -> Any:
        self.events.append(f"to {device}")
        return self

    def predict_noise(self, **kwargs: Any) -> Any:
        return None


def runner_of(pipeline: Any, monkeypatch: pytest.MonkeyPatch, device: str = "meta", **config: Any) -> Any:
    runner = NeuronDiffusionModelRunner.__new__(NeuronDiffusionModelRunner)
    runner.device, runner.pipeline = torch.device(device), None
    runner.od_config = types.SimpleNamespace(
        **{"model_class_name": "TestPipeline", "model_config": {}, "enforce_eager": False, **config}
    )

    def load_model(self: Any, *_: Any) -> None:
        pipeline.events.append(f"load on {self.device}")
        self.pipeline = pipeline

    monkeypatch.setattr(DiffusionModelRunner, "load_model", load_model)
    platform = types.SimpleNamespace(get_compile_backend=lambda: "some_backend")
    monkeypatch.setattr(model_runner, "current_omni_platform", platform)
    return runner


def test_order_of_loading(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CPU first, device, hooks, compilation, and `predict_noise` last; a component this rank lacks is left out."""
    events: list[str] = []
    pipeline = Pipeline(events)
    settings = {"modules": ["part"], "capture_dir": str(tmp_path)}
    runner = runner_of(pipeline, monkeypatch, model_config={"tensor_capture": settings})
    original = pipeline.predict_noise
    monkeypatch.setattr(
        capture.TensorCapture, "observe", lambda _self, observed: events.append(f"observe {type(observed).__name__}")
    )
    runner.load_model()
    assert events == [
        "load on cpu",
        "to meta",
        "compile first_expert some_backend hooks=1",
        "compile reader some_backend hooks=0",
        "observe Pipeline",
    ]
    assert runner.device == torch.device("meta")
    assert pipeline.predict_noise == original


def test_eager_and_cpu_mode_do_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    runner_of(Pipeline(events), monkeypatch, device="cpu", enforce_eager=True).load_model()
    assert events == ["load on cpu"]
    events.clear()
    runner = runner_of(Pipeline(events), monkeypatch, device="cpu")
    monkeypatch.setattr(model_runner.current_omni_platform, "get_compile_backend", lambda: None)
    runner.load_model()
    assert events == ["load on cpu"]
    runner.load_model(load_format="dummy")
    assert events == ["load on cpu"]


def test_a_pipeline_may_compile_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Pipeline):
        def compile(self, *args: Any, **kwargs: Any) -> None:
            self.events.append(f"own compile {kwargs}")

    events: list[str] = []
    runner_of(Own(events), monkeypatch).load_model()
    assert events[-1] == "own compile {'backend': 'some_backend'}"


def test_each_shape_of_a_warm_up_is_a_phase_with_its_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_NEURON_COMPILE_TIMEOUT_S", "100")
    pipeline = Pipeline([])
    shapes = {"warmup_shapes": ["480x832x1", "720x1280x81"]}
    runner = runner_of(pipeline, monkeypatch, device="cpu", model_config=shapes)
    monkeypatch.setattr(
        NeuronDiffusionModelRunner,
        "_execute_request_list",
        lambda _self, reqs, **_: pipeline.events.append(model_runner.shape_of(reqs)),
    )
    monkeypatch.setattr(
        model_runner.startup, "report_phase", lambda phase, limit_s=None: pipeline.events.append((phase, limit_s))
    )
    runner.load_model()
    of_three = "OMNI_NEURON_COMPILE_TIMEOUT_S=100 for each of 3 components"
    assert pipeline.events[-5:] == [
        (f"compiling for 480×832×1 ({of_three})", 300.0),
        "480×832×1",
        (f"compiling for 720×1280×81 ({of_three})", 300.0),
        "720×1280×81",
        ("loading the model", None),
    ]


def test_a_declared_component_that_is_missing() -> None:
    pipeline = Pipeline([])
    del pipeline.reader
    with pytest.raises(AttributeError, match=r"Pipeline\._encoder_modules declares 'reader'"):
        model_runner.declared_components(pipeline)


def test_generators() -> None:
    runner = NeuronDiffusionModelRunner.__new__(NeuronDiffusionModelRunner)
    runner.device = torch.device("meta")
    seeded = types.SimpleNamespace(generator=None, generator_device=None, seed=3)
    runner._initialize_generator(seeded)
    assert seeded.generator.device.type == "cpu"
    assert torch.equal(
        torch.rand(4, generator=seeded.generator), torch.rand(4, generator=torch.Generator().manual_seed(3))
    )
    own = torch.Generator().manual_seed(5)
    given = types.SimpleNamespace(generator=own, generator_device=None, seed=3)
    runner._initialize_generator(given)
    assert given.generator is own


def test_capture_needs_configuration() -> None:
    runner = NeuronDiffusionModelRunner.__new__(NeuronDiffusionModelRunner)
    with pytest.raises(RuntimeError, match="tensor capture is not configured"):
        runner.enable_capture("x")
    runner.disable_capture()


def worker_of(**config: Any) -> Any:
    instance = NeuronDiffusionWorker.__new__(NeuronDiffusionWorker)
    instance.od_config = types.SimpleNamespace(**config)
    instance.rank, instance.lora_manager = 0, None
    instance.model_runner = types.SimpleNamespace(pipeline=types.SimpleNamespace())
    return instance


def test_order_of_device_initialisation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups are made under the timeout, adopted, and `F.gelu` is restored after the device runtime changed it."""
    events: list[Any] = []
    monkeypatch.setenv("OMNI_NEURON_COLLECTIVE_TIMEOUT_S", "77")
    monkeypatch.setattr(runtime, "is_cpu_mode", lambda: False)
    monkeypatch.setattr(runtime, "visible_cores", lambda: [4, 5])
    aten_gelu = torch.nn.functional.gelu

    def initialize_device_runtime(core: int, count: int) -> None:
        events.append(("device", core, count))
        monkeypatch.setattr(torch.nn.functional, "gelu", lambda x: x)

    monkeypatch.setattr(runtime, "initialize_device_runtime", initialize_device_runtime)

    def init_device(_self: Any) -> None:
        from torch.distributed import distributed_c10d

        events.append(("groups", distributed_c10d.default_pg_timeout.total_seconds()))

    monkeypatch.setattr(diffusion_worker.DiffusionWorker, "init_device", init_device)

    class Provider:
        def initialize_from_vllm_omni(self, **sizes: int) -> None:
            events.append(("adopt", sizes))

        def destroy(self) -> None:
            events.append("destroy")

    monkeypatch.setattr(worker, "load_parallel_provider", Provider)
    monkeypatch.setattr(diffusion_worker.DiffusionWorker, "shutdown", lambda _self: events.append("stock shutdown"))
    sizes = types.SimpleNamespace(
        tensor_parallel_size=2, sequence_parallel_size=1, cfg_parallel_size=1, vae_patch_parallel_size=2
    )
    instance = worker_of(num_gpus=2, parallel_config=sizes)
    instance.rank = 1
    instance.init_device()
    assert torch.nn.functional.gelu is aten_gelu
    instance.shutdown()
    instance.shutdown()
    assert events == [
        ("device", 5, 2),
        ("groups", 77.0),
        ("adopt", {"tp": 2, "cp": 1, "cfg": 1, "vae_patch": 2}),
        "destroy",
        "stock shutdown",
        "stock shutdown",
    ]


@pytest.mark.parametrize(("before", "after"), [(None, None), ("4-5", "4,5")])
def test_the_visible_cores_are_given_back(
    monkeypatch: pytest.MonkeyPatch, before: str | None, after: str | None
) -> None:
    """A single rank runs in the caller's process: neither its end nor its failure may spoil the next engine."""
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", before or "")
    if before is None:
        monkeypatch.delenv("NEURON_RT_VISIBLE_CORES")
    monkeypatch.delenv("NEURON_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(runtime, "is_cpu_mode", lambda: False)
    monkeypatch.setattr(
        runtime, "initialize_device_runtime", lambda core, _: os.environ.update(NEURON_RT_VISIBLE_CORES=str(core))
    )
    monkeypatch.setattr(NeuronDiffusionWorker, "_init_groups", lambda _self: None)
    monkeypatch.setattr(diffusion_worker.DiffusionWorker, "shutdown", lambda _self: None)
    instance = worker_of(num_gpus=1)
    instance.init_device()
    assert os.environ["NEURON_RT_VISIBLE_CORES"] == ("4" if before else "0")
    instance.shutdown()
    assert os.environ.get("NEURON_RT_VISIBLE_CORES") == after

    def fail(_self: Any) -> None:
        raise RuntimeError("no rendezvous")

    monkeypatch.setattr(NeuronDiffusionWorker, "_init_groups", fail)
    with pytest.raises(RuntimeError, match="no rendezvous"):
        worker_of(num_gpus=1).init_device()
    assert os.environ.get("NEURON_RT_VISIBLE_CORES") == after


def provider(distribution: str) -> Any:
    return types.SimpleNamespace(distribution=distribution, load=lambda: lambda: distribution)


def test_parallel_layer_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    from omni_neuron_parallel import ParallelProvider

    found: list[Any] = []
    monkeypatch.setattr(runtime, "discover_providers", lambda *_, **__: types.SimpleNamespace(usable=lambda: found))
    assert isinstance(worker.load_parallel_provider(), ParallelProvider)  # also where VLLM_PLUGINS drops ours
    found.append(provider("omni-neuron-parallel"))
    assert isinstance(worker.load_parallel_provider(), ParallelProvider)
    found.append(provider("acme"))
    assert worker.load_parallel_provider() == "acme"
    found.append(provider("zeta"))
    with pytest.raises(RuntimeError, match="several distributions offer a parallel layer"):
        worker.load_parallel_provider()


def test_a_filter_that_does_not_name_our_parallel_layer_is_no_news(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from omni_neuron_parallel import ParallelProvider

    monkeypatch.setenv("VLLM_PLUGINS", "neuron,wan22")
    with caplog.at_level(logging.WARNING):
        assert isinstance(worker.load_parallel_provider(), ParallelProvider)
    assert "is left out" not in caplog.text


def test_lora_is_refused_clearly_where_the_pipeline_takes_none() -> None:
    instance = worker_of(lora_path="adapter.safetensors")
    with pytest.raises(NotImplementedError, match=r"lora_path='adapter.safetensors': this pipeline takes no LoRA"):
        instance.init_lora_manager()
    adapter = types.SimpleNamespace(lora_name="style")
    request = types.SimpleNamespace(request_id="1", sampling_params=types.SimpleNamespace(lora_request=adapter))
    scheduled = types.SimpleNamespace(scheduled_new_reqs=[types.SimpleNamespace(req=request)])
    for call in (
        lambda: instance.add_lora(adapter),
        lambda: instance.execute_model(request, None),
        lambda: instance.execute_model(scheduled.scheduled_new_reqs, None),
        lambda: instance.execute_model_batch(scheduled, None),
        lambda: instance.execute_stepwise(scheduled),
    ):
        with pytest.raises(NotImplementedError, match="adapter 'style': this pipeline takes no LoRA adapters"):
            call()
    worker_of(lora_path=None).init_lora_manager()


class Adapters:
    """What a pipeline's `make_lora_manager` returns, as far as these tests go."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def add_adapter(self, lora_request: Any) -> bool:
        self.calls.append(lora_request.lora_path)
        return True

    def set_active_adapter(self, lora_request: Any, lora_scale: float = 1.0) -> None:
        self.calls.append(lora_request)


def test_the_pipelines_own_lora_manager_loads_the_configured_adapters() -> None:
    instance = worker_of(lora_path=["high", "low"])
    manager = Adapters()
    instance.model_runner.pipeline.make_lora_manager = lambda: manager
    instance.init_lora_manager()
    assert manager.calls == ["high", "low"]
    assert instance.add_lora(types.SimpleNamespace(lora_name="style", lora_path="style"))


def test_sleep_frees_the_memory_and_wake_up_restores_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from vllm_omni_neuron.platforms.vllm_platform import NeuronPlatform

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    instance = worker_of()
    pipeline = instance.model_runner.pipeline = nn.Linear(4096, 2048).requires_grad_(False)
    pipeline.weight.normal_()
    instance.lora_manager = Adapters()
    before = {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}
    places, nbytes = list(pipeline.parameters()), 4 * 2048 * 4097
    used = NeuronPlatform.memory_allocated()
    assert instance.sleep(1) == nbytes
    assert NeuronPlatform.memory_allocated() < used - 0.9 * nbytes
    assert instance.lora_manager.calls == [None]  # the base sleeps, not a merged adapter
    assert instance.sleep(1) == 0
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) == nbytes
    with pytest.raises(RuntimeError, match="this worker sleeps"):
        instance.execute_model(types.SimpleNamespace(request_id="1"), None)
    assert instance.wake_up(["kv_cache"])
    assert pipeline.weight.numel() == 0
    assert instance.wake_up()
    assert all(torch.equal(tensor, before[name]) for name, tensor in pipeline.state_dict().items())
    assert all(now is then for now, then in zip(pipeline.parameters(), places, strict=True))
    assert not list(tmp_path.iterdir())


def test_sleep_says_what_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = worker_of(enable_sleep_mode=True)
    with pytest.raises(NotImplementedError, match=r"sleep\(level=2\): the valid level is 1"):
        instance.sleep(2)
    pipeline = instance.model_runner.pipeline = nn.Linear(2, 2)
    with monkeypatch.context() as full:
        full.setattr(sleep, "take_weights", lambda *_: (_ for _ in ()).throw(OSError("No space left on device")))
        with pytest.raises(RuntimeError, match=r"do not fit into .* No space left .* set TMPDIR"):
            instance.sleep()
    assert pipeline.weight.numel() == 4
    monkeypatch.setattr(runtime, "is_cpu_mode", lambda: False)
    for call in (instance.init_device, instance.sleep):
        with pytest.raises(NotImplementedError, match="not on a NeuronCore, whose runtime does not tell"):
            call()


def test_restore_gelu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "gelu", lambda x: x)
    compat.restore_gelu()
    assert torch.nn.functional.gelu is torch._C._nn.gelu
