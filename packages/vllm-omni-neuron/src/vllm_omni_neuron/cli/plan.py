# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-neuron plan`: what a layout needs and how fast it can be, before anything runs. Starts no engine."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import EXIT_FAILED, print_json

if TYPE_CHECKING:
    from omni_neuron_parallel.planning import Layout, ModelSizes
    from vllm_omni_neuron.sdk import ModelSpec, SpecAxis


class PlanTarget(StrEnum):
    """Chips with figures in `omni_neuron_parallel.planning.TARGETS`, which is not imported for `--help`."""

    TRN2 = "trn2"
    TRN3 = "trn3"


class KeyValueMethod(StrEnum):
    """How context-parallel ranks share keys and values."""

    GATHER = "gather"
    RING = "ring"


def plan(
    model: Annotated[
        str, typer.Option(help="A name that a model package declares, such as wan22-t2v-a14b, or a checkpoint folder.")
    ],
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    cp: Annotated[int, typer.Option(help="Context-parallel ranks (ring_degree).")] = 1,
    cfg: Annotated[int, typer.Option(help="Ranks that share the branches of guidance.")] = 1,
    vae_patch: Annotated[int, typer.Option(help="Ranks that decode tiles; 1 decodes whole frames.")] = 1,
    height: Annotated[int, typer.Option(help="Pixels.")] = 480,
    width: Annotated[int, typer.Option(help="Pixels.")] = 832,
    frames: Annotated[int | None, typer.Option(help="Frames of the video. Default: 81; of an image 1.")] = None,
    target: Annotated[PlanTarget, typer.Option(help="The chip.")] = PlanTarget.TRN2,
    devices: Annotated[int | None, typer.Option(help="Logical cores. Default: 64, a trn2.48xlarge.")] = None,
    sp: Annotated[
        bool | None, typer.Option("--sp/--no-sp", help="Sequence parallelism within TP. Default: no; --suggest: both.")
    ] = None,
    method: Annotated[
        KeyValueMethod | None, typer.Option(help="Keys and values over CP. Default: gather; --suggest: both.")
    ] = None,
    suggest: Annotated[bool, typer.Option("--suggest", help="Rank all layouts that fill the devices.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="The plan as JSON on stdout.")] = False,
) -> None:
    """Estimate memory, traffic, FLOPs and step time of a layout.

    Formulas and sources: docs/planning.md. Nothing was checked on a device.

    Exit codes: 0 the layout fits into memory, 1 it does not, 2 wrong usage.
    """
    from omni_neuron_parallel import planning

    from .plan_tables import print_plan
    from .plannable import refused_axis

    spec, sizes, frames = _model(model, frames)
    layout = planning.Layout(tp, cp, cfg, vae_patch, bool(sp), method.value if method else "gather")
    shape, chip = planning.VideoShape(height, width, frames), planning.TARGETS[target.value]
    cores = int(chip.devices.value) if devices is None else devices
    try:
        found = planning.plan(planning.Case(sizes, layout, shape), chip, cores)
    except planning.PlanError as error:
        raise typer.BadParameter(str(error), param_hint="--" + error.setting.replace("_", "-")) from None
    refused = refused_axis(spec, _axes(layout))
    if refused is not None:
        raise typer.BadParameter(refused[1], param_hint="--" + refused[0].replace("_", "-"))
    data: dict[str, Any] = planning.plan_as_json(found, cores)
    if suggest:
        ranked = planning.suggest(
            sizes,
            shape,
            chip,
            cores,
            vae_patch=vae_patch,
            method=method.value if method else None,
            sequence_parallel=sp if "sp" in spec.axes else False,
        )
        ranked = [choice for choice in ranked if refused_axis(spec, _axes(choice.plan.case.layout)) is None]
        data["suggestions"] = planning.suggestions_as_json(ranked)
    if json_:
        print_json(data)
    else:
        print_plan(data)
    if not found.memory.fits:
        raise typer.Exit(EXIT_FAILED)


def _model(name: str, frames: int | None) -> tuple[ModelSpec, ModelSizes, int]:
    from .plannable import find_model, frames_of

    try:
        found = find_model(name, "plans")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--model") from None
    try:
        return found.spec, found.made, frames_of(found.spec, frames)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--frames") from None


def _axes(layout: Layout) -> dict[SpecAxis, int]:
    """The sizes of a layout as `refused_axis` takes them: sequence parallelism is over the ranks of TP, or not used."""
    return {
        "tp": layout.tp,
        "cp": layout.cp,
        "cfg": layout.cfg,
        "vae_patch": layout.vae_patch,
        "sp": layout.tp if layout.sequence_parallel else 1,
    }
