# SPDX-License-Identifier: Apache-2.0
"""The toy with one fault each, as an author might make them. Importable by spawned processes."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from conformance_toy import Pair, ToyAttention, ToyConfig, ToyPipeline, ToyTransformer, waves
from conformance_toy_reference import ToySuite
from torch import nn

from omni_neuron_parallel import AxisGroup, RowParallelLinear, SequenceShard, context_attention
from omni_neuron_runtime import scaled_bias_loader, set_weight_loader
from omni_neuron_testkit.conformance import Published


class NotSummed(RowParallelLinear):
    def sum_over_ranks(self, partial: torch.Tensor) -> torch.Tensor:
        return partial


def replace_out(
    attention: nn.Module, layer_class: type[RowParallelLinear], config: ToyConfig, group: AxisGroup
) -> None:
    attention.out = layer_class(config.hidden, config.hidden, multiple_of=config.head_dim, group=group)


class MissingAllReduceAttention(ToyAttention):
    def __init__(self, config: ToyConfig, group: AxisGroup):
        super().__init__(config, group)
        replace_out(self, NotSummed, config, group)


class BiasOnEachRankAttention(ToyAttention):
    def __init__(self, config: ToyConfig, group: AxisGroup):
        super().__init__(config, group)
        set_weight_loader(self.out.bias, scaled_bias_loader(1.0))


class MaskIgnoredAttention(ToyAttention):
    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, joint: Any, mask: Any, tokens: int
    ) -> torch.Tensor:
        return context_attention(query, key, value, group=self.context_group, kv_length=tokens, joint_kv=joint)


class CountedTwiceAttention(ToyAttention):
    """The text's keys go into the gather with every rank's own, instead of beside it: once for each CP rank."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, joint: Any, mask: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        group = self.context_group
        shard = SequenceShard(tokens, group.size, group.rank)
        valid = torch.cat([~shard.pad_mask()[None], mask], dim=1)
        key, value = torch.cat([key, joint[0]], dim=1), torch.cat([value, joint[1]], dim=1)
        return context_attention(query, key, value, group=group, key_mask=valid)


class WrongRopeTransformer(ToyTransformer):
    def rope(self, tokens: int, shard: SequenceShard, device: torch.device) -> Pair:
        return waves(torch.arange(shard.shard_length, device=device), self.config.head_dim)


class GraphBreakTransformer(ToyTransformer):
    def forward(self, latents: torch.Tensor, timestep: torch.Tensor, *conditioning: Any, **named: Any) -> torch.Tensor:
        if timestep.item() > 500:
            latents = latents.clone()
        return super().forward(latents, timestep, *conditioning, **named)


class HalfTheWorldTransformer(ToyTransformer):
    """A sum over ranks 0 and 1, which the other ranks of a larger world know nothing of."""

    def __init__(self, config: ToyConfig, group: AxisGroup | None = None):
        super().__init__(config, group)
        world = dist.get_world_size() if dist.is_initialized() else 1
        self.pair = dist.new_group([0, 1]) if world > 1 else None
        self.takes_part = world > 1 and dist.get_rank() < 2

    def forward(self, latents: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        if self.takes_part:
            ops = torch.ops._c10d_functional
            total = ops.wait_tensor(ops.all_reduce(latents, "sum", self.pair.group_name))  # type: ignore[union-attr]
            latents = total / 2
        return super().forward(latents, *arguments, **named)


def transformer_with(attention: type[ToyAttention]) -> type[ToyTransformer]:
    return type(f"With{attention.__name__}", (ToyTransformer,), {"attention_class": attention})


class MissingAllReduce(ToyPipeline):
    transformer_class = transformer_with(MissingAllReduceAttention)


class BiasOnEachRank(ToyPipeline):
    transformer_class = transformer_with(BiasOnEachRankAttention)


class MaskIgnored(ToyPipeline):
    transformer_class = transformer_with(MaskIgnoredAttention)


class CountedTwice(ToyPipeline):
    transformer_class = transformer_with(CountedTwiceAttention)


class WrongRope(ToyPipeline):
    transformer_class = WrongRopeTransformer


class GraphBreak(ToyPipeline):
    transformer_class = GraphBreakTransformer


class HalfTheWorld(ToyPipeline):
    transformer_class = HalfTheWorldTransformer


class SeedPerRank(ToyPipeline):
    def prepare_latents(
        self, request: Any, generator: Any = None, latents: Any = None, number: int = 0
    ) -> torch.Tensor:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return super().prepare_latents(request, generator, latents, number + 1000 * rank)


class UncaughtSize(ToyPipeline):
    """The VAE's stride alone, though the patches of the DiT need twice as much."""

    stride: ClassVar[int] = 8


def suite_of(faulty: type[ToyPipeline]) -> type[ToySuite]:
    return type(f"Suite{faulty.__name__}", (ToySuite,), {"pipeline": faulty})


class UnmappedWeight(ToySuite):
    @staticmethod
    def published() -> dict[str, Published]:
        [(name, one)] = ToySuite.published().items()
        mapping = {key: value for key, value in one.mapping.items() if key != "blocks.1.down.bias"}
        return {name: one._replace(mapping=mapping)}
