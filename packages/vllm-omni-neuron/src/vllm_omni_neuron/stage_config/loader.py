# SPDX-License-Identifier: Apache-2.0
"""Reading a stage YAML, and saying what is wrong with it: every problem at once, each with its path in the file."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from .reference import keys
from .schema import StageConfig


class StageConfigError(ValueError):
    """A stage configuration that cannot be used; the message lists every problem with its path.

    Attributes:
        source: The file, or what the caller named the mapping.
        problems: One line each.
    """

    def __init__(self, source: str, problems: list[str]) -> None:
        self.source = source
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"  {problem}" for problem in problems)]))


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML takes the last of two equal keys without a word; a configuration that says two things is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice, on lines {seen[key]} and {line}"
                )
            seen[key] = line
        return super().construct_mapping(node, deep)


def load_stage_config(path: str | Path) -> StageConfig:
    """Read and check the stage YAML at `path`.

    Raises:
        StageConfigError: The file is missing, is no YAML, or says something that cannot be.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise StageConfigError(str(path), [f"cannot be read: {error.strerror or error}"]) from error
    try:
        data = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise StageConfigError(str(path), [f"not valid YAML: {' '.join(str(error).split())}"]) from error
    return parse_stage_config(data, source=str(path))


def parse_stage_config(data: Any, source: str = "stage configuration") -> StageConfig:
    """Check a stage configuration that is already a mapping (`{"stage_args": [...]}`).

    Raises:
        StageConfigError: As `load_stage_config`.
    """
    if not isinstance(data, Mapping):
        found = "an empty file" if data is None else f"a {type(data).__name__}"
        raise StageConfigError(source, [f"expected a mapping with the key stage_args, found {found}"])
    if "stage_args" not in data and "stages" in data:
        raise StageConfigError(
            source,
            ["this is a deploy configuration already (it has `stages`, not `stage_args`): give it to --deploy-config"],
        )
    try:
        return StageConfig.model_validate(data)
    except ValidationError as error:
        raise StageConfigError(source, [_problem(details) for details in error.errors()]) from error


def _problem(details: Mapping[str, Any]) -> str:
    path = _path(details["loc"])
    kind, value = details["type"], details["input"]
    if kind == "extra_forbidden":
        return f"{path}: unknown key; {_suggestion(details['loc'])}"
    if kind == "missing":
        return f"{path}: required, and missing"
    if kind == "value_error":
        return f"{path}: {details['ctx']['error']}"
    message = details["msg"]
    if kind == "literal_error":
        message = f"expected {details['ctx']['expected']}"
    return f"{path}: {message[0].lower()}{message[1:]}, not {_yaml_value(value)}"


def _suggestion(location: tuple[int | str, ...]) -> str:
    """Where the writer may have meant to be: a key of this section that looks alike, or this key elsewhere."""
    names = [part for part in location if isinstance(part, str)][1:]
    if not names:
        return "the one key at the top of the file is stage_args"
    unknown, section = names[-1], ".".join(names[:-1])
    siblings = [key.path.rpartition(".")[2] for key in keys() if key.path.rpartition(".")[0] == section]
    elsewhere = [key.path for key in keys() if key.path.rpartition(".")[2] == unknown]
    if elsewhere:
        return f"{unknown} belongs at {' or '.join(elsewhere)}"
    near = difflib.get_close_matches(unknown, siblings, n=1)
    if near:
        return f"did you mean {near[0]}? Known here: {', '.join(siblings)}"
    by_name = {key.path.rpartition(".")[2]: key.path for key in keys()}
    near = difflib.get_close_matches(unknown, by_name, n=1, cutoff=0.75)
    if near:
        return f"did you mean {by_name[near[0]]}? Known here: {', '.join(siblings)}"
    return f"known here: {', '.join(siblings)}"


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".") or "the file"


def _yaml_value(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=200).strip().removesuffix("...").strip()
