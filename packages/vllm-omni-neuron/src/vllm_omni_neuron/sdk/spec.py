# SPDX-License-Identifier: Apache-2.0
"""What a model package says of a model: components, how they may be split, features. Imports nothing heavy."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

SDK_VERSION = (1, 0)
"""Major and minor version of the model SDK. Within one major version what is public only grows."""

Output = Literal["image", "video"]
"""What a model makes."""
ComponentKind = Literal["transformer", "text_encoder", "vae", "vae_encoder", "image_encoder"]
"""What a component of a pipeline is."""
SpecAxis = Literal["tp", "sp", "cp", "cfg", "vae_patch"]
"""Tensor, sequence (within TP), context, guidance and VAE patch parallelism."""
Dtype = Literal["float32", "bfloat16"]
"""Of weights and activations."""
Feature = Literal[
    "compile",
    "cpu_offload",
    "vae_tiling",
    "image_input",
    "last_image_input",
    "lora",
    "cache_dit",
    "fp8",
    "tensor_capture",
    "sleep",
    "warmup_shapes",
    "context_ring",
]
"""What a model may support; `docs/features.md` of the repository says what each is."""
FEATURES: tuple[Feature, ...] = get_args(Feature)
"""All of `Feature`, in the order of the support matrix."""
SPEC_AXES: tuple[SpecAxis, ...] = get_args(SpecAxis)
"""All of `SpecAxis`."""


class SpecError(ValueError):
    """A `ModelSpec` that contradicts itself; the message names the field."""


@dataclass(frozen=True)
class ComponentSpec:
    """A component of a pipeline.

    Attributes:
        name: the pipeline's attribute, and the checkpoint's folder.
        kind: decides the compiler's arguments, and where the component runs.
        axes: the axes whose ranks share its weights or its work; none: it runs whole.
        reason: why it runs whole, where a reader would expect it to be split.
        optional: whether a checkpoint, or a rank, may be without it.
        host: it stays on the host and is not compiled, such as an encoder of another library that runs once a request.
    """

    name: str
    kind: ComponentKind
    axes: tuple[SpecAxis, ...] = ()
    reason: str = ""
    optional: bool = False
    host: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """What the runner, the planner, the command line and the conformance kit must know of one architecture.

    Attributes:
        architecture: `_class_name` in the checkpoint's model_index.json, vLLM-Omni's name.
        title: the model's name for people.
        output: what it makes.
        components: of the pipeline, in the order in which they run.
        axes: the axes that the model can use, by the largest size that makes sense; None: as large as its shapes allow.
            An axis that is missing can only be 1.
        branches: predictions that a guided step combines; the limit of the CFG axis.
        dtypes: that it computes in.
        features: what it supports: True, or the reason why not. Every feature of `FEATURES` is named.
        plans: for `vllm-omni-neuron plan`: "module:function" without arguments by a published model's name; under
            "" one that takes a checkpoint folder. Both return a `ModelSizes`.
        lowers: for `vllm-omni-neuron lower`, likewise; both return an object with `make(component, …)`.
        environment: variables that the model needs set, by name; see `merge_profiles`.
    """

    architecture: str
    title: str
    output: Output
    components: tuple[ComponentSpec, ...]
    features: Mapping[Feature, bool | str]
    axes: Mapping[SpecAxis, int | None] = field(default_factory=dict)
    branches: int = 2
    dtypes: tuple[Dtype, ...] = ("bfloat16", "float32")
    plans: Mapping[str, str] = field(default_factory=dict)
    lowers: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _refuse_others("features", self.features, FEATURES)
        _refuse_others("axes", self.axes, SPEC_AXES)
        missing = [name for name in FEATURES if name not in self.features]
        if missing:
            raise SpecError(f"{self.architecture}: features lacks {', '.join(missing)}; give True or a reason")
        for name, support in self.features.items():
            if support is not True and not (isinstance(support, str) and support):
                raise SpecError(f"{self.architecture}: features[{name!r}] is {support!r}; give True or a reason")
        names = [component.name for component in self.components]
        if len(set(names)) != len(names) or not names:
            raise SpecError(f"{self.architecture}: components are {names}; each needs a name of its own")
        for component in self.components:
            surplus = [axis for axis in component.axes if axis not in self.axes]
            if surplus:
                raise SpecError(
                    f"{self.architecture}: component {component.name!r} is split over {', '.join(surplus)}, which axes "
                    "does not name"
                )

    def supports(self, feature: Feature) -> bool:
        """Whether the model has a feature; `why_not` says why it has not."""
        return self.features[feature] is True

    def why_not(self, feature: Feature) -> str:
        """The declared reason for a feature that the model lacks; empty where it has it."""
        support = self.features[feature]
        return support if isinstance(support, str) else ""

    def of_kind(self, *kinds: ComponentKind) -> tuple[ComponentSpec, ...]:
        """The components of these kinds."""
        return tuple(component for component in self.components if component.kind in kinds)


@functools.cache
def load_spec(path: str) -> ModelSpec:
    """The spec that "module:NAME" names; imports the module.

    Raises:
        SpecError: the path names no `ModelSpec`.
        ImportError: the module, or something that it imports, is missing; or whatever else its import raises.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise SpecError(f"spec {path!r}: write it as module:NAME")
    spec = getattr(importlib.import_module(module), name, None)
    if not isinstance(spec, ModelSpec):
        raise SpecError(f"spec {path!r} is a {type(spec).__name__}; it must be a ModelSpec")
    return spec


def model_spec(architecture: str) -> ModelSpec:
    """The spec of the installed model that is used for `architecture`, `_class_name` in a model_index.json.

    Raises:
        SpecError: no usable model package has the architecture, or its spec cannot be had; the message says why.
    """
    from vllm_omni_neuron.registry import spec_of

    return spec_of(architecture)


def _refuse_others(name: str, given: Iterable[str], known: Iterable[str]) -> None:
    others = [key for key in given if key not in known]
    if others:
        raise SpecError(f"{name} names {', '.join(map(repr, others))}; known are {', '.join(known)}")
