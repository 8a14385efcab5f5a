# SPDX-License-Identifier: Apache-2.0
"""What the tests run on every rank. Importable by spawned processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from omni_neuron_parallel import (
    ColumnParallelLinear,
    DistributedRMSNorm,
    QKVParallelLinear,
    RowParallelLinear,
    Topology,
    VocabParallelEmbedding,
    check_rank_agreement,
    destroy_parallel,
    get_group,
    initialize_parallel,
)
from omni_neuron_runtime import get_weight_loader


class Slice:
    """A tensor behind the interface of a safetensors slice."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index]


def load(module: nn.Module, rank: int, **whole: torch.Tensor | list[torch.Tensor]) -> None:
    """Fill a layer's parameters from whole tensors, through the loaders that read a checkpoint."""
    for name, parameter in module.named_parameters():
        source = whole[name]
        slices = [Slice(tensor) for tensor in (source if isinstance(source, list) else [source])]
        parameter.data.copy_(get_weight_loader(parameter).load(slices, rank))


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()


def with_topology(topology: Topology, function: Callable[..., Any], *arguments: Any) -> Any:
    initialize_parallel(topology)
    try:
        with torch.no_grad():
            return function(*arguments)
    finally:
        destroy_parallel()


def column_then_row(inner: int) -> torch.Tensor:
    group = get_group("tp")
    column, row = ColumnParallelLinear(6, inner), RowParallelLinear(inner, 5)
    load(column, group.rank, weight=random(inner, 6, seed=1), bias=random(inner, seed=2))
    load(row, group.rank, weight=random(5, inner, seed=3), bias=random(5, seed=4))
    return row(torch.tanh(column(random(2, 3, 6, seed=0))))


def attention_heads() -> torch.Tensor:
    """Normalised queries of all ranks, joined: heads differ in magnitude by a factor of 100."""
    group = get_group("tp")
    projection, norm = QKVParallelLinear(6, 4, 2), DistributedRMSNorm(8, 1e-6)
    weights = [random(8, 6, seed=seed) for seed in (1, 2, 3)]
    weights[0][:2] *= 100
    load(projection, group.rank, weight=weights, bias=[random(8, seed=seed) for seed in (4, 5, 6)])
    load(norm, group.rank, weight=random(8, seed=7))
    query, key, value = projection(random(2, 3, 6, seed=0))
    return torch.cat([group.all_gather(tensor, dim=-1) for tensor in (norm(query), key, value)], dim=-1)


def embedding(vocabulary: int) -> torch.Tensor:
    layer = VocabParallelEmbedding(vocabulary, 3)
    load(layer, get_group("tp").rank, weight=random(vocabulary, 3, seed=1))
    return layer(torch.arange(vocabulary).view(1, -1))


def gathered_ranks(axis: str) -> list[int]:
    group = get_group(axis)  # type: ignore[arg-type]
    return group.all_gather(torch.tensor([dist.get_rank()]), dim=0).tolist()


def reduced_ranks(axis: str) -> int:
    return int(get_group(axis).all_reduce(torch.tensor([float(dist.get_rank())])))  # type: ignore[arg-type]


def agree(same: bool) -> str:
    tensor = torch.ones(3)
    if not same and dist.get_rank() == 1:
        tensor[2] = torch.nextafter(tensor[2], torch.tensor(2.0))
    try:
        check_rank_agreement(tensor, "latents after step 3")
    except RuntimeError as error:
        return str(error)
    return "agreed"


def wrong_topology() -> str:
    try:
        initialize_parallel(Topology(tp=3))
    except ValueError as error:
        return str(error)
    return "accepted"


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("this rank is broken")


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def stall_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)
