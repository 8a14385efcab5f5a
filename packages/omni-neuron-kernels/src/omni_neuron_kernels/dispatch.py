# SPDX-License-Identifier: Apache-2.0
"""Which provider runs an op: of those that do not refuse the arguments, the one of the highest priority.

A provider is an entry point of the group `omni_neuron.kernels`: a mapping from op names to `Implementation`. Ours are
`nki`, `nki-simulator` and `torch`; the last refuses nothing.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from omni_neuron_runtime import discover_providers

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "omni_neuron.kernels"
_OWN_DISTRIBUTION = "omni-neuron-kernels"


@dataclass(frozen=True)
class Implementation:
    """One provider's way to run one op. Both functions take what the public function of that op takes.

    Attributes:
        run: returns what the public function returns.
        refusal: why these arguments are not for it, in a few words; None if they are.
        priority: the highest one that does not refuse runs; ours are 100 (device), 50 (simulator) and 0 (torch).
    """

    run: Callable[..., Any]
    refusal: Callable[..., str | None]
    priority: int


@dataclass(frozen=True)
class Choice:
    """Who runs an op on some arguments.

    Attributes:
        op: such as "rms_norm".
        provider: the name of its entry point, such as "torch".
        distribution: who declares it, with version.
        refusals: for each provider of higher priority, why not that one.
    """

    op: str
    provider: str
    distribution: str
    refusals: Mapping[str, str]

    def __str__(self) -> str:
        reasons = "; ".join(f"not {name}: {reason}" for name, reason in self.refusals.items())
        return f"{self.op} runs on {self.provider} ({self.distribution})" + (f"; {reasons}" if reasons else "")


@dataclass(frozen=True)
class _Candidate:
    provider: str
    distribution: str
    implementation: Implementation


@functools.cache
def _candidates(op: str) -> tuple[_Candidate, ...]:
    """The implementations of an op, the highest priority first, then by provider name."""
    found = [
        _Candidate(name, distribution, implementations[op])
        for name, (distribution, implementations) in _providers().items()
        if op in implementations
    ]
    if not found:
        known = sorted({name for _, implementations in _providers().values() for name in implementations})
        raise ValueError(f"no provider has an op {op!r}; there are {', '.join(known) or 'none'}")
    return tuple(sorted(found, key=lambda candidate: (-candidate.implementation.priority, candidate.provider)))


@functools.cache
def _providers() -> dict[str, tuple[str, Mapping[str, Implementation]]]:
    # VLLM_PLUGINS filters other distributions' kernels; without ours no op could run.
    providers = discover_providers(ENTRY_POINT_GROUP, unfiltered=(_OWN_DISTRIBUTION,))
    loaded = providers.load_all()
    result: dict[str, tuple[str, Mapping[str, Implementation]]] = {}
    for name, implementations in loaded.items():
        provider = providers.get(name)
        if not isinstance(implementations, Mapping):
            logger.warning("%s is left out: it is a %s, not a mapping of ops", provider, type(implementations).__name__)
            continue
        result[name] = (f"{provider.distribution} {provider.version}", implementations)
    return result


def _choose(op: str, tensors: tuple[Any, ...], options: dict[str, Any]) -> tuple[_Candidate, dict[str, str]]:
    refusals: dict[str, str] = {}
    for candidate in _candidates(op):
        reason = candidate.implementation.refusal(*tensors, **options)
        if reason is None:
            return candidate, refusals
        refusals[candidate.provider] = reason
    raise ValueError(f"every provider refuses {op}: {refusals}")


def explain(op: str, *tensors: Any, **options: Any) -> Choice:
    """Who would run `op` on these arguments, and why not the others. Runs nothing.

    Args:
        op: the name of a public function, such as "rms_norm".
        tensors: its positional arguments.
        options: its keyword arguments.

    Raises:
        ValueError: there is no such op.
    """
    candidate, refusals = _choose(op, tensors, options)
    return Choice(op, candidate.provider, candidate.distribution, refusals)


def run(op: str, *tensors: Any, **options: Any) -> Any:
    """Run `op` on the provider that `explain` names; the arguments are checked by the public function."""
    candidate, _ = _choose(op, tensors, options)
    return candidate.implementation.run(*tensors, **options)
