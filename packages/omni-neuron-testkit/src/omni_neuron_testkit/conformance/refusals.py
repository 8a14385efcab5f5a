# SPDX-License-Identifier: Apache-2.0
"""Bad input: settings and requests that must be refused by name, and sizes that must come out as announced."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import ranks
from .case import KitRequest
from .ranks import Target

if TYPE_CHECKING:
    from .kit import Kit

# Errors that say that nobody checked: something failed on a value that should not have come so far.
UNCHECKED = (
    "TypeError",
    "KeyError",
    "IndexError",
    "AttributeError",
    "AssertionError",
    "ZeroDivisionError",
    "RuntimeError",
)


@dataclass(frozen=True)
class Case:
    """Something that cannot be served.

    Attributes:
        names: the message must hold one of these.
        target: the engine's settings.
        request: None where the settings alone are at fault.
        what: for people, such as "height = 0".
    """

    names: tuple[str, ...]
    target: Target
    request: KitRequest | None
    what: str

    def problem(self, error: str, message: str) -> str:
        """What is wrong with the answer to it; "" if nothing."""
        if not error:
            return f"{self.what} is not refused"
        if error in UNCHECKED:
            return f"{self.what} ends in an error that no check made: {error}: {message}"
        if not any(re.search(rf"\b{re.escape(name)}\b", message) for name in self.names):
            return f"{self.what}: the message names none of {', '.join(self.names)}: {error}: {message}"
        return ""


def cases(kit: Kit) -> list[Case]:
    """What no model can serve, and what this one cannot by its spec."""
    return [*_requests(kit), *_settings(kit)]


def _requests(kit: Kit) -> Iterator[Case]:
    target, good = kit.target(), kit.request
    values: list[tuple[str, Any]] = [
        ("height", 0),
        ("width", -16),
        ("height", 1),
        ("num_inference_steps", 0),
        ("num_inference_steps", 2.5),
        ("guidance_scale", float("nan")),
        ("seed", -1),
        ("num_outputs_per_prompt", 0),
        ("max_sequence_length", 0),
        ("output_type", "gif"),
        ("prompt", " "),
    ]
    if kit.spec.output == "video":
        values += [("num_frames", 0), ("num_frames", -3), ("fps", 0)]
    else:
        values += [("num_frames", 9)]
    for name, value in values:
        yield Case((name,), target, good.changed(**{name: value}), f"{name} = {value!r}")
    if good.images:
        yield Case(("image",), target, good.changed(images={}), "a request without an image")
    elif not kit.spec.supports("image_input"):
        yield Case(("image",), target, good.changed(images={"image": object()}), "a request with an image")
    cp = kit.spec.axes.get("cp", 1)
    if cp is None:
        # More ranks than there can be tokens.
        many = kit.target().changed(parallel_config={"ring_degree": 1 << 20})
        yield Case(("cp", "ring_degree"), many, good, f"ring_degree = {1 << 20}")


def _settings(kit: Kit) -> Iterator[Case]:
    spec, target = kit.spec, kit.target()
    layouts: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
        "ulysses_degree = 2": ({"ulysses_degree": 2}, ("ulysses_degree",)),
        "pipeline_parallel_size = 2": ({"pipeline_parallel_size": 2}, ("pipeline_parallel_size",)),
        "tensor_parallel_size = 7919": ({"tensor_parallel_size": 7919}, ("tensor_parallel_size", "tp")),
        "cfg_parallel_size = 3": ({"cfg_parallel_size": 3}, ("cfg_parallel_size", "cfg")),
    }
    for axis, setting in (("cp", "ring_degree"), ("cfg", "cfg_parallel_size"), ("tp", "tensor_parallel_size")):
        if axis not in spec.axes:
            layouts[f"{setting} = 2"] = ({setting: 2}, (setting, axis))
    for what, (sizes, names) in layouts.items():
        # vLLM-Omni's own class may refuse it first, by name as well.
        yield Case(names, target.changed(parallel_config=sizes), None, what)
    yield Case(("dtype",), target.changed(dtype="float16"), None, "dtype = float16")
    empty = kit.folder / "empty"
    empty.mkdir(exist_ok=True)
    yield Case(("model_index.json",), target.changed(folder=str(empty)), None, "a folder without a checkpoint")
    needed = [component for component in spec.components if not component.optional]
    for number, component in enumerate((needed[0], *spec.of_kind("transformer")[:1])):
        folder = _without_component(kit, component.name, kit.folder / f"incomplete-{number}")
        yield Case(
            (component.name,), target.changed(folder=str(folder)), None, f"a checkpoint without {component.name}"
        )


def _without_component(kit: Kit, name: str, folder: Path) -> Path:
    """A copy of the tiny checkpoint, in a folder whose name says nothing, that lacks a component's folder."""
    if not folder.exists():
        whole = str(kit.checkpoint())
        shutil.copytree(whole, folder, ignore=lambda path, _: [name] if path == whole else [])
    return folder


def odd_sizes(kit: Kit) -> list[KitRequest]:
    """Requests of one step whose sizes are next to good ones."""
    short = kit.request.changed(num_inference_steps=1)
    found = [short.changed(height=short.height + 1), short.changed(width=short.width + short.width // 3 + 1)]
    if kit.spec.output == "video":
        found.append(short.changed(num_frames=(short.num_frames or 1) + 1))
    return found


def run_odd_sizes(target: Target, requests: list[KitRequest]) -> list[str]:
    """On a rank: what is wrong with the answer to each of `requests`, or ""."""
    pipeline = ranks.make_pipeline(target)
    return [_odd_size(pipeline, target, request) for request in requests]


def _odd_size(pipeline: Any, target: Target, request: KitRequest) -> str:
    asked = {name: getattr(request, name) for name in ("height", "width", "num_frames")}
    what = " × ".join(f"{name} {value}" for name, value in asked.items() if value is not None)
    try:
        ready = ranks.prepared(target, request, "pt")
    except ValueError as error:
        return (
            "" if any(name in str(error) for name in asked) else f"{what}: refused without the setting's name: {error}"
        )
    params = ready.sampling_params
    announced = [params.height, params.width]
    try:
        run = ranks.generate(pipeline, ready)
    except Exception as error:
        return f"{what} is let through and fails: {type(error).__name__}: {error}"
    assert run.output is not None
    made = list(run.output.shape[-2:])
    if made != announced:
        return f"{what}: announced are {announced} pixels, {made} came out"
    if run.output.dim() == 5 and run.output.shape[2] != params.num_frames:
        return f"{what}: announced are {params.num_frames} frames, {run.output.shape[2]} came out"
    return ""
