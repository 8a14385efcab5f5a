# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint keys each parameter is made of, and whether that covers both sides. No vLLM needed."""

from __future__ import annotations

import collections.abc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from omni_neuron_runtime import get_weight_loader

Mapping = dict[str, str | list[str]]
"""Parameter of ours → the checkpoint's key, or the keys that its weight loader takes, in that order."""


def prefixed(mapping: Mapping, ours: str, theirs: str) -> Mapping:
    """`mapping` with a prefix on each side, such as `blocks.3.`."""
    return {
        ours + name: theirs + keys if isinstance(keys, str) else [theirs + key for key in keys]
        for name, keys in mapping.items()
    }


def numbered(mapping: Mapping, ours: str, theirs: str, count: int) -> Mapping:
    """`mapping` for each block of a stack: `blocks.` and `transformer_blocks.` for `blocks.0.`, `blocks.1.`, …"""
    blocks: Mapping = {}
    for index in range(count):
        blocks |= prefixed(mapping, f"{ours}{index}.", f"{theirs}{index}.")
    return blocks


def with_biases(layers: Mapping) -> Mapping:
    """The weight and the bias of each layer, where `layers` has the layers' names on both sides."""
    mapping: Mapping = {}
    for ours, theirs in layers.items():
        for kind in ("weight", "bias"):
            keys = f"{theirs}.{kind}" if isinstance(theirs, str) else [f"{key}.{kind}" for key in theirs]
            mapping[f"{ours}.{kind}"] = keys
    return mapping


def keys_of(sources: str | list[str]) -> list[str]:
    """What a mapping has for one parameter, as a list."""
    return [sources] if isinstance(sources, str) else sources


@dataclass(frozen=True)
class Coverage:
    """What does not fit between a module, a mapping and a checkpoint; all empty where all fits.

    Attributes:
        missing: keys that the mapping names and the checkpoint lacks.
        unmapped: keys of the checkpoint that neither the mapping nor `unused` names.
        unused_parameters: parameters that the mapping does not fill.
        misfits: sentences on parameters whose keys have other shapes, or that ranks read in part or more than once.
        unknown_parameters: names in the mapping that are no parameters.
        repeated: keys that make more than one parameter.
    """

    missing: tuple[str, ...] = ()
    unmapped: tuple[str, ...] = ()
    unused_parameters: tuple[str, ...] = ()
    misfits: tuple[str, ...] = ()
    unknown_parameters: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()

    @property
    def problems(self) -> list[str]:
        """All of it in sentences; empty where all fits."""
        counted = {
            "missing {} tensor(s): {}": self.missing,
            "{} tensor(s) that nothing uses: {}": self.unmapped,
            "{} parameter(s) that the mapping does not fill: {}": self.unused_parameters,
            "{} name(s) in the mapping that are no parameters: {}": self.unknown_parameters,
            "{} tensor(s) that make more than one parameter (tied ones are one object): {}": self.repeated,
        }
        found = [sentence.format(len(names), listing(names)) for sentence, names in counted.items() if names]
        return [*found, *self.misfits]


def is_unused(key: str, unused: tuple[str, ...]) -> bool:
    """Whether `key` is among the keys that nothing needs, or begins with one of them that ends in a dot."""
    return key in unused or key.startswith(tuple(name for name in unused if name.endswith(".")))


def mapping_coverage(
    module: nn.Module,
    mapping: Mapping,
    shapes: collections.abc.Mapping[str, Sequence[int]],
    unused: tuple[str, ...] = (),
    *,
    size: int = 1,
) -> Coverage:
    """Compare a module, a mapping and the shapes of a checkpoint; every parameter's weight loader is run without data.

    Args:
        module: usually on the meta device, of one rank of `size`.
        mapping: of its parameters.
        shapes: of the checkpoint's tensors, by key.
        unused: keys that nothing needs; one that ends in a dot stands for all that begin with it.
        size: ranks that share the module: each must get its shape, and together they must read each tensor exactly
            once, or each rank all of it.
    """
    parameters = dict(module.named_parameters())
    used = Counter(key for sources in mapping.values() for key in keys_of(sources))
    misfits = []
    for name, sources in mapping.items():
        if name in parameters and all(key in shapes for key in keys_of(sources)):
            misfits += _misfits(name, parameters[name], {key: shapes[key] for key in keys_of(sources)}, size)
    return Coverage(
        missing=tuple(key for key in used if key not in shapes),
        unmapped=tuple(key for key in shapes if key not in used and not is_unused(key, unused)),
        unused_parameters=tuple(name for name in parameters if name not in mapping),
        misfits=tuple(misfits),
        unknown_parameters=tuple(name for name in mapping if name not in parameters),
        repeated=tuple(key for key, count in used.items() if count > 1),
    )


def listing(names: Sequence[str], most: int = 8) -> str:
    """The first of `names`, and how many more there are."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _misfits(name: str, parameter: nn.Parameter, sources: dict[str, Sequence[int]], size: int) -> list[str]:
    found = ", ".join(f"{key} {list(shape)}" for key, shape in sources.items())
    what = f"{found} does not fit {name} {list(parameter.shape)} of the configuration"
    slices = [_ShapeSlice(shape) for shape in sources.values()]
    loader = get_weight_loader(parameter)
    for rank in range(size):
        try:
            made = loader.load(slices, rank)
        except (ValueError, IndexError, RuntimeError) as error:
            return [f"{what}: {error}"]
        if made.shape != parameter.shape:
            return [f"{what}: rank {rank} of {size} gets {list(made.shape)}" if size > 1 else what]
    return [
        f"{key} {list(part.shape)}: {size} rank(s) read {part.elements_read} of its {part.shape.numel()} elements for "
        f"{name}; valid is each once, or all of them on each rank"
        for key, part in zip(sources, slices, strict=True)
        if part.elements_read not in (part.shape.numel(), size * part.shape.numel())
    ]


class _ShapeSlice:
    """A `TensorSlice` without data: loaders see its shape and cut meta tensors out of it."""

    def __init__(self, shape: Sequence[int]) -> None:
        self._tensor = torch.empty(tuple(shape), device="meta")
        self.elements_read = 0

    @property
    def shape(self) -> torch.Size:
        return self._tensor.shape

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> torch.Tensor:
        # As the reader of files: of a tensor without dims `[:]` can only mean all.
        part = self._tensor[index if self.shape else ...]
        self.elements_read += part.numel()
        return part
