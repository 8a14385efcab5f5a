# SPDX-License-Identifier: Apache-2.0
"""The syntax of lists of cores: `0`, `0-3`, `0-3,7`."""

from __future__ import annotations

import re

SYNTAX = 'core numbers and ascending ranges, separated by commas, each core once: "0", "0-3", "0-3,7"'
_PART = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", re.ASCII)


def parse_core_ranges(text: str) -> list[int]:
    """The cores that `text` names, in the order in which it names them.

    Args:
        text: numbers and inclusive ranges separated by commas, as in `"0-3,7"`; spaces around them are allowed.

    Raises:
        ValueError: with the text, the part that is wrong and the valid syntax.
    """
    cores: list[int] = []
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(
                f"{text!r} is not a list of cores: {part!r} is neither a number nor a range. Valid: {SYNTAX}"
            )
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if last < first:
            raise ValueError(f"{text!r} is not a list of cores: the range {part!r} descends. Valid: {SYNTAX}")
        repeated = sorted(set(range(first, last + 1)).intersection(cores))
        if repeated:
            raise ValueError(f"{text!r} is not a list of cores: core {repeated[0]} is named twice. Valid: {SYNTAX}")
        cores.extend(range(first, last + 1))
    return cores
