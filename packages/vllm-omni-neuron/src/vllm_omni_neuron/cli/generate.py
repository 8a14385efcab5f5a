# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-neuron generate`: a prompt becomes an MP4."""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import tempfile
import traceback
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from . import engine
from .console import EXIT_INTERRUPTED, EXIT_USAGE, err, fail, out, print_json
from .engine import GenerationRequest, GenerationResult
from .progress import EngineOutput, engine_streams
from .summary import notes, summary_from_output, summary_table

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_START_FAILED = "Orchestrator initialization failed"  # how vLLM-Omni wraps whatever stops an engine's start
_MAX_SEED = 2**63 - 1


class Dtype(StrEnum):
    """Computation types."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


def _number(valid: str, test: Callable[[float], bool]) -> Callable[[float | None], float | None]:
    """An option's callback that names the value and what is valid (typer's own ranges name the latter only)."""

    def check(value: float | None) -> float | None:
        if value is not None and not test(value):
            raise typer.BadParameter(f"{value} is not {valid}")
        return value

    return check


_COUNT = _number("1 or more", lambda value: value >= 1)
_POSITIVE = _number("a number above 0", lambda value: 0 < value < math.inf)
_GUIDANCE = _number("a number of 0 or more", lambda value: 0 <= value < math.inf)
_SHARE = _number("between 0 and 1", lambda value: 0 <= value <= 1)
_SEED = _number(f"between 0 and {_MAX_SEED}", lambda value: 0 <= value <= _MAX_SEED)


def _text(value: str) -> str:
    if not value.strip():
        raise typer.BadParameter("the prompt is empty; describe the video")
    return value


def _model(value: str) -> str:
    folder = Path(value).expanduser()
    if folder.is_dir():
        if not (folder / "model_index.json").is_file():
            raise typer.BadParameter(
                f"{value} has no model_index.json; expected a checkpoint folder in the layout of diffusers"
            )
        return str(folder)
    if folder.exists():
        raise typer.BadParameter(f"{value} is a file; expected a checkpoint folder in the layout of diffusers")
    if _HUB_NAME.fullmatch(value):
        raise typer.BadParameter(
            f"no folder {value}; if it is a name on the Hugging Face hub, download it first and give the folder: "
            f"hf download {value} --local-dir {folder.name}"
        )
    raise typer.BadParameter(f"no folder {value}; expected a checkpoint folder in the layout of diffusers")


def _output(value: Path) -> Path:
    if value.suffix.lower() != ".mp4":
        raise typer.BadParameter(f"{value} does not end in .mp4, the only format written")
    if value.is_dir():
        raise typer.BadParameter(f"{value} is a folder")
    folder = value.parent
    if not folder.is_dir():
        raise typer.BadParameter(f"the folder {folder} does not exist")
    if not os.access(value if value.exists() else folder, os.W_OK):
        raise typer.BadParameter(f"{value} cannot be written: no permission")
    return value


def generate(
    model: Annotated[str, typer.Option(callback=_model, help="Checkpoint folder in the layout of diffusers.")],
    prompt: Annotated[str, typer.Option(callback=_text, help="What the video shows.")],
    output: Annotated[Path, typer.Option("--output", "-o", callback=_output, help="The MP4 to write.")] = Path(
        "video.mp4"
    ),
    negative_prompt: Annotated[str | None, typer.Option(help="What the video does not show.")] = None,
    height: Annotated[int | None, typer.Option(callback=_COUNT, help="Pixels. Default: the model's.")] = None,
    width: Annotated[int | None, typer.Option(callback=_COUNT, help="Pixels. Default: the model's.")] = None,
    num_frames: Annotated[int | None, typer.Option(callback=_COUNT, help="Frames. Default: the model's.")] = None,
    num_inference_steps: Annotated[
        int | None, typer.Option(callback=_COUNT, help="Denoising steps. Default: the model's.")
    ] = (None),
    guidance_scale: Annotated[
        float | None, typer.Option(callback=_GUIDANCE, help="Classifier-free guidance; 1 is off.")
    ] = None,
    guidance_scale_2: Annotated[
        float | None, typer.Option(callback=_GUIDANCE, help="Guidance of the second expert.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(callback=_SEED, help="Seed of the noise. Default: chosen and reported.")
    ] = None,
    fps: Annotated[
        float | None, typer.Option(callback=_POSITIVE, help="Frames per second of the file. Default: the model's.")
    ] = None,
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option("--tensor-parallel-size", "-tp", callback=_COUNT, help="Ranks that share each layer. Default: 1."),
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Computation type. Default: bfloat16.")] = None,
    flow_shift: Annotated[float | None, typer.Option(callback=_POSITIVE, help="Shift of the schedule.")] = None,
    boundary_ratio: Annotated[
        float | None, typer.Option(callback=_SHARE, help="Where the low-noise expert takes over.")
    ] = None,
    sample_solver: Annotated[str | None, typer.Option(help="Scheduler, as the model names it: unipc, euler.")] = None,
    stage_config: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A stage YAML (with `stage_args`).")
    ] = None,
    deploy_config: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A deploy configuration of vLLM-Omni 0.30.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="The summary as JSON on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no summary.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the engine's own output.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the Python traceback of a failure.")] = False,
) -> None:
    """Generate a video from a prompt.

    Exit codes: 0 done, 1 generation failed, 2 wrong usage.
    """
    if tensor_parallel_size is not None and (stage_config or deploy_config):
        raise typer.BadParameter(
            "the configuration file settles the layout; leave this out", param_hint="--tensor-parallel-size"
        )
    _require_active_plugin()
    with _deploy_file(stage_config, deploy_config) as deploy_file:
        request = GenerationRequest(
            model=model,
            prompt=prompt,
            seed=secrets.randbelow(2**31) if seed is None else seed,
            seed_is_random=seed is None,
            negative_prompt=negative_prompt,
            height=height,
            width=width,
            num_frames=num_frames,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            guidance_scale_2=guidance_scale_2,
            fps=fps,
            flow_shift=flow_shift,
            boundary_ratio=boundary_ratio,
            sample_solver=sample_solver,
            tensor_parallel_size=tensor_parallel_size,
            dtype=None if dtype is None else dtype.value,
            deploy_config=deploy_file,
        )
        summary = _generate(request, output, show=not quiet, verbose=verbose, debug=debug)
    if json_:
        print_json(summary)
    elif not quiet:
        out().print(summary_table(summary))


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
def _deploy_file(stage_config: Path | None, deploy_config: Path | None) -> Iterator[Path | None]:
    """The deploy configuration to start from; a stage YAML is translated into a temporary one."""
    if stage_config is not None and deploy_config is not None:
        raise typer.BadParameter("give this or --deploy-config, not both", param_hint="--stage-config")
    if stage_config is None:
        if deploy_config is not None and re.search(r"^stage_args\s*:", deploy_config.read_text(encoding="utf-8"), re.M):
            raise typer.BadParameter(
                f"{deploy_config} is a stage YAML; give it to --stage-config", param_hint="--deploy-config"
            )
        yield deploy_config
        return
    from vllm_omni_neuron.stage_config import StageConfigError, write_deploy_config

    with tempfile.TemporaryDirectory(prefix="vllm-omni-neuron-") as folder:
        try:
            deploy_file = write_deploy_config(stage_config, Path(folder) / f"{stage_config.stem}.deploy.yaml")
        except StageConfigError as error:
            fail(str(error), EXIT_USAGE)
        yield deploy_file


def _generate(request: GenerationRequest, output: Path, *, show: bool, verbose: bool, debug: bool) -> dict[str, Any]:
    """Run the engine, write the file, and say what happened."""
    log: Path | None = None
    try:
        with _engine_output(show, verbose) as (phase, log):
            result = engine.run_engine(request, phase)
            phase("writing the video")
            summary = _write(request, result, output)
    except KeyboardInterrupt:
        fail("interrupted", EXIT_INTERRUPTED)
    except Exception as error:  # the boundary to the user: whatever failed becomes a message and an exit code
        if debug:
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


def _write(request: GenerationRequest, result: GenerationResult, output: Path) -> dict[str, Any]:
    from vllm_omni_neuron.video import encode_mp4, fps_from_output, frames_from_output, read_video_info

    fps = fps_from_output(result.output, request.fps)
    output.write_bytes(encode_mp4(frames_from_output(result.output), fps))
    written = read_video_info(output)
    summary = summary_from_output(result.output)
    seconds = {**summary["seconds"], "start": result.start_seconds, "total": result.generate_seconds}
    return {
        "output": str(output),
        "model": request.model,
        "prompt": request.prompt,
        "width": written.width,
        "height": written.height,
        "num_frames": written.frames,
        "fps": written.fps,
        **summary,
        "seed": result.sampling.seed,
        "seconds": {name: None if value is None else round(value, 3) for name, value in seconds.items()},
    }


def _reason(error: BaseException) -> str:
    """The error's own message; vLLM-Omni's "Orchestrator initialization failed" gives way to the error it wraps."""
    if str(error).startswith(_START_FAILED) and error.__cause__ is not None:
        error = error.__cause__
    # Where the wrapper comes without its cause, it still ends in the cause's message.
    return str(error).strip().removeprefix(_START_FAILED).removeprefix(":").strip() or type(error).__name__
