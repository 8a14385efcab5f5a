# SPDX-License-Identifier: Apache-2.0
"""The command line `vllm-omni-neuron`: one module a command.

Importing it imports neither vLLM nor torch: `--help` is fast, and `doctor` can report what is broken.
"""

from __future__ import annotations

import typer

from . import options
from .cache import cache
from .compare import compare
from .convert import convert_stage_config
from .doctor import doctor
from .engine import GenerateOptions
from .generate import generate
from .judge import judge
from .lower import lower
from .models import models
from .new_model import new_model
from .plan import plan
from .progress import engine_streams
from .run import Reporting, generate_videos
from .version import version

app = typer.Typer(
    name="vllm-omni-neuron",
    help="Run diffusion models of vLLM-Omni on AWS Neuron, or on a CPU with VLLM_NEURON_CPU_MODE=1.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(generate)
app.command()(judge)
app.command()(compare)
app.command()(doctor)
app.command()(models)
app.command()(plan)
app.command()(lower)
app.command()(new_model)
app.command()(convert_stage_config)
app.command()(version)
app.add_typer(cache, name="cache")


def main() -> None:
    """Entry point of the console script."""
    app()


# Beside the command line itself, what a script with options of its own builds on: see examples.
__all__ = ["GenerateOptions", "Reporting", "app", "engine_streams", "generate_videos", "main", "options"]
