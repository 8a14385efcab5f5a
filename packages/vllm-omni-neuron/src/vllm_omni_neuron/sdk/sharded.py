# SPDX-License-Identifier: Apache-2.0
"""A component that is a module of the package's own, split over the ranks; declared once. No vLLM needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from omni_neuron_parallel import AxisGroup
from vllm_omni_neuron.sdk.checkpoint import DiffusersCheckpoint
from vllm_omni_neuron.sdk.config import ModelConfig
from vllm_omni_neuron.sdk.mapping import Mapping

ConfigT = TypeVar("ConfigT", bound=ModelConfig)
ModuleT = TypeVar("ModuleT", bound=nn.Module)


@dataclass(frozen=True)
class ShardedComponent(Generic[ConfigT, ModuleT]):
    """How a component is made and filled, for the checks in the engine's process and for the ranks.

    Attributes:
        name: the folder in the checkpoint.
        config_class: of its config.json.
        module_class: called as `module_class(config, group=…, **options)` with the ranks that share it.
        mapping: what `DiffusersCheckpoint.load` takes, of a configuration.
        unused: keys of a checkpoint that nothing needs, as for `mapping_coverage`.
    """

    name: str
    config_class: type[ConfigT]
    module_class: Callable[..., ModuleT]
    mapping: Callable[[ConfigT], Mapping]
    unused: tuple[str, ...] = ()

    def config(self, checkpoint: DiffusersCheckpoint) -> ConfigT:
        """The component's config.json.

        Raises:
            ModelConfigError: the file is missing, or holds what the class refuses.
        """
        return checkpoint.config(self.name, self.config_class)

    def make(self, config: ConfigT, **options: Any) -> Callable[[AxisGroup], ModuleT]:
        """What makes the module for the ranks that share it; `options` are the module class's own."""
        return lambda group: self.module_class(config, group=group, **options)

    def check(self, checkpoint: DiffusersCheckpoint, **options: Any) -> None:
        """Refuse weights that do not fit, from the headers of their files.

        Args:
            checkpoint: the folder.
            options: of the module class, such as `context_group=AxisGroup("cp")`: there are no process groups yet.

        Raises:
            ModelConfigError: as `config`.
            CheckpointError: naming files, keys and shapes.
        """
        config = self.config(checkpoint)
        checkpoint.check_weights(self.name, self.make(config, **options), self.mapping(config), self.unused)

    def load(
        self,
        checkpoint: DiffusersCheckpoint,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        group: AxisGroup | None = None,
        **options: Any,
    ) -> ModuleT:
        """The component with this rank's shards; see `DiffusersCheckpoint.load`. `options` are the module class's own.

        Raises:
            ModelConfigError: as `config`.
            CheckpointError: damaged files, a key that is missing or that nothing uses, a wrong shape.
        """
        config = self.config(checkpoint)
        return checkpoint.load(
            self.name,
            self.make(config, **options),
            self.mapping(config),
            dtype=dtype,
            device=device,
            group=group,
            unused=self.unused,
        )
