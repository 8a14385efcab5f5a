# SPDX-License-Identifier: Apache-2.0
"""One run of the model through vLLM-Omni's engine, with workers of their own and a broken package beside it.

What needs workers is done in it, too: tensors are captured, and the engine sleeps.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .case import Layout
from .pool import DEADLINE_S

if TYPE_CHECKING:
    from .kit import Kit

BROKEN = "conformance-broken-model"
BROKEN_REASON = "the conformance kit broke this package on purpose"
CAPTURED = "conformance"  # what the captured run is called


@dataclass
class EngineRun:
    """What the engine, and discovery in its process, made of the model.

    Attributes:
        distribution, version, class_name, status, reason: of the architecture's claim that is used; "" without one.
        broken_status, broken_reason: of the broken package beside it.
        latents: final ones.
        output_problem: what is wrong with the output in the form that users get, or "".
        captured_latents: final ones of the same request while tensors were captured.
        capture_folder: of these tensors.
        freed: bytes of weights that left a rank's memory when the engine slept, by rank that answered.
        latents_after_sleep: final ones of the same request after it woke up.
        output_is_back: whether the output was the same bits then, too.
        errors: what went wrong in a feature's part of the run, by the feature.
    """

    distribution: str = ""
    version: str = ""
    class_name: str = ""
    status: str = ""
    reason: str = ""
    broken_status: str = ""
    broken_reason: str = ""
    latents: torch.Tensor | None = None
    output_problem: str = ""
    captured_latents: torch.Tensor | None = None
    capture_folder: Path | None = None
    freed: list[int] = field(default_factory=list)
    latents_after_sleep: torch.Tensor | None = None
    output_is_back: bool = False
    errors: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def broken_package(folder: Path) -> Iterator[None]:
    """An installed distribution that offers a model and cannot be imported, in this process and those it starts."""
    module = BROKEN.replace("-", "_")
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (folder / f"{module}.py").write_text(f"raise ImportError({BROKEN_REASON!r})\n")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {BROKEN}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[vllm_omni_neuron.models]\n{module} = {module}\n")
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        importlib.invalidate_caches()


def claim(architecture: str) -> EngineRun:
    """What discovery says of the architecture and of the broken package."""
    from vllm_omni_neuron import discover_models

    found, models = EngineRun(), discover_models()
    for model in models:
        if model.architecture == architecture and not found.status:
            found.distribution, found.version, found.class_name = model.distribution, model.version, model.class_name
            found.status, found.reason = model.status, model.reason
        if model.distribution == BROKEN:
            found.broken_status, found.broken_reason = model.status, model.reason
    return found


def run(kit: Kit, layout: Layout) -> EngineRun:
    """Latents and output of the suite's request through `Omni`, on the layout's ranks."""
    with broken_package(kit.folder / "beside"):
        found = claim(kit.spec.architecture)
        if found.status == "registered":
            _generate(kit, layout, found)
    return found


def _generate(kit: Kit, layout: Layout, found: EngineRun) -> None:
    from vllm_omni.entrypoints.omni import Omni
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    from vllm_omni_neuron import register_neuron_pipelines

    register_neuron_pipelines()  # vLLM-Omni does it once a process, perhaps before this package was on the path
    captures, sleeps = kit.examines("tensor_capture"), kit.examines("sleep")
    folder = kit.folder / "captured"
    capture = {"modules": list(kit.suite.captured_modules), "capture_dir": str(folder)}
    more: dict[str, Any] = {}
    if captures:
        more["additional_config"] = {**kit.suite.engine.get("additional_config", {}), "tensor_capture": capture}
    target = kit.target(layout, **more)
    omni = Omni(
        model=target.folder,
        dtype=target.dtype,
        tensor_parallel_size=layout.tp,
        ring_degree=layout.cp,
        cfg_parallel_size=layout.cfg,
        enable_cpu_offload=kit.spec.supports("cpu_offload"),
        enable_sleep_mode=sleeps,
        **target.engine_settings(),
    )
    try:

        def generate(**changes: Any) -> Any:
            request = kit.request.changed(**changes)
            sampling = OmniDiffusionSamplingParams(**request.sampling())
            [output] = omni.generate(request.prompt_input(), sampling, use_tqdm=False)
            return output

        def latents() -> torch.Tensor:
            return torch.as_tensor(generate(output_type="latent").images[0])

        def on_workers(method: str, *arguments: Any) -> Any:
            [answers] = omni.engine.collective_rpc(method, timeout=DEADLINE_S, args=arguments)  # of the one stage
            return answers

        # Decoding first: with offload the transformers' weights leave and come back, as the latents then show.
        output = generate(num_inference_steps=1)
        found.latents = latents()
        if captures:
            with _noting(found.errors, "tensor_capture"):
                on_workers("enable_capture", CAPTURED)
                found.captured_latents = latents()
                on_workers("disable_capture")
                found.capture_folder = folder / CAPTURED
        if sleeps:  # last: a worker that does not wake up answers no more requests
            with _noting(found.errors, "sleep"):
                found.freed = on_workers("sleep", 1)
                on_workers("wake_up")
                again = generate(num_inference_steps=1)
                found.output_is_back = np.array_equal(np.asarray(again.images[0]), np.asarray(output.images[0]))
                found.latents_after_sleep = latents()
    finally:
        omni.close()
    found.output_problem = _output_problem(kit, layout, output)


@contextlib.contextmanager
def _noting(errors: dict[str, str], feature: str) -> Iterator[None]:
    """What is raised is the feature's, whose test fails; the tests of the others need the run all the same."""
    try:
        yield
    except Exception as error:
        errors[feature] = f"{type(error).__name__}: {error}"


def _output_problem(kit: Kit, layout: Layout, output: Any) -> str:
    """What is wrong with an output in its usual form: sizes, or a report of another layout."""
    request = kit.request
    [made] = output.images
    if kit.spec.output == "image":
        size = made.size
        if size != (request.width, request.height):
            return f"the image has {size[0]}×{size[1]} pixels; asked for are {request.width}×{request.height}"
    else:
        frames = tuple(made.shape)[-4:]
        expected = (request.num_frames, request.height, request.width, 3)
        if frames != expected:
            return f"the video has the shape {list(frames)}; asked for is {list(expected)}"
    told = output.multimodal_output["metadata"]["generation"]["layout"]
    sizes = {"tp": layout.tp, "cp": layout.cp, "cfg": layout.cfg}
    return "" if told == sizes else f"the workers report the layout {told}; the engine was started with {sizes}"
