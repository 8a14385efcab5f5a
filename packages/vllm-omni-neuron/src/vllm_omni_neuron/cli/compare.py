# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-neuron compare`: two videos, or two runs' captures, as one page and in figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from .console import EXIT_FAILED, EXIT_USAGE, err, fail, out, plain_table, print_json

if TYPE_CHECKING:
    from omni_neuron_testkit import RunReport, VideoPair

_SHOWN_PROBLEMS = 20  # on the terminal; page and JSON have all


def compare(
    a: Annotated[Path, typer.Argument(exists=True, help="The reference: a video, or a folder of captured steps.")],
    b: Annotated[Path, typer.Argument(exists=True, help="What is held to it: the same kind of thing.")],
    captures: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="DIR_A DIR_B", help="Folders of captured steps, where A and B are videos."),
    ] = None,
    low_precision: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Captured steps of the reference in low precision (bfloat16): how much error is unavoidable.",
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("comparison.html"),
    json_: Annotated[bool, typer.Option("--json", help="The figures as JSON on stdout.")] = False,
) -> None:
    """Compare two videos, two captured runs, or both, and write one self-contained HTML page.

    Videos: PSNR and SSIM. Captures (see "Tensor capture" in the README): every tensor of every step against the
    reference, by one pass rule. Without --low-precision, B is held to float32 accuracy. Exit codes: 0 done, and the
    captures, if any, pass; 1 they fail; 2 wrong usage, such as videos of different sizes.
    """
    try:
        import omni_neuron_testkit as testkit
    except ModuleNotFoundError as error:
        if error.name != "omni_neuron_testkit":
            raise
        _fail_without_extra(error)

    if a.is_dir() != b.is_dir():
        folder, file = (a, b) if a.is_dir() else (b, a)
        fail(f"{folder} is a folder and {file} a file; give two videos, or two folders of captured steps", EXIT_USAGE)
    if a.is_dir():
        if captures is not None:
            raise typer.BadParameter("A and B are folders of captured steps already", param_hint="--captures")
        captures = a, b
    elif low_precision is not None and captures is None:
        raise typer.BadParameter("there are no captures that it could be a reference for", param_hint="--low-precision")
    try:
        videos = None if a.is_dir() else _read_videos(a, b)
        report = None if captures is None else testkit.compare_runs(captures[0], low_precision, captures[1])
        page = testkit.comparison_page((str(a), str(b)), videos=videos, report=report)
    except (ValueError, OSError) as error:
        fail(str(error), EXIT_USAGE)
    except ModuleNotFoundError as error:
        _fail_without_extra(error)
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        fail(f"the page cannot be written: {error}", EXIT_USAGE)
    passed = None if report is None else report.passed
    if json_:
        print_json(
            {
                "a": str(a),
                "b": str(b),
                "page": str(output),
                "passed": passed,
                "videos": None if videos is None else videos.quality.as_json(),
                "captures": None if report is None else report.as_json(),
            }
        )
    else:
        out().print(_table(videos, report, output))
        for problem in [] if report is None else report.problems[:_SHOWN_PROBLEMS]:
            err().print(problem, markup=False)
        if report is not None and len(report.problems) > _SHOWN_PROBLEMS:
            err().print(f"… and {len(report.problems) - _SHOWN_PROBLEMS} more, on the page")
    if passed is False:
        raise typer.Exit(EXIT_FAILED)


def _fail_without_extra(error: ModuleNotFoundError) -> Any:
    fail(f"compare needs {error.name}, which is not installed; uv pip install 'vllm-omni-neuron[compare]'")


def _read_videos(a: Path, b: Path) -> VideoPair:
    """Both videos and their quality.

    Raises:
        ValueError: one is no video, or they cannot be compared; both are named.
    """
    import omni_neuron_testkit as testkit

    frames = []
    for path in (a, b):
        try:
            frames.append(testkit.read_video(path))
        except (ValueError, OSError) as error:
            raise ValueError(f"{path}: {error}") from error
    try:
        quality = testkit.video_quality(frames[1], frames[0])
    except ValueError as error:
        raise ValueError(f"{b} cannot be compared with the reference {a}: {error}") from error
    return testkit.VideoPair(a, b, frames[0], frames[1], quality)


def _table(videos: VideoPair | None, report: RunReport | None, page: Path) -> Table:
    """The result for people."""
    table = plain_table("", "")
    if videos is not None:
        quality = videos.quality
        worst = quality.worst_frame
        table.add_row("[bold]PSNR[/bold]", "all values are equal" if quality.identical else f"{quality.psnr:.2f} dB")
        table.add_row("[bold]SSIM[/bold]", f"{quality.ssim:.4f}, worst frame {quality.frame_ssim[worst]:.4f} ({worst})")
    if report is not None:
        tensors = sum(len(step.comparisons) for step in report.steps)
        ratios = [ratio for ratio in report.ratios() if ratio is not None]
        table.add_row("[bold]captures[/bold]", "[green]pass[/green]" if report.passed else "[red]fail[/red]")
        table.add_row("[bold]compared[/bold]", f"{tensors} tensors in {len(report.steps)} steps")
        if ratios:
            table.add_row("[bold]worst ratio[/bold]", f"{max(ratios):.2f} of the low-precision error (l2)")
        if report.trend is not None:
            table.add_row("[bold]over the steps[/bold]", report.trend.label.value)
    table.add_row("[bold]page[/bold]", str(page))
    return table
