# SPDX-License-Identifier: Apache-2.0
"""The environment variables that these packages read: one table, and the only place that reads them.

`docs/environment.md` is generated from the table (`python -m omni_neuron_runtime.env docs/environment.md`). A variable
is listed when some code of the repository reads it, or an environment profile sets it for Neuron's own software, and
only then; a test of the repository checks both directions.

An empty value counts as unset, except for a list of names (`VLLM_PLUGINS=""` allows nothing, as in vLLM).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from omni_neuron_runtime.core_ranges import SYNTAX, parse_core_ranges

Kind = Literal["bool", "int", "str", "cores", "names"]

_KIND_SYNTAX: dict[Kind, str] = {
    "bool": "0 or 1",
    "int": "a whole number",
    "str": "text",
    "cores": SYNTAX,
    "names": "names separated by commas",
}


class EnvironmentVariableError(ValueError):
    """A variable holds a value that it cannot hold; the message names variable, value and valid values."""


@dataclass(frozen=True)
class EnvVar:
    """One row of the table.

    Attributes:
        name: the variable.
        kind: `bool` (`0`/`1`), `int`, `str`, `cores` (a list of int from core ranges) or `names` (a list of str).
        default: the typed value where the variable is unset; None means that unset has a meaning of its own.
        meaning: what it does, for the reader of the generated page.
        choices: the values that a `str` may hold, or None for any.
        minimum: the least value that an `int` may hold, or None for any.
    """

    name: str
    kind: Kind
    default: bool | int | str | None
    meaning: str
    choices: tuple[str, ...] | None = None
    minimum: int | None = None

    @property
    def valid(self) -> str:
        """What the variable may hold, in words."""
        if self.choices is not None:
            return " or ".join(self.choices)
        return _KIND_SYNTAX[self.kind] + (f", at least {self.minimum}" if self.minimum is not None else "")

    def parse(self, text: str) -> Any:
        """The typed value of `text`.

        Raises:
            EnvironmentVariableError: `text` is not valid for this variable.
        """
        if self.kind == "names":
            return text.split(",")
        if self.kind == "cores":
            try:
                return parse_core_ranges(text)
            except ValueError as error:
                raise EnvironmentVariableError(f"{self.name}: {error}") from None
        if self.kind == "bool" and text in ("0", "1"):
            return text == "1"
        if self.kind == "int":
            try:
                number = int(text)
            except ValueError:
                number = None
            if number is not None and (self.minimum is None or number >= self.minimum):
                return number
        if self.kind == "str" and (self.choices is None or text in self.choices):
            return text
        raise EnvironmentVariableError(f"{self.name}={text!r} is not valid: it takes {self.valid}")


_ROWS = (
    EnvVar(
        "VLLM_NEURON_CPU_MODE",
        "bool",
        False,
        "Run on the CPU: the plugin is active without a Neuron device, ranks talk over gloo and nothing is compiled "
        "unless `VLLM_NEURON_BACKEND` asks for it. It wins over a device that is present.",
    ),
    EnvVar(
        "VLLM_NEURON_BACKEND",
        "str",
        None,
        "The compile backend. On a device: `neuron_native` (also `neuron`; what unset means) is the native backend of "
        "libtorch_neuronx_lite, `vllm_neuron` the deprecated XLA route of vllm_neuron. In CPU mode: "
        "`neuron_stablehlo` lowers to StableHLO and runs that, `neuron_check` checks the graphs and runs them in "
        "torch; unset, or a device's backend, compiles nothing. See docs/compilation.md.",
        choices=("neuron_native", "neuron", "vllm_neuron", "neuron_stablehlo", "neuron_check"),
    ),
    EnvVar(
        "VLLM_NEURON_LIBTORCH_NEURONX_LITE",
        "bool",
        True,
        "vllm_neuron's own variable: libtorch_neuronx_lite instead of torch-neuronx, which its native backend needs "
        "(documentation of AWS's plugin). On the native route this and `VLLM_NEURON_BACKEND=neuron_native` are written "
        "into the environment before one of Neuron's packages is imported; 0 is an error there.",
    ),
    EnvVar(
        "VLLM_NEURON_DISABLE_GRAPH_CAPTURE_BACKEND",
        "str",
        "1",
        "vllm_neuron's own variable: no separate backend that traces and compiles without running. AWS's documentation "
        "of its plugin requires 1, which the base profile gives to an engine's workers where it is unset.",
    ),
    EnvVar(
        "VLLM_NEURON_COMPILATION_TIMEOUT",
        "int",
        1800,
        "Seconds that the Neuron compiler may take for a graph (vllm_neuron's own variable, whose default is 600). "
        "The profile of Wan2.2 gives 1800 to an engine's workers where it is unset, as AWS's profile of it does.",
        minimum=1,
    ),
    EnvVar(
        "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION",
        "str",
        "1",
        "libtorch_neuronx_lite's own variable: 1 makes a graph that does not compile an error; otherwise it is run op "
        "by op, silently. The base profile gives 1 to an engine's workers where it is unset, as AWS's profile of "
        "Wan2.2 does; another value is named in a warning.",
    ),
    EnvVar(
        "TORCH_NEURONX_VOCAB_SHARDING_SPMD_DISABLE",
        "str",
        "1",
        "libtorch_neuronx_lite's own variable, which AWS's plugin sets to 1 before it imports that. The base profile "
        "gives 1 to an engine's workers where it is unset.",
    ),
    EnvVar(
        "NEURON_LOGICAL_NC_CONFIG",
        "int",
        2,
        "Physical NeuronCores in a logical one (the Neuron runtime's own variable). The kernels, the memory of a rank "
        "and the physical mesh are those of 2, AWS's plugin takes no other: on trn2 and trn3 another value is an error "
        "before a worker starts. The base profile gives 2 to an engine's workers where it is unset; inf2 and trn1 have "
        "no logical cores, set 1 there.",
        minimum=1,
    ),
    EnvVar(
        "NEURON_RT_DBG_CC_DMA_PACKET_SIZE",
        "int",
        2048,
        "Bytes of a DMA packet of a collective (the Neuron runtime's own variable). The profile of Wan2.2 gives 2048 "
        "to an engine's workers where it is unset, as AWS's profile of it does, which states no reason.",
        minimum=1,
    ),
    EnvVar(
        "NEURON_RT_DBG_INTRA_RDH_CHANNEL_BUFFER_SIZE",
        "int",
        167772160,
        "Bytes of a channel's buffer in collectives within a node (the Neuron runtime's own variable). The profile of "
        "Wan2.2 gives 167772160 to an engine's workers where it is unset, as AWS's profile of it does, which states no "
        "reason.",
        minimum=1,
    ),
    EnvVar(
        "OMNI_NEURON_COMPILE_CACHE_DIR",
        "str",
        None,
        "The folder of the artifact cache of `neuron_stablehlo`. Unset: `~/.cache/omni-neuron/compile`.",
    ),
    EnvVar(
        "OMNI_NEURON_COMPILE_CACHE_GB",
        "int",
        20,
        "GiB that the artifact cache may take; beyond, the modules that were used longest ago go.",
        minimum=1,
    ),
    EnvVar(
        "OMNI_NEURON_COMPILE_FAIL_ON_MISS",
        "bool",
        False,
        "A graph that is not in the artifact cache is an error instead of a compilation.",
    ),
    EnvVar(
        "OMNI_NEURON_COMPILE_MEMORY_GB",
        "int",
        12,
        "GiB of address space that the lowering of one graph may take, in its own process; beyond, it ends with an "
        "error that names the graph, instead of the machine running out of memory.",
        minimum=1,
    ),
    EnvVar(
        "OMNI_NEURON_COMPILE_TIMEOUT_S",
        "int",
        1800,
        "Seconds that the lowering of one graph may take, and that a rank waits for another one that compiles the "
        "same graph.",
        minimum=1,
    ),
    EnvVar(
        "TORCH_DEVICE_BACKEND_AUTOLOAD",
        "str",
        None,
        "Torch's own variable: whether `import torch` loads the device backends of other packages. It has to be 0 "
        "where torch-neuronx and libtorch-neuronx-lite are both installed, because both claim PrivateUse1; start-up "
        "and `doctor` say so where it is not.",
    ),
    EnvVar(
        "NEURON_PLATFORM_TARGET_OVERRIDE",
        "str",
        None,
        "The chip generation to compile and plan for, instead of the one that is detected. Needed where there is no "
        "device to ask.",
        choices=("inf2", "trn1", "trn2", "trn3"),
    ),
    EnvVar(
        "NEURON_VISIBLE_DEVICES",
        "cores",
        None,
        "The NeuronCores that this engine may use, for example `0-3,7`. Unset: `NEURON_RT_VISIBLE_CORES`, else all. In "
        "CPU mode only their number counts.",
    ),
    EnvVar(
        "NEURON_RT_VISIBLE_CORES",
        "cores",
        None,
        "The Neuron runtime's own list of cores, in the same syntax; read where `NEURON_VISIBLE_DEVICES` is unset. On "
        "a device every worker sets it to its own core before the runtime starts.",
    ),
    EnvVar(
        "NEURON_RT_ROOT_COMM_ID",
        "str",
        None,
        "The Neuron runtime's own: host and port where the ranks of an engine meet. Unset: the engine gives its "
        "workers `localhost` and a port above 61233 that is free and that no engine on other cores of the machine "
        "takes.",
    ),
    EnvVar(
        "NEURON_SCRATCHPAD_PAGE_SIZE",
        "int",
        2048,
        "MiB of a page of the device's scratchpad (the Neuron runtime's own variable). Graphs are compiled for it "
        "(`--hbm-scratchpad-page-size`), and an engine's workers get it where it is unset, unless the model's own "
        "profile says another value.",
        minimum=1,
    ),
    EnvVar(
        "OMNI_NEURON_CHECK_RANK_AGREEMENT",
        "bool",
        False,
        "After every denoising step all ranks compare digests of their latents, and a rank that differs stops the "
        "request with an error. Costs one small collective and one pass over the latents a step.",
    ),
    EnvVar(
        "OMNI_NEURON_COLLECTIVE_TIMEOUT_S",
        "int",
        600,
        "Seconds that a collective, or the start-up of a group, may take. Past it every rank of the group raises an "
        "error that names axis, ranks, operation and step. It has to be less than a request may take "
        "(`VLLM_OMNI_DLO_DP_WAVE_TIMEOUT`), else that ends the request first, and more than the slowest rank lags.",
        minimum=1,
    ),
    EnvVar(
        "OMNI_NEURON_STARTUP_TIMEOUT_S",
        "int",
        540,
        "Seconds that all worker processes of an engine together may take to become ready: import, device, groups and "
        "weights. Past it the engine stops with an error that names each late rank and what it was doing. A warm-up "
        "(`warmup_shapes`) does not count: each of its shapes may take `OMNI_NEURON_COMPILE_TIMEOUT_S` for each "
        "component. vLLM-Omni's own limit for the whole start, `init_timeout` (600 s), began earlier, counts all and "
        "names nobody: raise it as well for a warm-up that compiles, or where this one is raised.",
        minimum=1,
    ),
    EnvVar(
        "OMNI_NEURON_NKISIM",
        "bool",
        False,
        "Let the simulator `omni_neuron_nkisim`, once imported, stand in for `nki` where no real `nki` imports. Not "
        "for production: the simulator is slow. Read by that package itself, which does not need the runtime.",
    ),
    EnvVar(
        "VLLM_NEURON_DISABLE_NKI_KERNELS",
        "bool",
        False,
        "Run the ops of omni-neuron-kernels in torch instead of NKI kernels, on a device and in the simulator.",
    ),
    EnvVar(
        "OMP_NUM_THREADS",
        "str",
        None,
        "Threads of torch in every process (OpenMP's own variable). Unset: each worker process gets the cores divided "
        "by the number of workers.",
    ),
    EnvVar(
        "VLLM_OMNI_DLO_DP_WAVE_TIMEOUT",
        "str",
        None,
        "Seconds that a request may take (vLLM-Omni's own variable, which it reads as a number). Unset: 86400 here, "
        "where vLLM-Omni alone would take 600.",
    ),
    EnvVar(
        "VLLM_NEURON_SWITCH_CC",
        "bool",
        False,
        "The node's collectives go through a switch: ranks are laid out in order. Otherwise a trn2 takes the physical "
        "mesh of trn2.48xlarge for the layouts that lie on it.",
    ),
    EnvVar(
        "VLLM_PLUGINS",
        "names",
        None,
        "The entry points that may be used, by name, in every group (vLLM's own variable, same meaning). Unset: all of "
        "them. A model package that it drops is named in a warning.",
    ),
)

VARIABLES: Mapping[str, EnvVar] = MappingProxyType({row.name: row for row in _ROWS})


def get(name: str) -> Any:
    """The value of a variable of the table, typed by its kind; read anew from the environment at every call.

    Raises:
        EnvironmentVariableError: the value is not valid.
        KeyError: the table has no such variable.
    """
    row = _row(name)
    text = _text(row)
    return row.default if text is None else row.parse(text)


def is_set(name: str) -> bool:
    """Whether a variable of the table is set (KeyError: the table has no such variable)."""
    return _text(_row(name)) is not None


def _row(name: str) -> EnvVar:
    if name not in VARIABLES:
        near = difflib.get_close_matches(name, VARIABLES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise KeyError(f"{name} is not in the table of environment variables{hint}")
    return VARIABLES[name]


def _text(row: EnvVar) -> str | None:
    text = os.environ.get(row.name)
    return None if text == "" and row.kind != "names" else text
