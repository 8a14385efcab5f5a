# SPDX-License-Identifier: Apache-2.0
"""FLOPs and HBM traffic of one denoising step, in all and on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from omni_neuron_parallel.planning.layout import Case

SELF_ATTENTION = "self-attention scores and values"
CROSS_ATTENTION = "cross-attention scores and values"


@dataclass(frozen=True)
class Work:
    """The work of one part of the transformer in one step, guidance included.

    Attributes:
        name: the part.
        flops: of all ranks that do it once, without padding and without what TP repeats.
        rank_flops: on one rank, padding and repetition included.
        rank_exponentials: on one rank.
    """

    name: str
    flops: float
    rank_flops: float
    rank_exponentials: float = 0.0


def plan_work(case: Case) -> tuple[Work, ...]:
    """FLOPs by part; a multiply-add is two. What is computed once a request (K and V of the text) is not in it."""
    model, tokens, tp = case.model, case.tokens, case.layout.tp
    parts: dict[str, tuple[float, float]] = {}
    for linear in model.dit.applied_to(*tokens.of_rank):
        whole, local = parts.get(linear.name, (0.0, 0.0))
        once = {"step": 1, "joint": tokens.joint}.get(linear.rows, tokens.total)
        parts[linear.name] = (whole + linear.flops(once, 1), local + linear.flops(tokens.of_rank[linear.rows], tp))
    work = [Work(name, model.branches * whole, case.forwards * local) for name, (whole, local) in parts.items()]
    kinds = [(SELF_ATTENTION, tokens.total + tokens.joint)]
    if model.has_cross_attention:
        kinds.append((CROSS_ATTENTION, model.text_length))
    for name, keys in kinds:
        # Scores and values: 2 · 2 · queries · keys · channels; one exponential a query, key and head.
        whole = 4.0 * model.layers * (tokens.total + tokens.joint) * keys * model.hidden
        local = 4.0 * model.layers * (tokens.rows + tokens.joint) * keys * case.local_hidden
        exponentials = local / (4.0 * model.head_dim)
        work.append(Work(name, model.branches * whole, case.forwards * local, case.forwards * exponentials))
    return tuple(work)


def hbm_bytes(case: Case) -> float:
    """The least that one rank reads and writes in a step: each weight of one expert once a forward, each matrix
    product's and attention's operands and results once; elementwise operations taken as fused with their neighbours."""
    model, tokens, tp = case.model, case.tokens, case.layout.tp
    weights = model.dit.bytes(tp, model.itemsize)
    values = 0
    for linear in model.dit.applied_to(*tokens.of_rank):
        values += linear.count * tokens.of_rank[linear.rows] * sum(linear.local_shape(tp))
    values += model.layers * (2 * tokens.rows + 2 * tokens.total + 4 * tokens.joint) * case.local_hidden  # q, out, k, v
    if model.has_cross_attention:
        values += model.layers * (2 * tokens.rows + 2 * model.text_length) * case.local_hidden
    return float(case.forwards * (weights + values * model.itemsize))
