# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-neuron lower`: the StableHLO of a component for a layout and a shape, without weights or devices."""

from __future__ import annotations

import json
import time
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import err, fail, out, plain_table, print_json


class LowerComponent(StrEnum):
    """What can be lowered on its own."""

    TRANSFORMER = "transformer"
    TEXT_ENCODER = "text_encoder"
    VAE = "vae"
    VAE_ENCODER = "vae_encoder"


class LowerDtype(StrEnum):
    """Of weights and activations."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


def lower(
    model: Annotated[
        str, typer.Option(help="A name that a model package declares, such as wan22-t2v-a14b, or a checkpoint folder.")
    ],
    output: Annotated[Path, typer.Option(help="The folder to write into.", file_okay=False)],
    component: Annotated[LowerComponent, typer.Option(help="The component.")] = LowerComponent.TRANSFORMER,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    cp: Annotated[int, typer.Option(min=1, help="Context-parallel ranks (ring_degree).")] = 1,
    cfg: Annotated[int, typer.Option(min=1, help="Ranks that share the branches of guidance.")] = 1,
    height: Annotated[int, typer.Option(min=16, help="Pixels.")] = 480,
    width: Annotated[int, typer.Option(min=16, help="Pixels.")] = 832,
    frames: Annotated[int | None, typer.Option(min=1, help="Frames of the video. Default: 81; of an image 1.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Only this many blocks. Default: all.")] = None,
    dtype: Annotated[LowerDtype, typer.Option(help="Of weights and activations.")] = LowerDtype.BFLOAT16,
    sp: Annotated[bool, typer.Option("--sp/--no-sp", help="Sequence parallelism within TP.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="The report as JSON on stdout.")] = False,
) -> None:
    """Lower a component to StableHLO on fake tensors, as `neuron_stablehlo` would for one rank of the layout.

    Writes COMPONENT.mlir and COMPONENT.json (several graphs: COMPONENT-1.…). Needs VLLM_NEURON_CPU_MODE=1 and the extra
    `omni-neuron-runtime[stablehlo]`.

    Exit codes: 0 written, 1 it cannot be lowered, 2 wrong usage.
    """
    import torch

    from omni_neuron_parallel import Topology, destroy_parallel, initialize_parallel
    from omni_neuron_runtime import CompileError, component_compiler_args, declared_world, is_cpu_mode, lower_on_paper
    from vllm_omni_neuron.sdk import default_dtype

    from .plannable import find_model, frames_of, refused_axis

    if not is_cpu_mode():
        fail("lower traces for the CPU: set VLLM_NEURON_CPU_MODE=1")
    try:
        spec, components = find_model(model, "lowers")
        frames = frames_of(spec, frames)
        topology = Topology(tp=tp, cp=cp, cfg=cfg)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    refused = refused_axis(spec, {"tp": tp, "cp": cp, "cfg": cfg, "sp": tp if sp else 1})
    if refused is not None:
        raise typer.BadParameter(refused[1], param_hint=f"--{refused[0]}")

    def make() -> tuple[torch.nn.Module, dict[str, Any]]:
        with default_dtype(getattr(torch, dtype.value)):
            return components.make(
                component.value, height=height, width=width, frames=frames, layers=layers, sequence_parallel=sp
            )

    started = time.perf_counter()
    with err().status(f"lowering {component.value} for {topology}"), declared_world(topology.world_size):
        initialize_parallel(topology)
        try:
            graphs = lower_on_paper(make, component.value, component_compiler_args(component.value))
        except (CompileError, ValueError) as error:
            fail(str(error))
        finally:
            destroy_parallel()
    output.mkdir(parents=True, exist_ok=True)
    reports = []
    for index, graph in enumerate(graphs):
        name = component.value if len(graphs) == 1 else f"{component.value}-{index + 1}"
        path = output / f"{name}.mlir"
        path.write_text(graph.text)
        report = {
            "file": str(path),
            "key": graph.key,
            "model": model,
            "component": component.value,
            "layout": {"tp": tp, "cp": cp, "cfg": cfg, "sp": sp},
            "shape": {"height": height, "width": width, "frames": frames},
            "dtype": dtype.value,
            "layers": layers,
            **graph.report,
        }
        (output / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n")
        reports.append(report)
    if json_:
        print_json(reports)
        return
    for report in reports:
        _print(report)
    err().print(f"done in {time.perf_counter() - started:.1f} s")


def _print(report: dict[str, Any]) -> None:
    table = plain_table("", "")
    table.add_row("file", report["file"])
    table.add_row("key", report["key"])
    table.add_row(
        "StableHLO", f"{report['stablehlo_bytes'] / 2**20:.2f} MiB, {report['stablehlo_operations']} operations"
    )
    table.add_row("inputs of one rank", f"{report['input_bytes'] / 2**30:.2f} GiB, weights included")
    table.add_row("FLOPs of one rank", f"{report['flops']:.3e}")
    table.add_row("collectives", f"{report['collective_bytes'] / 2**20:.1f} MiB sent by one rank")
    for row in report["collectives"]:
        what = " ".join(filter(None, (row["operation"], row["reduction"])))
        groups = f"{len(row['groups'])} groups of {len(row['groups'][0])}"
        table.add_row(
            "", f"{row['count']} × {what} of {row['bytes_each'] / 2**20:.2f} MiB, {groups}: {row['groups'][0]} …"
        )
    kernels: Counter[str] = Counter()
    for row in report["composites"]:
        kernels[row["name"]] += row["count"]
    table.add_row("kernels", f"{kernels.total()} calls as stablehlo.composite")
    for name, count in kernels.most_common():
        operands = [row["operands"] for row in report["composites"] if row["name"] == name]
        first = ", ".join(f"{key} {kind.removeprefix('tensor<').rstrip('>')}" for key, kind in operands[0].items())
        more = f"; {len(operands)} kinds" if len(operands) > 1 else ""
        table.add_row("", f"{count} × {name}: {first}{more}")
    table.add_row("seconds", f"{report['capture_seconds']} capture, {report['lowering_seconds']} lowering")
    table.add_row("peak memory", f"{report['peak_memory_bytes'] / 2**30:.2f} GiB")
    out().print(table)
