# SPDX-License-Identifier: Apache-2.0
"""How kernels are simulated: target, NKI version, whether data is computed. `settings()` changes it for a block."""

from __future__ import annotations

import contextvars
import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from omni_neuron_nkisim.errors import NkiValidationError
from omni_neuron_nkisim.target import Target, resolve_target

TARGET_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"
DEFAULT_NKI_VERSION = "0.6.0"


@dataclass(frozen=True)
class Settings:
    """What a launch is simulated with.

    Attributes:
        target: `trn2` or `trn3`; None asks NEURON_PLATFORM_TARGET_OVERRIDE, and without it takes trn2.
        nki_version: the NKI release whose rules apply where they changed, `0.3.0` to `0.6.0`. `quantize_mx` doubles its
            scale from 0.5.0 on.
        execute: False runs every check and counter on shapes alone: nothing is stored or computed, arguments may be
            `TensorSpec`, results are.
        timeout_s: how long a core waits for others in a barrier or collective before it raises.
        ring: the order of the positions of a replica group along the ring of `collective_permute_implicit`; None is the
            group's own order. The runtime chooses it on a device and promises nothing: test with a permuted one.
        check_live_capacity: raise where tiles that Python still holds exceed SBUF or PSUM. Python holds a tile for
            longer than the compiler does, so this may refuse a kernel that fits; the report shows the peak anyway.
        symmetric_ranks: with `execute=False`, let the one rank that is launched (rank 0) stand for so many equal ones,
            so that its collectives do not wait for others. None launches every rank.
        free_engines: engines of the report (`collective`, `dma`, …) that take no time in the in-order estimate. What
            the estimate loses by it is their exposed part.
    """

    target: str | None = None
    nki_version: str = DEFAULT_NKI_VERSION
    execute: bool = True
    timeout_s: float = 120.0
    ring: tuple[int, ...] | None = None
    check_live_capacity: bool = False
    symmetric_ranks: int | None = None
    free_engines: tuple[str, ...] = ()

    def resolved_target(self) -> Target:
        """The chip of this launch."""
        return resolve_target(self.target or os.environ.get(TARGET_VARIABLE) or "trn2")

    def version(self) -> tuple[int, int]:
        """Major and minor number of the NKI version.

        Raises:
            NkiValidationError: not a version from 0.3 to 0.6.
        """
        parts = self.nki_version.split(".")
        if len(parts) < 2 or parts[0] != "0" or parts[1] not in {"3", "4", "5", "6"}:
            raise NkiValidationError(f"nki_version is {self.nki_version!r}; 0.3.0 to 0.6.0 are simulated")
        return int(parts[0]), int(parts[1])


_current: contextvars.ContextVar[Settings] = contextvars.ContextVar("omni_neuron_nkisim_settings")


def current_settings() -> Settings:
    """The settings of the innermost `settings()` block, or the defaults."""
    return _current.get(Settings())


@contextmanager
def settings(**changes: Any) -> Iterator[Settings]:
    """Launch the kernels of this block with some fields of `Settings` changed."""
    changed = dataclasses.replace(current_settings(), **changes)
    token = _current.set(changed)
    try:
        yield changed
    finally:
        _current.reset(token)
