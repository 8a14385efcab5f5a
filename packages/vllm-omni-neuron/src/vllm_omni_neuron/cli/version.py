# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-neuron version`."""

from __future__ import annotations

import typer

from vllm_omni_neuron.__about__ import __version__


def version() -> None:
    """Print the version of this package."""
    typer.echo(__version__)
