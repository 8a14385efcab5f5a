# SPDX-License-Identifier: Apache-2.0
"""Environment variables that a model needs set: a base for all models and each package's own, merged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from omni_neuron_runtime import env

# What decides before a model is chosen: where and as what an engine runs. A model cannot say it.
USERS_VARIABLES = (
    "VLLM_NEURON_CPU_MODE",
    "VLLM_PLUGINS",
    "NEURON_VISIBLE_DEVICES",
    "NEURON_RT_VISIBLE_CORES",
    "NEURON_PLATFORM_TARGET_OVERRIDE",
    "VLLM_NEURON_BACKEND",
    "VLLM_NEURON_LIBTORCH_NEURONX_LITE",
)


class ProfileError(ValueError):
    """Profiles that cannot be merged, or a variable that a profile cannot set; the message names profile and value."""


@dataclass(frozen=True)
class EnvironmentProfile:
    """Variables with the values that whoever is named `name` needs.

    Attributes:
        name: for messages: "base", or the package's distribution.
        variables: values by variable.
    """

    name: str
    variables: Mapping[str, str]


@dataclass(frozen=True)
class Conflict:
    """A variable for which a package wants another value than the base: the package's own is taken.

    Attributes:
        variable: its name.
        profile, value: what is taken, and whose it is.
        base, base_value: what gives way, and whose it is.
    """

    variable: str
    profile: str
    value: str
    base: str
    base_value: str

    def __str__(self) -> str:
        return f"{self.variable}={self.value} ({self.profile}) in place of {self.base_value} ({self.base})"


@dataclass(frozen=True)
class MergedProfile:
    """What `merge_profiles` makes.

    Attributes:
        variables: values by variable, sorted.
        sources: the name of the profile that each value is from.
        conflicts: where a package's own value took the place of the base's.
    """

    variables: Mapping[str, str]
    sources: Mapping[str, str]
    conflicts: tuple[Conflict, ...] = ()


# Their values and where those are from are in omni-neuron's table.
_BASE_VARIABLES = (
    "NEURON_LOGICAL_NC_CONFIG",
    "NEURON_SCRATCHPAD_PAGE_SIZE",
    "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION",
    "TORCH_NEURONX_VOCAB_SHARDING_SPMD_DISABLE",
    "VLLM_NEURON_DISABLE_GRAPH_CAPTURE_BACKEND",
)

BASE_PROFILE = EnvironmentProfile("base", {name: str(env.VARIABLES[name].default) for name in _BASE_VARIABLES})
"""What every model's engine gets. The page size has to be the one that components are compiled with."""


def merge_profiles(base: EnvironmentProfile, *own: EnvironmentProfile) -> MergedProfile:
    """One environment of all of them: a package's own value takes the place of the base's, and that is named.

    Raises:
        ProfileError: two of `own` want different values for one variable; a value that omni-neuron's table of variables
            does not allow; a variable that is the user's alone.
    """
    variables: dict[str, str] = {}
    sources: dict[str, str] = {}
    conflicts: list[Conflict] = []
    for profile in (base, *own):
        for variable, value in profile.variables.items():
            _check(profile.name, variable, value)
            before, whose = variables.get(variable), sources.get(variable)
            if before is not None and before != value:
                assert whose is not None
                if whose != base.name:
                    raise ProfileError(
                        f"{variable} is {before!r} in the profile {whose} and {value!r} in the profile {profile.name}; "
                        "one of them has to give way"
                    )
                conflicts.append(Conflict(variable, profile.name, value, whose, before))
            variables[variable], sources[variable] = value, profile.name
    return MergedProfile(dict(sorted(variables.items())), sources, tuple(conflicts))


def _check(profile: str, variable: str, value: str) -> None:
    if variable in USERS_VARIABLES:
        raise ProfileError(f"profile {profile} sets {variable}, which is for the user to set")
    if not isinstance(value, str):
        raise ProfileError(f"profile {profile}: {variable} is {value!r}; write it as text")
    if variable in env.VARIABLES:
        try:
            env.VARIABLES[variable].parse(value)
        except env.EnvironmentVariableError as error:
            raise ProfileError(f"profile {profile}: {error}") from None
