# SPDX-License-Identifier: Apache-2.0
"""From a request to files and a report: what `generate` and the scripts in examples/wan22 have in common."""

from __future__ import annotations

import contextlib
import re
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from . import engine
from .console import EXIT_INTERRUPTED, EXIT_USAGE, err, fail, out, print_json
from .engine import GenerateOptions, GenerationResult
from .outputs import output_path, write_outputs
from .profile import profile_of, profile_path, profile_table, write_profile
from .progress import EngineOutput, engine_streams
from .summary import effective_sources, generation_report, notes, summary_from_output, summary_table

_START_FAILED = "Orchestrator initialization failed"  # how vLLM-Omni wraps whatever stops an engine's start
# The settings whose source is reported; see `effective_sources`.
_SETTINGS = (*engine.SAMPLING_FIELDS, *engine.EXTRA_FIELDS)


@dataclass(frozen=True)
class Reporting:
    """What a command shows beside the files it writes."""

    json: bool = False
    quiet: bool = False
    verbose: bool = False
    debug: bool = False


def generate_videos(
    request: GenerateOptions,
    output: Path | None,
    *,
    stage_config: Path | None = None,
    deploy_config: Path | None = None,
    profile_runs: int | None = None,
    reporting: Reporting | None = None,
) -> None:
    """Generate what `request` asks for, write the file or files, and report; ends the command where that fails.

    Args:
        request: What to generate, without a configuration file.
        output: The MP4 to write, or the PNG of a model that makes images; of several the names are numbered. None for
            `video.mp4` or `image.png`.
        stage_config: A stage YAML with the engine's settings.
        deploy_config: Or a deploy configuration of vLLM-Omni 0.30.
        profile_runs: Time this many generations after one to warm up, and write the result beside the file.
        reporting: What to show.
    """
    reporting = reporting or Reporting()
    _check(request, stage_config, deploy_config)
    output = output_path(request.model, output)
    _require_active_plugin()
    with _deploy_file(request, stage_config, deploy_config) as deploy_file:
        request = replace(request, deploy_config=deploy_file)
        summary = _generate(request, output, profile_runs, reporting)
    if reporting.json:
        print_json(summary)
    elif not reporting.quiet:
        if "profile" in summary:
            out().print(profile_table(summary["profile"]))
        out().print(summary_table(summary))


def _check(request: GenerateOptions, stage_config: Path | None, deploy_config: Path | None) -> None:
    """Refuse what contradicts itself."""
    if stage_config is not None and deploy_config is not None:
        raise typer.BadParameter("give this or --deploy-config, not both", param_hint="--stage-config")
    given = [name for name in engine.LAYOUT_FIELDS if getattr(request, name) is not None]
    if given and (stage_config or deploy_config):
        hint = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise typer.BadParameter("the configuration file settles the layout; leave this out", param_hint=hint)
    if stage_config is None and request.quantization is None:
        for name in ("comfyui_fp8_model_path", "modules_to_not_convert"):
            if getattr(request, name) is not None:
                raise typer.BadParameter(
                    "is only valid with --quantization fp8_row_mx", param_hint=f"--{name.replace('_', '-')}"
                )


def _require_active_plugin() -> None:
    """Without a device vLLM-Omni would start on another platform, a minute later, and fail there."""
    import omni_neuron_runtime as runtime

    try:
        active = runtime.is_active()
    except runtime.EnvironmentVariableError as error:
        fail(str(error), EXIT_USAGE)
    if not active:
        fail("there is no Neuron device (/dev/neuron*); set VLLM_NEURON_CPU_MODE=1 to run on the CPU")


@contextlib.contextmanager
def _deploy_file(
    request: GenerateOptions, stage_config: Path | None, deploy_config: Path | None
) -> Iterator[Path | None]:
    """The deploy configuration to start from: a temporary file, with the request's engine settings in it."""
    source = stage_config or deploy_config
    if source is None:
        yield None
        return
    import yaml

    from vllm_omni_neuron.stage_config import StageConfigError, to_deploy_config

    if deploy_config is not None and re.search(r"^stage_args\s*:", deploy_config.read_text(encoding="utf-8"), re.M):
        raise typer.BadParameter(
            f"{deploy_config} is a stage YAML; give it to --stage-config", param_hint="--deploy-config"
        )
    try:
        written = to_deploy_config(source) if stage_config else yaml.safe_load(source.read_text(encoding="utf-8"))
        deploy = engine.with_engine_settings(written, request)
    except (StageConfigError, ValueError, yaml.YAMLError) as error:
        fail(str(error), EXIT_USAGE)
    if deploy_config is not None and deploy == written:
        yield deploy_config  # where it is: it may name other files beside it
        return
    with tempfile.TemporaryDirectory(prefix="vllm-omni-neuron-") as folder:
        deploy_file = Path(folder) / f"{source.stem}.deploy.yaml"
        deploy_file.write_text(yaml.safe_dump(deploy, sort_keys=False, allow_unicode=True), encoding="utf-8")
        yield deploy_file


def _generate(request: GenerateOptions, output: Path, profile_runs: int | None, reporting: Reporting) -> dict[str, Any]:
    """Run the engine, write the files, and say what happened."""
    log: Path | None = None
    show = not reporting.quiet
    try:
        with _engine_output(show, reporting.verbose) as (phase, log):
            result = engine.run_engine(request, phase, profile_runs)
            phase("writing the file")
            summary = _write(request, result, output)
    except KeyboardInterrupt:
        fail("interrupted", EXIT_INTERRUPTED)
    except Exception as error:  # the boundary to the user: whatever failed becomes a message and an exit code
        if reporting.debug:
            traceback.print_exc()
        where = f"\nthe engine's output is in {log}" if log is not None and log.exists() else ""
        fail(f"{_reason(error)}{where}")
    asked = {name: getattr(request, name) for name in ("width", "height", "num_frames")}
    if show:
        for note in notes(summary, asked):
            err().print(f"note: {note}", style="yellow", markup=False)
    return summary


@contextlib.contextmanager
def _engine_output(show: bool, verbose: bool) -> Iterator[tuple[Callable[[str], None], Path | None]]:
    """Where the engine's output goes: to stderr under --verbose, else to a log that is kept where it fails."""
    if not verbose:
        with EngineOutput(show) as engine_output:
            yield engine_output.phase, engine_output.log
        return
    console = err()
    with engine_streams():
        yield lambda description: console.print(f"· {description}", markup=False), None


def _write(request: GenerateOptions, result: GenerationResult, output: Path) -> dict[str, Any]:
    last = result.runs[-1]
    written = write_outputs(last.output, output, request.fps)
    info = next(iter(written.values()))
    summary = summary_from_output(last.output)
    seconds = {**summary["seconds"], "start": result.start_seconds, "total": last.seconds}
    asked = {name for name in _SETTINGS if getattr(request, name) is not None}
    sources = effective_sources(generation_report(last.output).get("sources"), asked, result.configured)
    summary = {
        "outputs": [str(path) for path in written],
        "model": request.model,
        "prompt": request.prompt,
        "width": info.width,
        "height": info.height,
        "num_frames": info.frames,
        "fps": info.fps,
        **summary,
        "seed": result.sampling.seed,
        "seeds": [result.sampling.seed + number for number in range(len(written))],
        "sources": sources,
        "seconds": {name: None if value is None else round(value, 3) for name, value in seconds.items()},
    }
    if result.warm_up is not None:
        summary["profile"] = profile_of(result, summary)
        summary["profile_file"] = str(profile_path(output))
        write_profile(summary["profile"], profile_path(output))
    return summary


def _reason(error: BaseException) -> str:
    """The error's own message; vLLM-Omni's "Orchestrator initialization failed" gives way to the error it wraps."""
    if str(error).startswith(_START_FAILED) and error.__cause__ is not None:
        error = error.__cause__
    # Where the wrapper comes without its cause, it still ends in the cause's message.
    return str(error).strip().removeprefix(_START_FAILED).removeprefix(":").strip() or type(error).__name__
