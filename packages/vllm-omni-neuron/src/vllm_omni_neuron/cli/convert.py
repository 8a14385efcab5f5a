# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-neuron convert-stage-config`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import EXIT_USAGE, err, fail


def convert_stage_config(
    stage_config: Annotated[Path, typer.Argument(metavar="OLD.yaml", help="A stage YAML (with `stage_args`).")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="NEW.yaml", help="Write here, not to stdout.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite NEW.yaml where it exists.")] = False,
) -> None:
    """Turn a stage YAML into the deploy configuration that vLLM-Omni 0.30 reads (--deploy-config)."""
    from vllm_omni_neuron.stage_config import StageConfigError, deploy_yaml

    try:
        text = deploy_yaml(stage_config)
    except StageConfigError as error:
        fail(str(error), EXIT_USAGE)
    if output is None:
        typer.echo(text, nl=False)
        return
    if output.exists() and not force:
        fail(f"{output} exists; --force overwrites it", EXIT_USAGE)
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"{output} cannot be written: {error.strerror or error}", EXIT_USAGE)
    err().print(f"wrote {output}; use it with --deploy-config {output}", markup=False)
