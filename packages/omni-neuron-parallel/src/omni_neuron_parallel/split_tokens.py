# SPDX-License-Identifier: Apache-2.0
"""What a transformer whose tokens are split over ranks knows of its place."""

from __future__ import annotations

import torch
from torch import nn

from omni_neuron_parallel.groups import AxisGroup, get_group
from omni_neuron_parallel.layers import group_place
from omni_neuron_parallel.sequence import SequenceParallel, SequenceShard


class SplitTokens(nn.Module):
    """The base of a transformer whose tokens are split over CP and, with sequence parallelism, further over TP.

    Args:
        group: the TP group; this process's by default.
        context_group: the CP group; this process's by default.
        sequence_parallel: split tokens over TP between row-parallel layers (`SequenceParallel`).

    Attributes:
        group, context_group: as given.
        sequence_group: the ranks that share tokens between row-parallel layers: `group`, or this rank alone.
    """

    def __init__(
        self,
        group: AxisGroup | None = None,
        context_group: AxisGroup | None = None,
        *,
        sequence_parallel: bool = False,
    ):
        super().__init__()
        self.group = group or get_group("tp")
        self.context_group = context_group or get_group("cp")
        self.sequence_group = self.group if sequence_parallel else AxisGroup("tp")
        # This rank's place as data, so that the compiled graph is the same on every rank.
        self.register_buffer("context_place", group_place(self.context_group), persistent=False)
        self.register_buffer("sequence_place", group_place(self.sequence_group), persistent=False)
        self.context_place: torch.Tensor
        self.sequence_place: torch.Tensor

    def shards_of(self, length: int) -> tuple[SequenceShard, SequenceParallel]:
        """This rank's part of `length` tokens over CP, and of that part over TP."""
        context = SequenceShard(length, self.context_group.size, self.context_group.rank)
        return context, SequenceParallel(context.shard_length, self.sequence_group)

    def places(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What `SequenceShard.split` and `SequenceParallel.split` take as `place`; eager code gets views instead."""
        return (self.context_place, self.sequence_place) if torch.compiler.is_compiling() else (None, None)
