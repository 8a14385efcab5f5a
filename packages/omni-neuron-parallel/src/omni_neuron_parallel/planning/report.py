# SPDX-License-Identifier: Apache-2.0
"""A plan as JSON-ready data. Keys are documented in docs/planning.md and change only with `FORMAT`."""

from __future__ import annotations

import dataclasses
from typing import Any

from omni_neuron_parallel.planning.hardware import MEASURED, Target
from omni_neuron_parallel.planning.layout import Case, Layout, Method, methods_of
from omni_neuron_parallel.planning.memory import tiles_per_rank
from omni_neuron_parallel.planning.roofline import Plan, Suggestion, part_seconds, plan
from omni_neuron_parallel.topology import divisors, valid_tensor_parallel_sizes

FORMAT = 1


def plan_as_json(planned: Plan, devices: int) -> dict[str, Any]:
    """The whole planned."""
    case = planned.case
    model, layout, shape = case.model, case.layout, case.shape
    tiles, most = tiles_per_rank(case)
    return {
        "format": FORMAT,
        "estimate": True,
        "model": {
            "name": model.name,
            "experts": model.experts,
            "layers": model.layers,
            "heads": model.heads,
            "hidden": model.hidden,
            "itemsize": model.itemsize,
            "parameters": {
                "dit": model.dit.parameters(),
                "text_encoder": model.text_encoder.parameters(),
                "vae_decoder": model.vae.parameters,
            },
        },
        "video": {"height": shape.height, "width": shape.width, "frames": shape.frames},
        "target": {"name": planned.target.name, "figures": _figures(planned.target)},
        "layout": _layout(layout),
        "devices": {"available": devices, "used": layout.world_size, "replicas": devices // layout.world_size},
        "valid": {
            "tp": valid_tensor_parallel_sizes(model.heads),
            "cfg": divisors(model.branches),
            "vae_patch": divisors(layout.world_size),
        },
        "tokens": {
            "latent": list(shape.latent(model)),
            "total": case.tokens.total,
            "per_rank": case.tokens.rows,
            "between_layers": case.tokens.stream,
            "padded": case.tokens.padded,
            "waste": case.tokens.waste,
        },
        "memory": {
            "capacity_bytes": planned.memory.capacity,
            "denoising_bytes": planned.memory.total("denoising"),
            "decoding_bytes": planned.memory.total("decoding"),
            "formula_denoising_bytes": planned.memory.formula_total("denoising"),
            "formula_decoding_bytes": planned.memory.formula_total("decoding"),
            "peak_bytes": planned.memory.peak,
            "fits": planned.memory.fits,
            "verdict": planned.memory.verdict,
            "items": [dataclasses.asdict(item) for item in planned.memory.items],
            "measured": measured_comparison(case),
        },
        "vae": {"tiles": tiles, "most_tiles_per_rank": most, "decoding_ranks": layout.vae_patch},
        "flops": {
            "step": sum(work.flops for work in planned.work),
            "per_core": sum(work.rank_flops for work in planned.work),
            "items": [
                {
                    "name": work.name,
                    "step": work.flops,
                    "per_core": work.rank_flops,
                    "exponentials_per_core": work.rank_exponentials,
                    "seconds": part_seconds(work, planned.target),
                }
                for work in planned.work
            ],
        },
        "traffic": {
            "bytes": sum(transfer.traffic.bytes for transfer in planned.transfers),
            "collectives": sum(transfer.traffic.calls for transfer in planned.transfers),
            "items": [
                {
                    **dataclasses.asdict(transfer.traffic),
                    "bytes": transfer.traffic.bytes,
                    "hops": transfer.traffic.hops,
                    "seconds": transfer.seconds,
                    "hidden_seconds": transfer.hidden,
                    "exposed_seconds": transfer.exposed,
                }
                for transfer in planned.transfers
            ],
        },
        "seconds": {**_seconds(planned), "hbm_bytes": planned.hbm_bytes},
        "other_method": _other_method(planned),
    }


def suggestions_as_json(suggestions: list[Suggestion]) -> list[dict[str, Any]]:
    """The ranked layouts, the fastest first."""
    return [
        _choice(suggestion.plan) | {"others": [_choice(other) for other in suggestion.others]}
        for suggestion in suggestions
    ]


def _other_method(planned: Plan) -> dict[str, Any] | None:
    layout = planned.case.layout
    if layout.cp == 1:
        return None
    method: Method = "ring" if layout.method == "gather" else "gather"
    if method not in methods_of(planned.case.model):
        return None
    case = dataclasses.replace(planned.case, layout=dataclasses.replace(layout, method=method))
    return _choice(plan(case, planned.target, layout.world_size))


def _choice(planned: Plan) -> dict[str, Any]:
    return {
        "layout": _layout(planned.case.layout),
        "seconds": _seconds(planned),
        "peak_bytes": planned.memory.peak,
        "fits": planned.memory.fits,
        "verdict": planned.memory.verdict,
    }


def _layout(layout: Layout) -> dict[str, Any]:
    return {**dataclasses.asdict(layout), "world_size": layout.world_size}


def _seconds(planned: Plan) -> dict[str, float]:
    return {
        "compute": planned.compute_seconds,
        "hbm": planned.hbm_seconds,
        "exposed": planned.exposed_seconds,
        "hidden": planned.hidden_seconds,
        "step": planned.step_seconds,
    }


def _figures(target: Target) -> dict[str, Any]:
    return {
        field.name: dataclasses.asdict(getattr(target, field.name))
        for field in dataclasses.fields(target)
        if field.name != "name"
    }


def measured_comparison(case: Case) -> dict[str, Any] | None:
    """The fork's account beside this layout, if it is the one that was measured; else None."""
    layout = case.layout
    same = (layout.tp, layout.cp, layout.cfg, case.tokens.total, case.model.hidden, layout.method)
    if same != (MEASURED.tp, MEASURED.cp, MEASURED.cfg, MEASURED.tokens, MEASURED.hidden, "gather"):
        return None
    return dataclasses.asdict(MEASURED)
