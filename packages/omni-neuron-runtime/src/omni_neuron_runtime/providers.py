# SPDX-License-Identifier: Apache-2.0
"""What other distributions offer through entry points: models, kernels, parallel layers.

Discovery reads metadata only; a provider's module is imported when the provider is loaded. One that is broken never
hides the others: it is reported in a warning that names distribution, version, entry point and cause.

The order is by name. Where several distributions claim one name in one group, all are reported and one is used:

1. a distribution of others goes before ours (`vllm-omni-neuron`, `omni-neuron-*`): whoever installs a replacement
   means it;
2. then the first by normalised distribution name.

The others are "shadowed"; they do not step in when the one that is used fails. `VLLM_PLUGINS` filters by name in every
group, before that rule.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Literal

from omni_neuron_runtime import env

logger = logging.getLogger(__name__)

Status = Literal["found", "loaded", "failed", "filtered", "shadowed"]


class ProviderError(RuntimeError):
    """A provider cannot be used; the message names distribution, version, entry point and cause."""


@dataclass
class Provider:
    """One entry point of one distribution.

    Attributes:
        name: the entry point's name, such as "wan22".
        value: what it points at, such as "omni_neuron_wan22.registry".
        group: such as "vllm_omni_neuron.models".
        distribution: the name of the distribution that declares it.
        version: its version.
        status: "found" (not loaded so far), "loaded", "failed", "filtered" (by VLLM_PLUGINS) or "shadowed".
        reason: why it is failed, filtered or shadowed; else empty.
    """

    name: str
    value: str
    group: str
    distribution: str
    version: str
    status: Status = "found"
    reason: str = ""
    _entry_point: metadata.EntryPoint | None = field(default=None, repr=False, compare=False)
    _object: Any = field(default=None, repr=False, compare=False)
    _error: BaseException | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return f"entry point {self.name!r} = {self.value!r} of {self.distribution} {self.version} in group {self.group}"

    def load(self) -> Any:
        """Import what the entry point points at and return it; the second call returns the same object.

        Raises:
            ProviderError: it is filtered or shadowed, or its import failed (now or before), which is then the cause.
        """
        if self.status == "found":
            self._load()
        if self.status != "loaded":
            raise ProviderError(f"{self} is not usable: {self.status}: {self.reason}") from self._error
        return self._object

    def _load(self) -> None:
        assert self._entry_point is not None
        try:
            self._object = self._entry_point.load()
        # Whatever a foreign module raises while it is imported, the others must still work; SystemExit included.
        except (Exception, SystemExit) as error:
            self.status, self.reason, self._error = "failed", f"{type(error).__name__}: {error}", error
            logger.warning("%s failed to load and is left out: %s", self, self.reason, exc_info=True)
        else:
            self.status = "loaded"


class ProviderSet:
    """The providers of one group, sorted by name; of one name, the one that is used comes first."""

    def __init__(self, group: str, providers: Iterable[Provider]) -> None:
        self.group = group
        self._providers = tuple(providers)

    def __iter__(self) -> Iterator[Provider]:
        return iter(self._providers)

    def __len__(self) -> int:
        return len(self._providers)

    def usable(self) -> list[Provider]:
        """Those that are found or loaded: neither failed so far, nor filtered, nor shadowed."""
        return [provider for provider in self._providers if provider.status in ("found", "loaded")]

    def get(self, name: str) -> Provider:
        """The provider of that name which is used (it may turn out to fail when it is loaded).

        Raises:
            ProviderError: there is none, with the names that there are, or why it may not be used.
        """
        claims = [provider for provider in self._providers if provider.name == name]
        if not claims:
            names = ", ".join(sorted({provider.name for provider in self._providers})) or "none"
            raise ProviderError(f"group {self.group} has no entry point {name!r}; installed: {names}")
        if claims[0].status == "filtered":
            raise ProviderError(f"{claims[0]} is not usable: {claims[0].reason}")
        return claims[0]

    def load_all(self) -> dict[str, Any]:
        """Load every usable provider; those that fail are left out, each with a warning."""
        loaded: dict[str, Any] = {}
        for provider in self.usable():
            try:
                loaded[provider.name] = provider.load()
            except ProviderError:
                continue  # Its warning is out, and status and reason hold the cause.
        return loaded


def discover_providers(group: str, *, unfiltered: Collection[str] = ()) -> ProviderSet:
    """The providers that installed distributions declare in `group`. Imports none of them.

    Names that VLLM_PLUGINS drops and names claimed twice are said in a warning, once per process.

    Args:
        group: the entry-point group.
        unfiltered: distributions that VLLM_PLUGINS does not apply to, because the caller uses them in any case.
    """
    providers = sorted(_declared(group), key=_order)
    allowed: list[str] | None = env.get("VLLM_PLUGINS")
    used: dict[str, Provider] = {}
    for provider in providers:
        if allowed is not None and provider.name not in allowed and provider.distribution not in unfiltered:
            provider.status = "filtered"
            provider.reason = f"VLLM_PLUGINS={','.join(allowed)!r} does not name {provider.name!r}"
            _warn_once(f"{provider} is left out: {provider.reason}")
        elif provider.name in used:
            winner = used[provider.name]
            provider.status = "shadowed"
            provider.reason = f"{winner.distribution} {winner.version} claims the same name and goes first"
            _warn_once(
                f"{provider} is left out: {provider.reason} (distributions of others before omni-neuron's own, then by "
                f"name); uninstall one of the two to choose the other"
            )
        else:
            used[provider.name] = provider
    return ProviderSet(group, providers)


def _declared(group: str) -> Iterator[Provider]:
    for distribution in metadata.distributions():
        # Not metadata.entry_points(): there, one unreadable entry_points.txt raises for everybody.
        try:
            entry_points = [entry for entry in distribution.entry_points if entry.group == group]
            if not entry_points:
                continue  # hundreds of them, whose metadata would take long to parse
            name, version = distribution.metadata["Name"] or "", distribution.version
            hidden = name and _identity(metadata.distribution(name)) != _identity(distribution)
        except Exception as error:
            _warn_once(f"the metadata of a distribution cannot be read ({_place(distribution)}): {error!r}; left out")
            continue
        # The first one on the path is the one that Python imports; a second copy further on is not used.
        if not hidden:
            for entry in entry_points:
                yield Provider(entry.name, entry.value, group, name, version, _entry_point=entry)


def _identity(distribution: metadata.Distribution) -> tuple[str, str]:
    return str(distribution.locate_file("")), distribution.version


def _place(distribution: metadata.Distribution) -> str:
    # A distribution has no public path of its own; that of its metadata directory is what a reader needs to find it.
    return str(getattr(distribution, "_path", distribution))


def distribution_precedence(name: str) -> tuple[bool, str]:
    """Sort key of a distribution among those that claim the same thing: others before ours, then by normalised name."""
    distribution = _normalised(name)
    ours = distribution == "vllm-omni-neuron" or distribution.startswith("omni-neuron-")
    return ours, distribution


def _order(provider: Provider) -> tuple[str, bool, str, str]:
    return provider.name, *distribution_precedence(provider.distribution), provider.value


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)
