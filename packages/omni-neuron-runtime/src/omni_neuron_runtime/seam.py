# SPDX-License-Identifier: Apache-2.0
"""The one module that touches Neuron's own packages: `vllm_neuron`, `libtorch_neuronx_lite` ("Lite") and `nki`.

They are not on the public index and are imported inside the functions that need them. Each name and signature used
here is one that was recorded from public copies and call sites; none of it ran on a device so far. Where a package or
one of the names is missing, the error is one line that says which.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from omni_neuron_runtime import env
from omni_neuron_runtime.compile.replica_groups import check_covers, register_partition
from omni_neuron_runtime.routes import device_route, export_route, installed

_DISTRIBUTIONS = {"vllm_neuron": "vllm-neuron", "libtorch_neuronx_lite": "libtorch-neuronx-lite", "nki": "nki"}

# What Lite's process groups are called, where `vllm_neuron` is not there to be asked: CPU tensors go over gloo.
_LITE_DIST_BACKEND = "cpu:gloo,neuron:neuron"


class NeuronPackageError(RuntimeError):
    """One of Neuron's own packages is missing, or lacks a name that is needed."""


def neuron_packages() -> dict[str, str | None]:
    """Version of each of Neuron's packages ("unknown" without metadata), None where it is not installed.

    Nothing is imported.
    """
    return {module: _version(module) for module in _DISTRIBUTIONS}


def register_lite_backend() -> str:
    """Let Lite register its native `torch.compile` backend (idempotent); the backend's name.

    Raises:
        NeuronPackageError: Lite is not installed or does not import.
    """
    return str(_attribute("libtorch_neuronx_lite.compile.native_backend", "register")())


def nki_op(name: str, function: Callable[..., Any]) -> None:
    """Let Lite define the torch op `name` ("namespace::name") by a typed function that calls NKI kernels.

    Raises:
        NeuronPackageError: Lite is not installed or does not import.
    """
    _attribute("libtorch_neuronx_lite._compiler", "nki_op")(name, function, mutates_args=())


def vllm_neuron_backend() -> str:
    """The backend that `vllm_neuron.envs.get_compile_backend_name()` names.

    Raises:
        NeuronPackageError: vllm_neuron is not installed or does not import.
    """
    return str(_attribute("vllm_neuron.envs", "get_compile_backend_name")())


def autoload_problem() -> str | None:
    """What is wrong with torch's autoloading of device backends, and the fix; None where nothing is.

    torch-neuronx and Lite both claim PrivateUse1. With both installed, torch's autoloading takes the first, and Lite
    then fails with a message about backend fallbacks for PrivateUse1 that names neither.
    """
    both = installed("libtorch_neuronx_lite") and installed("torch_neuronx")
    if not both or env.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        return None
    return (
        "torch-neuronx is installed beside libtorch-neuronx-lite and TORCH_DEVICE_BACKEND_AUTOLOAD is not 0: `import "
        "torch` loads torch-neuronx, which takes the device type (PrivateUse1) that libtorch-neuronx-lite needs. Set "
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0 in the environment before the process starts, or uninstall torch-neuronx"
    )


def get_dist_backend() -> str:
    """Backend of `torch.distributed` on the route that graphs take: gloo in CPU mode, else what `vllm_neuron` says.

    Raises:
        NeuronPackageError: the route's package is not installed, or vllm_neuron names no backend for device tensors.
    """
    route = device_route()
    if route == "cpu":
        return "gloo"
    if route == "native":
        _require("libtorch_neuronx_lite")
        if not installed("vllm_neuron"):
            return _LITE_DIST_BACKEND
    backend = str(_attribute("vllm_neuron.envs", "get_dist_backend")())
    if route == "native" and "neuron" not in backend:
        raise NeuronPackageError(
            f"vllm_neuron {_version('vllm_neuron')} names the distributed backend {backend!r} for the native route, "
            f"which has no collectives of device tensors: an incompatible version, or it was imported before "
            f"VLLM_NEURON_BACKEND was neuron_native"
        )
    return backend


def device_count() -> int:
    """NeuronCores that Lite sees (NeuronPackageError without Lite)."""
    return int(_attribute("libtorch_neuronx_lite._compiler", "device_count")())


def platform_target() -> str:
    """Chip generation that Lite detects, such as "trn2".

    Raises:
        NeuronPackageError: Lite is not there, or cannot tell; NEURON_PLATFORM_TARGET_OVERRIDE says it instead.
    """
    try:
        return str(_attribute("libtorch_neuronx_lite.compile.platform", "get_platform_target")())
    except RuntimeError as error:
        valid = env.VARIABLES["NEURON_PLATFORM_TARGET_OVERRIDE"].valid
        raise NeuronPackageError(f"{error}; NEURON_PLATFORM_TARGET_OVERRIDE can name the chip: {valid}") from error


def hbm_gigabytes() -> dict[str, int]:
    """Lite's own table: GiB of device memory for each platform target; empty without Lite."""
    if not installed("libtorch_neuronx_lite"):
        return {}
    return dict(_attribute("libtorch_neuronx_lite.compile.platform", "HBM_MEMORY_GB"))


def initialize_device_runtime(core: int, device_count: int) -> None:
    """Bind this process to one NeuronCore and register the device with torch. Not for CPU mode.

    Sets NEURON_RT_VISIBLE_CORES, tells vLLM's Neuron platform how many devices there are where vllm_neuron is
    installed, and imports Lite, which registers the device. NEURON_RT_ROOT_COMM_ID stays as the caller set it: without
    it Lite picks a free port that a second engine may pick too, and both hang.

    Args:
        core: the physical core number, one of `visible_cores()`.
        device_count: cores of this engine.

    Raises:
        NeuronPackageError: Lite is not installed or does not import, or torch-neuronx has its place
            (`autoload_problem`).
    """
    if env.get("VLLM_NEURON_CPU_MODE"):
        raise NeuronPackageError("VLLM_NEURON_CPU_MODE=1: there is no device runtime to initialise in CPU mode")
    _require("libtorch_neuronx_lite")
    _check_autoload()
    os.environ["NEURON_RT_VISIBLE_CORES"] = str(core)
    if installed("vllm_neuron"):
        _attribute("vllm_neuron.vllm.platform", "NeuronPlatform").set_device_count(device_count)
    _import("libtorch_neuronx_lite")


def synchronize() -> None:
    """Wait for queued device work, where `torch.neuron` can.

    Neither the module nor such a function of it is recorded: AWS's own platform waits for nothing.
    """
    import torch

    wait = getattr(getattr(torch, "neuron", None), "synchronize", None)
    if wait is not None:
        wait()


def register_process_group_replica_groups(group_name: str, groups: Sequence[Sequence[int]]) -> None:
    """Tell the compiler the replica groups of a process group, before the first collective over it is traced.

    Without this a traced collective knows its own group only, and the compiler refuses it. The backends of this package
    always learn the groups; Lite does outside CPU mode, where it is installed.

    Args:
        group_name: `process_group.group_name`.
        groups: every group of the axis, over all ranks: together they hold each rank of the world exactly once.

    Raises:
        ValueError: the groups do not partition the world.
        NeuronPackageError: Lite is installed but has no such registry.
    """
    register_partition(group_name, check_covers(group_name, groups))
    if env.get("VLLM_NEURON_CPU_MODE") or not installed("libtorch_neuronx_lite"):
        return
    registry = _attribute("libtorch_neuronx_lite._compiler.distributed.mesh_registry", "_MESH_REGISTRY")
    registry[group_name] = [list(group) for group in groups]


def _version(module: str) -> str | None:
    if not installed(module):
        return None
    try:
        return metadata.version(_DISTRIBUTIONS[module])
    except metadata.PackageNotFoundError:
        return "unknown"


def _require(module: str) -> None:
    if not installed(module):
        raise NeuronPackageError(
            f"{module} is not installed ({_DISTRIBUTIONS[module]} of the AWS Neuron SDK); VLLM_NEURON_CPU_MODE=1 runs "
            f"without it"
        )


def _check_autoload() -> None:
    problem = autoload_problem()
    if problem is not None:
        raise NeuronPackageError(problem)


def _import(module: str) -> Any:
    package = module.partition(".")[0]
    _require(package)
    if package == "libtorch_neuronx_lite" or device_route() == "native":  # vllm_neuron may import Lite there
        _check_autoload()
    export_route()
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise NeuronPackageError(
            f"{package} {_version(package)} is installed but {module} does not import ({error}): a placeholder or an "
            f"incompatible version"
        ) from error
    # Lite registers a device with torch while it is imported, and whatever that raises names no package.
    except Exception as error:
        raise NeuronPackageError(
            f"{package} {_version(package)} failed while {module} was imported: {type(error).__name__}: {error}"
        ) from error


def _attribute(module: str, name: str) -> Any:
    loaded = _import(module)
    if not hasattr(loaded, name):
        package = module.partition(".")[0]
        raise NeuronPackageError(f"{package} {_version(package)} has no {module}.{name}: an incompatible version")
    return getattr(loaded, name)
