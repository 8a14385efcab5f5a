# SPDX-License-Identifier: Apache-2.0
"""The reference of the keys, read from the pydantic models: for the documentation and for suggestions in errors."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from .schema import Section, StageEntry


@dataclass(frozen=True)
class Key:
    """One key of the file: its dotted path below a stage entry, and what the documentation says of it."""

    path: str
    values: str
    default: str
    meaning: str
    is_section: bool


def keys(section: type[Section] = StageEntry, prefix: str = "") -> Iterator[Key]:
    """Every key at or below `section`, parents before children, in the order of the models."""
    for name, field in section.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        nested = _nested_section(field.annotation)
        yield Key(path, _values(field), _default(field), field.description or "", nested is not None)
        if nested is not None:
            yield from keys(nested, f"{path}.")


def key_table() -> str:
    """The keys as a Markdown table."""
    rows = ["| Key | Values | Default | Meaning |", "| --- | --- | --- | --- |"]
    rows += [f"| `{key.path}` | {key.values} | {key.default} | {key.meaning} |" for key in keys()]
    return "\n".join(rows) + "\n"


def _nested_section(annotation: Any) -> type[Section] | None:
    options = typing.get_args(annotation) or (annotation,)
    return next((option for option in options if isinstance(option, type) and issubclass(option, Section)), None)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None or field.default is None:
        return "–"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def _values(field: FieldInfo) -> str:
    if _nested_section(field.annotation) is not None:
        return "mapping"
    bounds = " and ".join(text for item in field.metadata if (text := _bound(item)))
    names = _type_names(field.annotation)
    return f"{names} {bounds}".strip()


def _type_names(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        inner, *metadata = typing.get_args(annotation)
        if any(isinstance(item, BeforeValidator) for item in metadata):
            return "core numbers and ranges"
        bounds = " and ".join(text for item in metadata for text in _field_bounds(item))
        return f"{_type_names(inner)} {bounds}".strip()
    if origin is typing.Literal:
        return ", ".join(f"`{_yaml_scalar(value)}`" for value in typing.get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_names(option) for option in typing.get_args(annotation) if option is not type(None))
    if origin is list:
        [item] = typing.get_args(annotation)
        return f"list of {_type_names(item)}"
    if origin is dict:
        return "mapping"
    return {bool: "`true`, `false`", int: "integer", float: "number", str: "text"}[annotation]


def _field_bounds(item: Any) -> list[str]:
    return [text for constraint in getattr(item, "metadata", [item]) if (text := _bound(constraint))]


def _bound(constraint: Any) -> str:
    for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤")):
        value = getattr(constraint, attribute, None)
        if value is not None:
            return f"{sign} {value}".replace("-", "−")
    return ""


def _yaml_scalar(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
