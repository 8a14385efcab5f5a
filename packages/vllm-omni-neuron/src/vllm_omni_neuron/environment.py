# SPDX-License-Identifier: Apache-2.0
"""The environment that a model's engine gets: the base profile and what the model's package adds."""

from __future__ import annotations

from dataclasses import dataclass

import omni_neuron_runtime as runtime
from vllm_omni_neuron.registry import RegisteredModel, registered_model
from vllm_omni_neuron.sdk import BASE_PROFILE, EnvironmentProfile, MergedProfile, merge_profiles


@dataclass(frozen=True)
class Variable:
    """A variable of a model's environment, as it is here and now.

    Attributes:
        name: of the variable.
        value: that its workers get.
        source: "base", the model's distribution, or "user" where it is set already.
        replaced: the profile's value, where the user's is another one; else None.
    """

    name: str
    value: str
    source: str
    replaced: str | None = None


def profile_of(architecture: str) -> MergedProfile:
    """The profile of a model: the base alone where no package of ours or others offers it, or it declares no spec.

    Raises:
        SpecError: its spec cannot be had.
        ProfileError: its profile is not valid.
    """
    model = registered_model(architecture)
    return merge_profiles(BASE_PROFILE) if model is None else model_profile(model)


def model_profile(model: RegisteredModel) -> MergedProfile:
    """The profile of a model; raises as `profile_of`."""
    spec = model.load_spec()
    own = [] if spec is None else [EnvironmentProfile(model.distribution, spec.environment)]
    return merge_profiles(BASE_PROFILE, *own)


def resolve(profile: MergedProfile) -> list[Variable]:
    """What the workers of an engine that this process starts would get."""
    with runtime.environment_defaults(profile.variables) as kept:
        return [
            Variable(name, value, profile.sources[name])
            if name not in kept
            else Variable(name, kept[name], "user", None if kept[name] == value else value)
            for name, value in profile.variables.items()
        ]
