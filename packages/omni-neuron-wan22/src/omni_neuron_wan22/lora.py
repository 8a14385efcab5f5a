# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters, merged into the experts' weights while a request that names one runs.

The methods are those by which vLLM-Omni's worker uses its own `DiffusionLoRAManager`, whose layers wrap vLLM's linear
layers. Merged, an adapter costs nothing in a step and changes no graph, whatever its rank.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch

from omni_neuron_parallel import get_group
from omni_neuron_runtime import SafetensorsWeightLoader, get_weight_loader
from omni_neuron_wan22.checkpoint import Expert, WanCheckpoint
from omni_neuron_wan22.lora_adapter import LoadedChange, LoraError, read_adapter
from omni_neuron_wan22.mapping import transformer_mapping
from omni_neuron_wan22.transformer import WanTransformer3DModel

logger = logging.getLogger(__name__)

Adapter = dict[Expert, dict[str, LoadedChange]]


class LoraManager:
    """Keeps adapters in the host's memory, one of them merged.

    While one is merged, this rank's share of the weights that it changes is kept on the host as well; they come back
    bit for bit.

    Args:
        experts: the models of this rank, by name.
        checkpoint: where their weights came from.
        max_adapters: adapters that are kept; the least recently used one goes first, pinned ones never.
    """

    def __init__(
        self, experts: Mapping[Expert, WanTransformer3DModel], checkpoint: WanCheckpoint, max_adapters: int = 1
    ):
        self._experts = dict(experts)
        self._checkpoint = checkpoint
        self._max_adapters = max(1, max_adapters)
        self._adapters: dict[int, Adapter] = {}  # least recently used first
        self._pinned: set[int] = set()
        self._names: dict[int, str] = {}
        self._merged: tuple[int, float] | None = None
        self._base: list[tuple[torch.Tensor, torch.Tensor]] = []

    def set_active_adapter(self, lora_request: Any | None, lora_scale: float = 1.0) -> None:
        """Merge the adapter of a vLLM `LoRARequest` times `lora_scale`; None or a scale of 0 restores the base.

        Raises:
            LoraError: an adapter that cannot be used; nothing has changed then.
        """
        if lora_request is None or lora_scale == 0.0:
            self._restore()
            return
        self.add_adapter(lora_request)
        adapter_id = lora_request.lora_int_id
        self._adapters[adapter_id] = self._adapters.pop(adapter_id)
        if self._merged != (adapter_id, lora_scale):
            self._restore()
            self._merge(adapter_id, lora_scale)

    def add_adapter(self, lora_request: Any) -> bool:
        """Read an adapter, without merging it; False where its id is known already.

        Raises:
            LoraError: as `set_active_adapter`, or no room beside the pinned ones.
        """
        adapter_id = lora_request.lora_int_id
        if adapter_id in self._adapters:
            return False
        unpinned = [known for known in self._adapters if known not in self._pinned]
        if len(self._adapters) >= self._max_adapters and not unpinned:
            raise LoraError(
                f"adapter {lora_request.lora_name!r}: all {len(self._adapters)} places are taken by pinned adapters; "
                "remove one, or start the engine with a larger max_cpu_loras"
            )
        changes = read_adapter(lora_request.lora_path, self._checkpoint)
        adapter: Adapter = {
            expert: {key: change.read() for key, change in of_expert.items()}
            for expert, of_expert in changes.items()
            if expert in self._experts
        }
        for known in unpinned[: len(self._adapters) + 1 - self._max_adapters]:
            self.remove_adapter(known)
        self._adapters[adapter_id], self._names[adapter_id] = adapter, lora_request.lora_name
        logger.info(
            "LoRA adapter %r: %s",
            lora_request.lora_name,
            ", ".join(f"{len(of_expert)} tensors of {expert}" for expert, of_expert in adapter.items())
            or "no layer here",
        )
        return True

    def merged(self) -> dict[str, Any] | None:
        """Name and scale of the adapter that the weights hold now, for a generation's report; None without one."""
        return None if self._merged is None else {"name": self._names[self._merged[0]], "scale": self._merged[1]}

    def remove_adapter(self, adapter_id: int) -> bool:
        """Forget an adapter, and restore the base if it is merged; False where there is none of this id."""
        if adapter_id not in self._adapters:
            return False
        if self._merged is not None and self._merged[0] == adapter_id:
            self._restore()
        del self._adapters[adapter_id]
        self._pinned.discard(adapter_id)
        return True

    def list_adapters(self) -> list[int]:
        """The ids of the adapters in memory."""
        return list(self._adapters)

    def pin_adapter(self, adapter_id: int) -> bool:
        """Keep an adapter until it is removed; False where there is none of this id."""
        if adapter_id not in self._adapters:
            return False
        self._pinned.add(adapter_id)
        return True

    # The decorators: weights are ordinary tensors, and must stay so.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _merge(self, adapter_id: int, scale: float) -> None:
        try:
            for expert, changes in self._adapters[adapter_id].items():
                for parameter, shard in _shards(self._experts[expert], changes):
                    self._base.append((parameter, parameter.to("cpu", copy=True)))
                    merged = parameter.float() + scale * shard.to(parameter.device)
                    parameter.copy_(merged)
        except BaseException:
            self._restore()
            raise
        self._merged = adapter_id, scale

    @torch.inference_mode(False)
    @torch.no_grad()
    def _restore(self) -> None:
        for parameter, base in self._base:
            parameter.copy_(base)
        self._base, self._merged = [], None


def _shards(model: WanTransformer3DModel, changes: Mapping[str, LoadedChange]) -> Any:
    """This rank's share of the changes, float32, with the parameter that each belongs to.

    The loaders that cut the checkpoint's tensors cut these as well.
    """
    group = get_group("tp")
    parameters, loaders = dict(model.named_parameters()), _weight_loaders(model)
    for name, keys in transformer_mapping(model.config).items():
        parts = [keys] if isinstance(keys, str) else keys
        if any(key in changes for key in parts):
            slices = [changes.get(key) or _no_change(key, changes, parts) for key in parts]
            yield parameters[name], loaders[name].load(slices, group.rank)


def _no_change(key: str, changes: Mapping[str, LoadedChange], parts: list[str]) -> LoadedChange:
    """For a part of a fused parameter that the adapter leaves alone; the parts are of one shape."""
    shape = next(changes[part].shape for part in parts if part in changes)
    if len(shape) == 1:
        return LoadedChange(shape, torch.zeros(shape), None)
    return LoadedChange(shape, torch.zeros(shape[0], 1), torch.zeros(1, math.prod(shape[1:])))


def _weight_loaders(model: WanTransformer3DModel) -> dict[str, SafetensorsWeightLoader]:
    """How each parameter is made of the checkpoint's tensors; the loaded parameters themselves do not keep it."""
    with torch.device("meta"):
        empty = WanTransformer3DModel(
            model.config,
            group=get_group("tp"),
            context_group=model.context_group,
            sequence_parallel=model.sequence_group.size > 1,
        )
    return {name: get_weight_loader(parameter) for name, parameter in empty.named_parameters()}
