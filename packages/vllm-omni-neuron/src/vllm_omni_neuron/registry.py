# SPDX-License-Identifier: Apache-2.0
"""Pipelines that installed distributions offer in the entry-point group `vllm_omni_neuron.models`.

An entry point names a module or an object with a `PIPELINE_REGISTRY`: a list of dicts with the keys below. Reading it
imports that module, not the pipelines' own modules, which vLLM-Omni imports when a pipeline is asked for.

A distribution whose metadata requires another version of the SDK is not imported. What else it requires and is not
installed is named, and its models stay registered: they may work without.

Beside it `MODEL_SPECS` gives each architecture's `ModelSpec` as "module:NAME", imported when it is asked for, and `SDK`
the major version of the SDK that the package is written for. A package with neither is used, but not planned for.

Where several distributions claim one architecture, a distribution of others goes before ours, then the first by
normalised name; the rest are shadowed and a warning says so. That is also the rule for two entry points of one name.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import logging
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import omni_neuron_runtime as runtime
from vllm_omni_neuron.requirements import Unmet, how_to_meet, unmet_requirements, why_import_failed
from vllm_omni_neuron.sdk import SDK_VERSION, ModelSpec, SpecError, load_spec

GROUP = "vllm_omni_neuron.models"
REQUIRED_KEYS = ("model_arch", "class_name")
HOOK_KEYS = ("pre_process_func_name", "post_process_func_name", "ir_op_priority_func_name")
OPTIONAL_KEYS = ("module_name", *HOOK_KEYS, "final_output_type")
OUTPUT_TYPES = ("image", "video", "audio")

logger = logging.getLogger(__name__)

Status = Literal["registered", "shadowed", "failed", "filtered"]


class ModelPackageError(ImportError):
    """A model package cannot be used; the message names distribution, version, cause and, where known, the fix."""


class MalformedEntryError(ValueError):
    """A PIPELINE_REGISTRY is not of the documented shape; the message names distribution, entry and key."""


@dataclass(frozen=True)
class RegisteredModel:
    """One architecture that one distribution claims, or a distribution whose claims cannot be read.

    Attributes:
        architecture: the name in a checkpoint's `model_index.json`; "" where the registry cannot be read.
        class_name: the pipeline class.
        module: the module that holds it.
        entry_point: the name of the entry point, by which VLLM_PLUGINS filters.
        distribution: who offers it.
        version: its version.
        status: "registered", "shadowed" (another distribution's goes first), "failed" or "filtered" (by VLLM_PLUGINS).
        reason: why it is not registered; else "".
        hooks: the remaining keywords of vLLM-Omni's `register_diffusion_model`.
        final_output_type: what the model makes, "video" for vLLM-Omni's video endpoints; "" leaves it to vLLM-Omni.
        spec_path: "module:NAME" of its `ModelSpec`; "" where the package declares none.
        problems: what may keep it from working although it is registered: requirements that are not met.
    """

    architecture: str
    class_name: str
    module: str
    entry_point: str
    distribution: str
    version: str
    status: Status = "registered"
    reason: str = ""
    hooks: tuple[tuple[str, str], ...] = ()
    final_output_type: str = ""
    spec_path: str = ""
    problems: tuple[str, ...] = ()

    def load_spec(self) -> ModelSpec | None:
        """What the package says of the model; None where it says nothing. Imports the spec's module.

        Raises:
            SpecError: it cannot be had; the message names distribution, version and cause.
        """
        if not self.spec_path:
            return None
        where = f"spec {self.spec_path!r} of {self.distribution} {self.version}"
        try:
            spec = load_spec(self.spec_path)
        # Whatever a foreign module raises while it is imported, the others must still work; SystemExit included.
        except (Exception, SystemExit) as error:
            raise SpecError(f"{where}: {why_import_failed(self.distribution, error)}") from error
        if spec.architecture != self.architecture:
            raise SpecError(f"{where} is of {spec.architecture}, not of {self.architecture}")
        return spec

    def import_pipeline(self) -> type:
        """The pipeline class, its module imported.

        Raises:
            ModelPackageError: it cannot be; the message names distribution, version, cause and, where known, the fix.
        """
        where = f"pipeline {self.module}.{self.class_name} of {self.distribution} {self.version}"
        try:
            pipeline = getattr(importlib.import_module(self.module), self.class_name, None)
        except (Exception, SystemExit) as error:  # as in load_spec
            raise ModelPackageError(f"{where}: {why_import_failed(self.distribution, error)}") from error
        if not isinstance(pipeline, type):
            raise ModelPackageError(f"{where}: {self.module} has no such class")
        return pipeline


def registered_model(architecture: str) -> RegisteredModel | None:
    """The model that is used for `architecture`; None where no package offers one that can be."""
    return next((model for model in _registered() if model.architecture == architecture), None)


def _registered() -> list[RegisteredModel]:
    return [model for model in discover_models() if model.status == "registered"]


def spec_of(architecture: str) -> ModelSpec:
    """See `vllm_omni_neuron.sdk.model_spec`."""
    model = registered_model(architecture)
    if model is None:
        known = sorted(model.architecture for model in _registered())
        raise SpecError(f"no installed model package offers {architecture!r}; offered are {', '.join(known) or 'none'}")
    spec = model.load_spec()
    if spec is None:
        raise SpecError(f"{model.distribution} {model.version} declares no MODEL_SPECS for {architecture}")
    return spec


def discover_models() -> list[RegisteredModel]:
    """Every claim of every installed distribution, sorted by architecture; the one that is used comes first.

    What is wrong with one distribution is said in a warning and in its entry's `reason`, and leaves the others alone.
    """
    claims: list[RegisteredModel] = []
    for provider in runtime.discover_providers(GROUP):
        claims.extend(_claims_of(provider))
    claims.sort(key=_order)
    used: dict[str, RegisteredModel] = {}
    models = []
    for claim in claims:
        if claim.status == "registered" and claim.architecture in used:
            winner = used[claim.architecture]
            reason = (
                f"{winner.distribution} {winner.version} claims {claim.architecture} too and goes first; uninstall "
                f"one, or drop its entry point {winner.entry_point!r} with VLLM_PLUGINS"
            )
            _warn_once(
                f"{claim.architecture} of {claim.distribution} {claim.version} is left out: {reason} (distributions of "
                f"others go before omni-neuron's own, then by name)"
            )
            models.append(replace(claim, status="shadowed", reason=reason))
            continue
        if claim.status == "registered":
            used[claim.architecture] = claim
        models.append(claim)
    return models


def register_models() -> list[RegisteredModel]:
    """Register every architecture with vLLM-Omni, in place of its own pipeline where it has one; returns all claims."""
    from vllm_omni.diffusion.registry import register_diffusion_model

    from vllm_omni_neuron.compat import forget_process_funcs

    models = discover_models()
    for model in models:
        if model.status != "registered":
            continue
        forget_process_funcs(model.architecture)
        register_diffusion_model(
            model_arch=model.architecture, module_name=model.module, class_name=model.class_name, **dict(model.hooks)
        )
    return models


def broken_pipelines() -> list[str]:
    """Why pipelines of registered models cannot be imported. Imports all that can be, and vLLM with them."""
    found = []
    for model in _registered():
        try:
            model.import_pipeline()
        except ModelPackageError as error:
            found.append(str(error))
    return found


def declare_output_types() -> None:
    """Tell vLLM-Omni what the models make; it asks for that before it loads plugins and `register_models` runs."""
    from vllm_omni_neuron.compat import set_final_output_type

    for model in _registered():
        output = model.final_output_type or _output_of_spec(model)
        if output:
            set_final_output_type(model.architecture, output)


def _output_of_spec(model: RegisteredModel) -> str:
    try:
        spec = model.load_spec()
    except SpecError as error:
        _warn_once(str(error))
        return ""
    return "" if spec is None else spec.output


def _claims_of(provider: runtime.Provider) -> Iterator[RegisteredModel]:
    """What `provider` offers; one entry with a reason where that cannot be read."""
    whole = functools.partial(RegisteredModel, "", "", "", provider.name, provider.distribution, provider.version)
    if provider.status in ("filtered", "shadowed"):
        yield whole(status=provider.status, reason=provider.reason)
        return
    unmet = unmet_requirements(provider.distribution)
    of_sdk = [one for one in unmet if one.of_sdk]
    if of_sdk:
        reason = _requirements_text(provider.distribution, of_sdk)
        _warn_once(f"{provider} is left out: {reason}")
        yield whole(status="failed", reason=reason)
        return
    try:
        registry = provider.load()
    except runtime.ProviderError as error:
        assert error.__cause__ is not None
        reason = why_import_failed(provider.distribution, error.__cause__)
        if reason != provider.reason:  # which the provider has said in a warning
            _warn_once(f"{provider} is left out: {reason}")
        yield whole(status="failed", reason=reason)
        return
    try:
        _check_sdk(provider, registry)
        models = [
            _read_entry(provider, registry, index, entry) for index, entry in enumerate(_entries(provider, registry))
        ]
        specs = _spec_paths(provider, registry, [model.architecture for model in models])
    except MalformedEntryError as error:
        _warn_once(f"{error}; the whole entry point is left out")
        yield whole(status="failed", reason=str(error))
        return
    problems = (_requirements_text(provider.distribution, unmet),) if unmet else ()
    for problem in problems:
        _warn_once(f"{provider}: {problem}")
    for model in models:
        yield replace(model, spec_path=specs.get(model.architecture, ""), problems=problems)


def _check_sdk(provider: runtime.Provider, registry: Any) -> None:
    """Refuse a registry for another SDK, before anything of it is read whose form may be another one there."""
    sdk = getattr(registry, "SDK", None)
    if sdk is None and not getattr(registry, "MODEL_SPECS", None):
        return
    if sdk != SDK_VERSION[0]:
        raise MalformedEntryError(
            f"{provider}: its SDK is {sdk!r}, and this vllm-omni-neuron has the model SDK {SDK_VERSION[0]}; "
            f"uv pip install --upgrade {provider.distribution} vllm-omni-neuron"
        )


def _requirements_text(distribution: str, unmet: list[Unmet]) -> str:
    return f"{'; '.join(map(str, unmet))}; {how_to_meet(distribution, unmet)}"


def _entries(provider: runtime.Provider, registry: Any) -> list[Any]:
    entries = getattr(registry, "PIPELINE_REGISTRY", registry)
    if not isinstance(entries, list):
        found = type(entries).__name__
        raise MalformedEntryError(f"{provider}: its PIPELINE_REGISTRY must be a list of dicts; found a {found}")
    return entries


def _spec_paths(provider: runtime.Provider, registry: Any, architectures: list[str]) -> dict[str, str]:
    """`MODEL_SPECS` of the registry."""
    specs = getattr(registry, "MODEL_SPECS", {})
    if not isinstance(specs, dict):
        raise MalformedEntryError(f"{provider}: its MODEL_SPECS must be a dict; found a {type(specs).__name__}")
    for architecture, path in specs.items():
        if architecture not in architectures:
            raise MalformedEntryError(
                f"{provider}: MODEL_SPECS names {architecture!r}; PIPELINE_REGISTRY has {', '.join(architectures)}"
            )
        if not isinstance(path, str) or not all(path.partition(":")):
            raise MalformedEntryError(f"{provider}: MODEL_SPECS[{architecture!r}] is {path!r}; write 'module:NAME'")
    return dict(specs)


def _read_entry(provider: runtime.Provider, registry: Any, index: int, entry: Any) -> RegisteredModel:
    where = f"{provider}: PIPELINE_REGISTRY[{index}]"
    if not isinstance(entry, dict):
        raise MalformedEntryError(f"{where} is a {type(entry).__name__}; it must be a dict")
    for key in entry:
        if key not in (*REQUIRED_KEYS, *OPTIONAL_KEYS):
            near = difflib.get_close_matches(str(key), (*REQUIRED_KEYS, *OPTIONAL_KEYS), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join((*REQUIRED_KEYS, *OPTIONAL_KEYS))}"
            raise MalformedEntryError(f"{where} has the unknown key {key!r}; {hint}")
    for key in REQUIRED_KEYS:
        if key not in entry:
            raise MalformedEntryError(f"{where} lacks the key {key!r}")
    for key, value in entry.items():
        if not isinstance(value, str) or not value:
            if value is None and key in OPTIONAL_KEYS:
                continue
            raise MalformedEntryError(f"{where}: key {key!r} is {value!r}; it must be a non-empty string")
    if entry.get("final_output_type") not in (None, *OUTPUT_TYPES):
        raise MalformedEntryError(
            f"{where}: final_output_type is {entry['final_output_type']!r}; it must be one of {', '.join(OUTPUT_TYPES)}"
        )
    return RegisteredModel(
        architecture=entry["model_arch"],
        class_name=entry["class_name"],
        module=entry.get("module_name") or _default_module(provider, registry),
        entry_point=provider.name,
        distribution=provider.distribution,
        version=provider.version,
        hooks=tuple((key, entry[key]) for key in HOOK_KEYS if entry.get(key)),
        final_output_type=entry.get("final_output_type") or "",
    )


def _default_module(provider: runtime.Provider, registry: Any) -> str:
    """The package of the module that holds PIPELINE_REGISTRY, which then re-exports what the entry names."""
    if isinstance(registry, types.ModuleType):
        return registry.__package__ or registry.__name__
    return provider.value.partition(":")[0]


def _order(model: RegisteredModel) -> tuple[str, bool, str, str]:
    return model.architecture, *runtime.distribution_precedence(model.distribution), model.entry_point


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)
