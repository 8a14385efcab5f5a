# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-neuron judge`: what a video of the shapes model shows, beside what was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from .console import EXIT_FAILED, EXIT_USAGE, fail, out, plain_table, print_json

if TYPE_CHECKING:
    from omni_neuron_testkit import Subject, Verdict


def judge(
    video: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A video file.")],
    prompt: Annotated[str | None, typer.Option(help="What the video should show.")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Ask for a clean outline and a straight path, too; needs --prompt.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="The verdict as JSON on stdout.")] = False,
) -> None:
    """Say which colour, shape and direction a video shows: one shape that moves over a plain ground.

    Such videos are what the checkpoint of omni-neuron-shapes makes. Exit codes: 0 the video shows what --prompt names
    (or there is no --prompt), 1 it does not, 2 wrong usage.
    """
    try:
        import omni_neuron_testkit as testkit
    except ModuleNotFoundError as error:
        if error.name != "omni_neuron_testkit":
            raise
        fail("the judge is part of omni-neuron-testkit, which is not installed; uv pip install omni-neuron-testkit")

    if strict and prompt is None:
        raise typer.BadParameter("there is nothing to hold the video to; give --prompt", param_hint="--strict")
    subject = None if prompt is None else testkit.subject_of(prompt)
    if prompt is not None and subject is None:
        words = ", ".join("/".join(group) for group in (testkit.COLOURS, testkit.SHAPES, testkit.DIRECTIONS))
        raise typer.BadParameter(f"{prompt!r} does not name exactly one of each of {words}", param_hint="--prompt")
    try:
        verdict = testkit.judge(testkit.read_video(video))
    except (ValueError, OSError) as error:
        fail(f"{video}: {error}", EXIT_USAGE)
    right = None if subject is None else verdict.matches(subject, strict=strict)
    if json_:
        print_json({"video": str(video), "prompt": prompt, "strict": strict, "right": right, **verdict.as_json()})
    else:
        out().print(_table(verdict, subject, right))
    if right is False:
        raise typer.Exit(EXIT_FAILED)


def _table(verdict: Verdict, subject: Subject | None, right: bool | None) -> Table:
    """The verdict for people."""
    table = plain_table("", "asked", "seen", "confidence")
    for name in ("colour", "shape", "direction"):
        table.add_row(
            f"[bold]{name}[/bold]",
            "–" if subject is None else getattr(subject, name),
            getattr(verdict, name) or "nothing clear",
            f"{getattr(verdict, name + '_confidence'):.2f}",
        )
    outline = f"overlap {verdict.overlap:.2f}, worst frame {verdict.worst_overlap:.2f}"
    table.add_row("[bold]outline[/bold]", "", outline, "well-formed" if verdict.well_formed else "not well-formed")
    if right is not None:
        table.add_row("[bold]verdict[/bold]", "", "[green]as asked[/green]" if right else "[red]not as asked[/red]", "")
    return table
