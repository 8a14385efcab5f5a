# SPDX-License-Identifier: Apache-2.0
"""What the ranks send each other in one denoising step: bytes, collectives and their time on the wire."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from omni_neuron_parallel.planning.hardware import KANGARING_ABOVE, MESH_BELOW, Target
from omni_neuron_parallel.planning.layout import Case
from omni_neuron_parallel.topology import MeshAxis

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "rotate"]
FLOAT32 = 4


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in one step, on one rank.

    Attributes:
        axis: whose groups take part.
        name: what is sent.
        collective: which.
        group: ranks in the group.
        calls: collectives a step.
        message: bytes of one call's whole message: what is reduced, or what is gathered; of a rotation, one shard.
    """

    axis: MeshAxis
    name: str
    collective: Collective
    group: int
    calls: int
    message: int

    @property
    def bytes(self) -> int:
        """Bytes that one rank receives a step (it sends as many).

        A reduce-scatter or an all-gather of M bytes moves (n − 1) / n · M, an all-reduce is one after the other, a
        rotation moves its shard.
        """
        if self.collective == "rotate":
            return self.calls * self.message
        factor = 2 if self.collective == "all_reduce" else 1
        return self.calls * factor * self.message * (self.group - 1) // self.group

    def seconds(self, target: Target) -> float:
        """Time of all calls: bytes / link bandwidth + hops · fixed cost."""
        return self.bytes / target.link_bandwidth.value + self.calls * self.hops * target.hop_seconds.value

    @property
    def hops(self) -> int:
        """Hops of one call by the runtime's choice of algorithm; an all-reduce makes them twice."""
        if self.collective == "rotate":
            return 1
        if self.message < MESH_BELOW:
            hops = 1
        elif self.message <= KANGARING_ABOVE:
            hops = math.ceil(math.log2(self.group))
        else:
            hops = math.ceil(self.group / 2)
        return 2 * hops if self.collective == "all_reduce" else hops


def plan_traffic(case: Case) -> tuple[Traffic, ...]:
    """Every collective of one denoising step, guidance included."""
    return (*_tensor_parallel(case), *_context_parallel(case), *_cfg_parallel(case))


def _tensor_parallel(case: Case) -> Iterator[Traffic]:
    model, layout, tokens, forwards = case.model, case.layout, case.tokens, case.forwards
    tp = layout.tp
    if tp == 1:
        return
    joint = {linear.name: linear for linear in model.dit.applied_to("joint") if linear.split == "row"}
    for linear in model.dit.applied_to("tokens"):
        if linear.split != "row":
            continue
        calls = forwards * linear.count
        if layout.sequence_parallel:
            rows = tokens.stream * tp
            summed, entering = (rows * width * model.itemsize for width in (linear.outputs, model.hidden))
            yield Traffic("tp", f"sums of {linear.name}", "reduce_scatter", tp, calls, summed)
            yield Traffic("tp", f"tokens entering {linear.name}", "all_gather", tp, calls, entering)
            if linear.name in joint:
                summed = tokens.joint * linear.outputs * model.itemsize
                yield Traffic("tp", f"sums of the text's {linear.name}", "all_reduce", tp, calls, summed)
        else:
            rows = tokens.rows + (tokens.joint if linear.name in joint else 0)
            summed = rows * linear.outputs * model.itemsize
            yield Traffic("tp", f"sums of {linear.name}", "all_reduce", tp, calls, summed)
    gathered = sum(linear.count * linear.outputs for linear in model.dit.applied_to("step") if linear.split == "column")
    if gathered:
        yield Traffic("tp", "modulation", "all_gather", tp, forwards, gathered * model.itemsize)
    if layout.sequence_parallel:
        final = tokens.stream * tp * model.token_outputs * model.itemsize
        yield Traffic("tp", "predicted tokens", "all_gather", tp, forwards, final)
    if model.norm_across_heads:
        layers = forwards * model.layers
        yield Traffic("tp", "squares of self-attention's q and k", "all_reduce", tp, layers, 2 * tokens.rows * FLOAT32)
        yield Traffic("tp", "squares of cross-attention's q", "all_reduce", tp, layers, tokens.rows * FLOAT32)


def _context_parallel(case: Case) -> Iterator[Traffic]:
    model, layout, tokens, forwards = case.model, case.layout, case.tokens, case.forwards
    cp, layers = layout.cp, case.forwards * case.model.layers
    if cp == 1:
        return
    shard = 2 * tokens.rows * case.local_hidden * model.itemsize
    if layout.method == "gather":
        yield Traffic("cp", "K and V", "all_gather", cp, layers, cp * shard)
    else:
        yield Traffic("cp", "K and V", "rotate", cp, layers * (cp - 1), shard)
        # The proof of the softmax bound gathers two numbers a head as well, but not in compiled code.
    final = tokens.padded * model.token_outputs * model.itemsize
    yield Traffic("cp", "predicted tokens", "all_gather", cp, forwards, final)


def _cfg_parallel(case: Case) -> Iterator[Traffic]:
    model, cfg = case.model, case.layout.cfg
    if cfg > 1:
        message = cfg * case.forwards * case.shape.latent_values(model) * model.itemsize
        yield Traffic("cfg", "predictions", "all_gather", cfg, 1, message)
