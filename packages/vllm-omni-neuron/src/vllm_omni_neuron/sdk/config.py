# SPDX-License-Identifier: Apache-2.0
"""A component's config.json as a dataclass of the model's own, read and checked in one place. No vLLM needed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from omni_neuron_parallel import valid_tensor_parallel_sizes

ConfigT = TypeVar("ConfigT", bound="ModelConfig")


class ModelConfigError(ValueError):
    """A checkpoint or engine configuration that a package cannot run; the message says what it can."""


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a component. A subclass names, as fields, the keys of its config.json that change what it computes.

    Values that a package cannot run are refused in the subclass's `__post_init__`, with `ModelConfigError`.
    """

    @classmethod
    def from_dict(cls: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
        """Take this class's fields out of a config.json; keys of no consequence here are left aside. Lists are tuples.

        Raises:
            ModelConfigError: a field without default is missing.
        """
        fields = dataclasses.fields(cls)
        taken = {field.name: _frozen(values[field.name]) for field in fields if field.name in values}
        missing = [
            field.name
            for field in fields
            if field.name not in taken
            and field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
        ]
        if missing:
            raise ModelConfigError(f"the configuration lacks {', '.join(missing)}, which {cls.__name__} needs")
        return cls(**taken)

    @classmethod
    def from_file(cls: type[ConfigT], path: str | Path) -> ConfigT:
        """Read a config.json.

        Raises:
            ModelConfigError: no such file, not JSON, or as for `from_dict`.
        """
        return cls.from_dict(read_json(Path(path)))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`, with errors that name the file.

    Raises:
        ModelConfigError: no such file, or not JSON.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelConfigError(f"{path} is missing") from None
    except json.JSONDecodeError as error:
        raise ModelConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelConfigError(f"{path} holds a {type(values).__name__}, not an object")
    return values


def check_tensor_parallel(size: int, num_heads: int, model: str = "the DiT") -> None:
    """Refuse a TP size that does not divide the attention heads.

    Args:
        size: `tensor_parallel_size`.
        num_heads: of the model; of keys and values where they have fewer.
        model: whose heads, for the message.

    Raises:
        ModelConfigError: naming the sizes that do.
    """
    if size < 1 or num_heads % size:
        valid = ", ".join(map(str, valid_tensor_parallel_sizes(num_heads)))
        raise ModelConfigError(
            f"tensor_parallel_size = {size}: {model} has {num_heads} attention heads, which {size} does not divide; "
            f"valid sizes are {valid}"
        )


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
