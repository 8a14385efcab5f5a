# SPDX-License-Identifier: Apache-2.0
"""The options that travel with `torch.compile(…, options=…)`: the same on a device and on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from omni_neuron_runtime import env

Component = Literal["transformer", "text_encoder", "vae", "vae_encoder"]

_LEVEL = "--optimization-level"

# What the documented deployments of Wan2.2 pass to neuronx-cc. A decoder has far more instructions than a transformer
# of its size.
_VAE = ("--model-type=unet-inference", f"{_LEVEL}=1", "--internal-max-instruction-limit=15000000")
_BY_COMPONENT: dict[str, tuple[str, ...]] = {
    "transformer": ("--model-type=transformer", f"{_LEVEL}=1"),
    "text_encoder": ("--model-type=transformer", f"{_LEVEL}=2"),
    "vae": _VAE,
    "vae_encoder": _VAE,
}


def component_compiler_args(component: Component) -> list[str]:
    """The compiler's arguments for one kind of component; none of them has met a compiler here.

    Raises:
        ValueError: no such kind.
    """
    if component not in _BY_COMPONENT:
        raise ValueError(f"component = {component!r}: valid are {', '.join(_BY_COMPONENT)}")
    page = env.get("NEURON_SCRATCHPAD_PAGE_SIZE")  # what the Neuron runtime allocates; both have to be the same
    return [*_BY_COMPONENT[component], "--auto-cast=none", f"--hbm-scratchpad-page-size={page}"]


def compile_options(
    model_name: str, compiler_args: Sequence[str] = (), compiler_workdir: str | None = None
) -> dict[str, Any]:
    """The `options` of `torch.compile`, the same keys on every backend.

    The optimization level is always explicit: the native route takes 2 where none is given, the deprecated XLA route 1,
    and both should compile the same.

    Args:
        model_name: of the component; names graphs in messages and artifacts.
        compiler_args: arguments of neuronx-cc, each one string that starts with a dash. Lite passes them on; our
            backends record them and make them part of the artifact's key.
        compiler_workdir: where artifacts go; None for the backend's own place.

    Raises:
        ValueError: an argument that is not one, or two optimization levels.
    """
    arguments = [_normalised(argument) for argument in compiler_args]
    levels = [argument for argument in arguments if argument.startswith(f"{_LEVEL}=")]
    if len(levels) > 1:
        raise ValueError(f"compiler_args {list(compiler_args)} give several optimization levels; give one")
    if not levels:
        arguments.append(f"{_LEVEL}=2")
    options: dict[str, Any] = {"model_name": model_name, "compiler_args": arguments}
    if compiler_workdir is not None:
        options["compiler_workdir"] = compiler_workdir
    return options


def _normalised(argument: str) -> str:
    if not argument.startswith("-") or any(character.isspace() for character in argument):
        raise ValueError(f"compiler argument {argument!r}: valid is one option, such as --auto-cast=none or -O1")
    if argument in ("-O1", "-O2", "-O3"):
        return f"{_LEVEL}={argument[2:]}"
    if argument == _LEVEL or argument == "-O":
        raise ValueError(f"compiler argument {argument!r} lacks its value; write {_LEVEL}=2")
    return argument
