# SPDX-License-Identifier: Apache-2.0
"""The one error that a broken rule of the language or the hardware raises."""

from __future__ import annotations

from typing import NoReturn


class NkiValidationError(Exception):
    """A kernel broke a documented rule; the message names instruction, argument, value and limit."""


def fail(instruction: str, argument: str, value: object, limit: str) -> NoReturn:
    """Raise the error of `instruction` for `argument`, which is `value` where `limit` holds."""
    raise NkiValidationError(f"{instruction}: {argument} is {value}; {limit}")
