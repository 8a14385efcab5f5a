# SPDX-License-Identifier: Apache-2.0
"""What the LoRA tests run, alone or on every rank. Importable by spawned processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from wan22_reference import dit_inputs

from omni_neuron_parallel import tensor_digest
from omni_neuron_wan22 import WanCheckpoint, load_transformer
from omni_neuron_wan22.lora import LoraManager


def request_of(path: Path | str, number: int = 1) -> Any:
    """What the manager reads of a vLLM `LoRARequest`."""
    return SimpleNamespace(lora_name=f"adapter {number}", lora_int_id=number, lora_path=str(path))


def manager_of(path: Path | str, **options: Any) -> LoraManager:
    checkpoint = WanCheckpoint(Path(path))
    experts = {name: load_transformer(checkpoint, name, dtype=torch.float32, **options) for name in checkpoint.experts}
    return LoraManager(experts, checkpoint)


def predictions(manager: LoraManager) -> list[torch.Tensor]:
    return [model(**dit_inputs()).sample for model in manager._experts.values()]


def digests(manager: LoraManager) -> list[str]:
    return [tensor_digest(tensor) for model in manager._experts.values() for tensor in model.parameters()]


def with_two_adapters(path: str, first: str, second: str) -> tuple[list[torch.Tensor], bool]:
    """The low-noise expert's predictions with an adapter at two scales, then another; and whether the base is back.

    The layers are sequence-parallel, where there are ranks for it.
    """
    manager = manager_of(path, sequence_parallel=True)
    base = digests(manager)
    results = []
    for number, adapter, scale in ((1, first, 1.0), (1, first, 0.5), (2, second, 1.0)):
        manager.set_active_adapter(request_of(adapter, number), scale)
        results.append(predictions(manager)[1])
    manager.set_active_adapter(None)
    return results, digests(manager) == base
