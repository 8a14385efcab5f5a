# SPDX-License-Identifier: Apache-2.0
"""The models that `plan` and `lower` know: what model packages declare beside their PIPELINE_REGISTRY.

`PLANNABLE_MODELS` maps a name to "module:function" without arguments, `PLANNABLE_CHECKPOINTS` the `_class_name` of a
model_index.json to "module:function" of the folder; both return `omni_neuron_parallel.planning.ModelSizes`.
`LOWERABLE_MODELS` and `LOWERABLE_CHECKPOINTS` are alike and return an object with `make(component, *, height, width,
frames, dtype, layers, sequence_parallel)`, which returns a module and the keyword arguments of its call. A module is
imported when its model is asked for. Of two distributions that claim one name, others go before ours, as for pipelines.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, Literal

import omni_neuron_runtime as runtime
from vllm_omni_neuron.registry import GROUP


class UnknownModelError(ValueError):
    """No installed model package can plan for this; the message names what is known."""


def find_model(name: str, purpose: Literal["PLANNABLE", "LOWERABLE"] = "PLANNABLE") -> Any:
    """The model of that name, or of that checkpoint folder: a `ModelSizes`, or what `lower` asks for components.

    Raises:
        UnknownModelError: neither; or a folder of another architecture.
        ValueError: the model package refuses the folder.
    """
    models, checkpoints = _declared(f"{purpose}_MODELS"), _declared(f"{purpose}_CHECKPOINTS")
    if name in models:
        return _call(models[name])
    index = Path(name).expanduser() / "model_index.json"
    if not index.is_file():
        raise UnknownModelError(
            f"{name} is neither a known model ({_listed(models)}) nor a checkpoint folder with a model_index.json"
        )
    try:
        architecture = json.loads(index.read_text(encoding="utf-8"))["_class_name"]
    except (ValueError, KeyError, TypeError) as error:
        raise UnknownModelError(f"{index} does not name a _class_name: {error!r}") from None
    if architecture not in checkpoints:
        raise UnknownModelError(f"{index} has _class_name {architecture!r}; known are {_listed(checkpoints)}")
    return _call(checkpoints[architecture], str(index.parent))


def _declared(attribute: str) -> dict[str, str]:
    """What all usable model packages declare under `attribute`; a broken one has said so in a warning."""
    found: dict[str, str] = {}
    providers = runtime.discover_providers(GROUP).usable()
    for provider in sorted(providers, key=lambda provider: runtime.distribution_precedence(provider.distribution)):
        try:
            registry = provider.load()
        except runtime.ProviderError:
            continue
        for name, function in getattr(registry, attribute, {}).items():
            found.setdefault(name, function)
    return found


def _call(function: str, *arguments: str) -> Any:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(*arguments)


def _listed(names: dict[str, str]) -> str:
    return ", ".join(sorted(names)) or "none: no model package that is installed can be planned for"
