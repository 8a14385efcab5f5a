# SPDX-License-Identifier: Apache-2.0
"""A checkpoint folder in diffusers' layout: what is in it, whether it can run, and its components. No vLLM needed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from omni_neuron_parallel import AxisGroup, get_group
from omni_neuron_runtime import CheckpointError, SafetensorsCheckpoint
from vllm_omni_neuron.sdk.config import ConfigT, ModelConfigError, read_json
from vllm_omni_neuron.sdk.mapping import Mapping, is_unused, listing, mapping_coverage

ModuleT = TypeVar("ModuleT", bound=nn.Module)


@dataclass(frozen=True)
class DiffusersCheckpoint:
    """A checkpoint folder. A model's own class adds what it must know of it.

    Attributes:
        path: the folder with model_index.json.
    """

    path: Path

    @cached_property
    def index(self) -> dict[str, object]:
        """model_index.json.

        Raises:
            ModelConfigError: the folder or the file is missing.
        """
        if not self.path.is_dir():
            raise ModelConfigError(f"model = {str(self.path)!r} is not a folder on this machine")
        return read_json(self.path / "model_index.json")

    @property
    def architecture(self) -> str:
        """`_class_name` of the index, which is vLLM-Omni's name of the architecture."""
        return str(self.index.get("_class_name"))

    def lists(self, component: str) -> bool:
        """Whether the index lists `component` with a class."""
        entry = self.index.get(component)
        return isinstance(entry, list) and len(entry) == 2 and entry[1] is not None

    def raw_config(self, component: str) -> dict[str, Any]:
        """A component's config.json.

        Raises:
            ModelConfigError: the file is missing, or not JSON.
        """
        return read_json(self.path / component / "config.json")

    def config(self, component: str, config_class: type[ConfigT]) -> ConfigT:
        """A component's config.json as a `ModelConfig`.

        Raises:
            ModelConfigError: the file is missing, or holds what `config_class` refuses.
        """
        return config_class.from_file(self.path / component / "config.json")

    def tokenizer(self, name: str = "tokenizer") -> Any:
        """A tokenizer of transformers, of the class that its files name."""
        from transformers import AutoTokenizer

        self.check_components(name)
        return AutoTokenizer.from_pretrained(self.path / name, local_files_only=True)

    def scheduler(self, name: str = "scheduler") -> Any:
        """A scheduler of diffusers, of the class and with the settings that its file names; a new one at each call.

        Raises:
            ModelConfigError: the file is missing, or names no class of diffusers.
        """
        import diffusers

        file = self.path / name / "scheduler_config.json"
        settings = read_json(file)
        scheduler_class = getattr(diffusers, str(settings.get("_class_name")), None)
        if scheduler_class is None:
            raise ModelConfigError(f"{file}: _class_name = {settings.get('_class_name')!r} is no class of diffusers")
        return scheduler_class.from_config(settings)

    def check_components(self, *names: str) -> None:
        """Refuse a checkpoint without a folder for each of `names`.

        Raises:
            ModelConfigError: naming those that are missing, or the index, without which a folder is no checkpoint.
        """
        missing = [component for component in names if not (self.path / component).is_dir()]
        if missing:
            raise ModelConfigError(
                f"{self.path}: no folder {', '.join(missing)}; a checkpoint of this model has {', '.join(names)} (the "
                f"index names {self.architecture})"
            )

    def check_weights(
        self,
        component: str,
        make: Callable[[AxisGroup], nn.Module],
        mapping: Mapping,
        unused: tuple[str, ...] = (),
    ) -> None:
        """`check_tensors` of a component's folder."""
        check_tensors(SafetensorsCheckpoint(self.path / component), make, mapping, unused)

    def load(
        self,
        component: str,
        make: Callable[[AxisGroup], ModuleT],
        mapping: Mapping,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        group: AxisGroup | None = None,
        unused: tuple[str, ...] = (),
    ) -> ModuleT:
        """A component with its weights, this rank's shards only, in eval mode and without gradients.

        Args:
            component: the folder.
            make: makes the module for the ranks that share it. It is called on the meta device with `dtype` as torch's
                default; a parameter that is made with another dtype keeps it. Buffers are made in `forward` or not at
                all, since no checkpoint holds them.
            mapping: of all parameters. Tied ones are one object of the module and have one entry, by the first of their
                names.
            dtype: of the parameters.
            device: where they go.
            group: the ranks; None for the tensor-parallel group, `AxisGroup("tp")` for a component that is not split.
            unused: as for `mapping_coverage`.

        Raises:
            CheckpointError: damaged files, a key that is missing or that nothing uses, a wrong shape.
        """
        group = group or get_group("tp")
        module = make_on_meta(make, dtype, group)
        return load_tensors(module, SafetensorsCheckpoint(self.path / component), mapping, device, group, unused)


def check_tensors(
    checkpoint: SafetensorsCheckpoint,
    make: Callable[[AxisGroup], nn.Module],
    mapping: Mapping,
    unused: tuple[str, ...] = (),
) -> None:
    """Refuse files that do not give every parameter what it needs, or hold what nothing uses. Reads headers only.

    Args:
        checkpoint: a component's files.
        make: as for `DiffusersCheckpoint.load`.
        mapping: of all parameters.
        unused: as for `mapping_coverage`.

    Raises:
        CheckpointError: naming files, keys and shapes.
    """
    checkpoint.validate()
    # Unsharded, so that the shapes are the checkpoint's own; nothing is allocated on the meta device.
    module = make_on_meta(make, torch.get_default_dtype(), AxisGroup("tp"))
    shapes = {key: checkpoint.shape(key) for key in checkpoint.keys()}  # noqa: SIM118
    problems = mapping_coverage(module, mapping, shapes, unused).problems
    if problems:
        raise CheckpointError(f"{checkpoint.path}: {listing(problems)}")


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """`dtype`, a floating-point one, as torch's default for what is made meanwhile."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def make_on_meta(make: Callable[[AxisGroup], ModuleT], dtype: torch.dtype, group: AxisGroup) -> ModuleT:
    """The module that `make` makes for `group`, without memory, its parameters `dtype` unless they ask for another."""
    with default_dtype(dtype), torch.device("meta"):
        return make(group)


def load_tensors(
    module: ModuleT,
    checkpoint: SafetensorsCheckpoint,
    mapping: Mapping,
    device: torch.device | str,
    group: AxisGroup,
    unused: tuple[str, ...] = (),
) -> ModuleT:
    """Fill a module that is on the meta device; see `DiffusersCheckpoint.load`.

    Raises:
        CheckpointError: damaged files, a key that is missing or that nothing uses, a wrong shape.
        ValueError: the module has a buffer, which nothing fills.
    """
    empty = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if empty:
        raise ValueError(
            f"{type(module).__name__} has the buffer(s) {listing(empty)}, which no checkpoint fills; make them in "
            "forward, or as a plain attribute outside of torch.device('meta')"
        )
    result = checkpoint.load_sharded_pipelined(group.rank, group.size, module, mapping, torch.device(device))
    unexpected = [key for key in result.unexpected_keys if not is_unused(key, unused)]
    if unexpected:
        raise CheckpointError(
            f"{checkpoint.path}: {len(unexpected)} tensor(s) that nothing uses: {listing(unexpected)}"
        )
    loaded = {name: nn.Parameter(value, requires_grad=False) for name, value in result.state_dict.items()}
    # A state dict has every name of a tied parameter, and stays tied only if all of them bring the same object.
    first = {parameter: name for name, parameter in module.named_parameters()}
    every = {name: loaded[first[one]] for name, one in module.named_parameters(remove_duplicate=False)}
    module.load_state_dict(every, strict=True, assign=True)
    return module.eval().requires_grad_(False).to(device)
