# SPDX-License-Identifier: Apache-2.0
"""Runtime scalars. A register has a value only on the device, so Python may not look at it while it traces."""

from __future__ import annotations

from typing import NoReturn

from omni_neuron_nkisim.errors import NkiValidationError


class VirtualRegister:
    """A 32-bit runtime scalar.

    Attributes:
        frozen: it belongs to a loop or a query and cannot be written.
    """

    def __init__(self, state: int | None = None, frozen: bool = False) -> None:
        self._value = state
        self.frozen = frozen

    def _refuse(self, use: str) -> NoReturn:
        raise NkiValidationError(
            f"VirtualRegister: used in {use}; it has no value at trace time, pass it as scalar_offset or store it"
        )

    def __bool__(self) -> bool:
        self._refuse("an if or while")

    def __int__(self) -> int:
        self._refuse("int()")

    def __index__(self) -> int:
        self._refuse("range() or an index")

    def __eq__(self, other: object) -> bool:
        self._refuse("a comparison")

    __hash__ = None  # type: ignore[assignment]


def register_value(register: VirtualRegister, where: str) -> int:
    """What the simulated register holds.

    Raises:
        NkiValidationError: nothing was moved or loaded into it.
    """
    if register._value is None:
        raise NkiValidationError(f"{where}: register is uninitialised; move or load a value into it first")
    return register._value


def set_register(register: VirtualRegister, value: int, where: str) -> None:
    """Put `value`, which wraps at 32 bits, into a register.

    Raises:
        NkiValidationError: it is frozen.
    """
    if register.frozen:
        raise NkiValidationError(f"{where}: dst is a frozen register; loop variables and queries cannot be written")
    register._value = value if -(2**31) <= value < 2**32 else value % 2**32
