# SPDX-License-Identifier: Apache-2.0
"""One run of the model through vLLM-Omni's engine, with workers of their own and a broken package beside it."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .case import Layout

if TYPE_CHECKING:
    from .kit import Kit

BROKEN = "conformance-broken-model"
BROKEN_REASON = "the conformance kit broke this package on purpose"


@dataclass
class EngineRun:
    """What the engine, and discovery in its process, made of the model.

    Attributes:
        distribution, version, class_name, status, reason: of the architecture's claim that is used; "" without one.
        broken_status, broken_reason: of the broken package beside it.
        latents: final ones.
        output_problem: what is wrong with the output in the form that users get, or "".
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
    target = kit.target(layout)
    omni = Omni(
        model=target.folder,
        dtype=target.dtype,
        tensor_parallel_size=layout.tp,
        ring_degree=layout.cp,
        cfg_parallel_size=layout.cfg,
        enable_cpu_offload=kit.spec.supports("cpu_offload"),
        **target.engine_settings(),
    )
    try:

        def generate(**changes: Any) -> Any:
            request = kit.request.changed(**changes)
            sampling = OmniDiffusionSamplingParams(**request.sampling())
            [output] = omni.generate(request.prompt_input(), sampling, use_tqdm=False)
            return output

        # Decoding first: with offload the transformers' weights leave and come back, as the latents then show.
        output = generate(num_inference_steps=1)
        found.latents = torch.as_tensor(generate(output_type="latent").images[0])
    finally:
        omni.close()
    found.output_problem = _output_problem(kit, layout, output)


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
