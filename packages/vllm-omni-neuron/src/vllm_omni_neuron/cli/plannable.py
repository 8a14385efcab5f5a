# SPDX-License-Identifier: Apache-2.0
"""The models that `plan` and `lower` know: what the specs of installed model packages name in `plans` and `lowers`.

A module is imported when its model is asked for. Of two specs that claim one name, the distribution of others goes
before ours, as for pipelines.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import omni_neuron_runtime as runtime
from vllm_omni_neuron.registry import RegisteredModel, discover_models
from vllm_omni_neuron.sdk import ModelSpec, SpecAxis, SpecError

Purpose = Literal["plans", "lowers"]
DEFAULT_FRAMES = 81

logger = logging.getLogger(__name__)


class UnknownModelError(ValueError):
    """No installed model package knows this; the message names what is known."""


class Found(NamedTuple):
    """What `find_model` finds.

    Attributes:
        spec: of the model.
        made: for "plans" `omni_neuron_parallel.planning.ModelSizes`. For "lowers" an object with `make(component, *,
            height, width, frames, layers, sequence_parallel)`, which returns one rank's module and the keyword
            arguments of its call, both on fake tensors and in torch's default dtype.
    """

    spec: ModelSpec
    made: Any


def find_model(name: str, purpose: Purpose) -> Found:
    """The model of that name, or of that checkpoint folder.

    Raises:
        UnknownModelError: neither; or a folder of another architecture.
        ValueError: the model package refuses the folder.
    """
    specs = _specs()
    named = {key: (spec, function) for spec in specs for key, function in getattr(spec, purpose).items() if key}
    if name in named:
        spec, function = named[name]
        return Found(spec, _call(function))
    command = {"plans": "plan", "lowers": "lower"}[purpose]
    index = Path(name).expanduser() / "model_index.json"
    if not index.is_file():
        raise UnknownModelError(
            f"{name} is neither a model that {command} knows by name ({_listed(named)}) nor a checkpoint folder "
            "with a model_index.json"
        )
    try:
        architecture = json.loads(index.read_text(encoding="utf-8"))["_class_name"]
    except (ValueError, KeyError, TypeError) as error:
        raise UnknownModelError(f"{index} does not name a _class_name: {error!r}") from None
    checkpoints = {spec.architecture: spec for spec in specs if "" in getattr(spec, purpose)}
    if architecture not in checkpoints:
        raise UnknownModelError(
            f"{index} has _class_name {architecture!r}; {command} takes folders of {_listed(checkpoints)}"
        )
    spec = checkpoints[architecture]
    return Found(spec, _call(getattr(spec, purpose)[""], str(index.parent)))


def frames_of(spec: ModelSpec, asked: int | None) -> int:
    """The frames to plan or lower for: what was asked for, else 81 of a video and 1 of an image.

    Raises:
        ValueError: several frames of an image.
    """
    if spec.output == "image" and asked not in (None, 1):
        raise ValueError(f"{asked}: {spec.title} makes images; leave it unset")
    return asked or (1 if spec.output == "image" else DEFAULT_FRAMES)


def refused_axis(spec: ModelSpec, sizes: dict[SpecAxis, int]) -> tuple[SpecAxis, str] | None:
    """The first axis that the model cannot use in this size, and why; None where it can use all."""
    for axis, size in sizes.items():
        largest = spec.axes.get(axis, 1)
        if largest is not None and size > largest:
            valid = f"at most {largest}" if axis in spec.axes else "1: it has no such axis"
            return axis, f"{size}: {spec.title} takes {valid}"
    return None


def _specs() -> list[ModelSpec]:
    """The specs of all models in use, the one that goes first for a name last; a broken one is said in a warning."""
    specs = []
    models = [model for model in discover_models() if model.status == "registered"]
    for model in sorted(models, key=_precedence, reverse=True):
        try:
            spec = model.load_spec()
        except SpecError as error:
            logger.warning("%s", error)
            continue
        if spec is not None:
            specs.append(spec)
    return specs


def _precedence(model: RegisteredModel) -> tuple[bool, str]:
    return runtime.distribution_precedence(model.distribution)


def _call(function: str, *arguments: str) -> Any:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(*arguments)


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(sorted(names)) or "none: no model package that is installed declares any"
