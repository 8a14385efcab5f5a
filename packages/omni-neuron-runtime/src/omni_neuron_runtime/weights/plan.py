# SPDX-License-Identifier: Apache-2.0
"""What a load will read, decided from the model, the mapping and the headers before any data is touched."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from omni_neuron_runtime.weights.files import CheckpointError, TensorEntry
from omni_neuron_runtime.weights.loaders import SafetensorsWeightLoader, get_weight_loader

_NAMES_IN_A_MESSAGE = 20


@dataclass(frozen=True)
class ParameterRead:
    """One parameter to make: its name, this rank's shape, the dtype to cast to, and the tensors it is made from."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    loader: SafetensorsWeightLoader
    entries: tuple[TensorEntry, ...]

    def __str__(self) -> str:
        return f"parameter {self.name!r} from " + ", ".join(str(entry) for entry in self.entries)


@dataclass(frozen=True)
class LoadPlan:
    """Reads in the order of the model's parameters, and what does not fit together, by checkpoint key."""

    reads: tuple[ParameterRead, ...]
    missing_keys: list[str]
    unexpected_keys: list[str]

    def in_file_order(self) -> list[ParameterRead]:
        """The reads sorted by file and position: disks and readahead prefer that to the model's order."""
        return sorted(self.reads, key=lambda read: (read.entries[0].file, read.entries[0].start))


def plan_load(
    checkpoint: str,
    entries: Mapping[str, TensorEntry],
    model: nn.Module,
    mappings: Mapping[str, str | Sequence[str]],
    dtype_override: torch.dtype | None,
    strict: bool,
) -> LoadPlan:
    """Match parameters, mapping and checkpoint.

    Raises:
        CheckpointError: the mapping does not cover the model's parameters exactly, or names one key twice; or a key is
            not in the checkpoint and `strict`.
    """
    parameters = dict(model.named_parameters())
    wanted = {name: [keys] if isinstance(keys, str) else list(keys) for name, keys in mappings.items()}
    _check_mapping(parameters, wanted)
    reads, missing = [], {}
    for name, parameter in parameters.items():
        absent = [key for key in wanted[name] if key not in entries]
        if absent:
            missing[name] = absent
            continue
        keep = dtype_override is None or not parameter.dtype.is_floating_point
        dtype = parameter.dtype if keep or dtype_override is None else dtype_override
        read = ParameterRead(
            name, parameter.shape, dtype, get_weight_loader(parameter), tuple(entries[key] for key in wanted[name])
        )
        reads.append(read)
    if missing and strict:
        raise CheckpointError(_missing_message(checkpoint, missing, entries))
    used = {key for keys in wanted.values() for key in keys}
    unexpected = sorted(key for key in entries if key not in used)
    return LoadPlan(tuple(reads), [key for keys in missing.values() for key in keys], unexpected)


def _check_mapping(parameters: Mapping[str, nn.Parameter], wanted: Mapping[str, list[str]]) -> None:
    problems = []
    unmapped = [name for name in parameters if not wanted.get(name)]
    if unmapped:
        problems.append(f"parameters without a checkpoint key: {_some(unmapped)}")
    unknown = [name + _nearest(name, parameters) for name in wanted if name not in parameters]
    if unknown:
        problems.append(f"names that are no parameter of the model: {_some(unknown)}")
    counts = Counter(key for keys in wanted.values() for key in keys)
    for key in [key for key, count in counts.items() if count > 1][:_NAMES_IN_A_MESSAGE]:
        owners = sorted({name for name, keys in wanted.items() if key in keys})
        problems.append(f"checkpoint key {key!r} is mapped {counts[key]} times: by {', '.join(owners)}")
    if problems:
        raise CheckpointError("the mapping from parameters to checkpoint keys is wrong: " + "; ".join(problems))


def _missing_message(checkpoint: str, missing: Mapping[str, list[str]], entries: Mapping[str, TensorEntry]) -> str:
    lines = [
        f"  {name} wants {', '.join(repr(key) + _nearest(key, entries) for key in keys)}"
        for name, keys in list(missing.items())[:_NAMES_IN_A_MESSAGE]
    ]
    if len(missing) > len(lines):
        lines.append(f"  … and {len(missing) - len(lines)} more")
    return f"{checkpoint}: checkpoint key(s) not found for {len(missing)} parameter(s):\n" + "\n".join(lines)


def _nearest(name: str, names: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f" (nearest: {near[0]!r})" if near else ""


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_IN_A_MESSAGE])
    return shown + (f" … and {len(names) - _NAMES_IN_A_MESSAGE} more" if len(names) > _NAMES_IN_A_MESSAGE else "")
