# SPDX-License-Identifier: Apache-2.0
"""What is checked and arranged in the engine's process before a worker starts."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from typing import Any

import omni_neuron_runtime as runtime
from vllm_omni_neuron import environment, shared_memory

logger = logging.getLogger(__name__)

# Above the ports that Linux gives out by itself (32768 to 60999), so that nobody has one of them by chance. An engine
# counts from the number of its first core: engines of one machine have other cores, and so other ports.
FIRST_ROOT_PORT = 61234
ROOT_PORT_STEP = 256  # more than a machine has cores


def parallel_layout(parallel_config: Any) -> str:
    """The parallel sizes above one, for messages: `tensor_parallel_size 2 × cfg_parallel_size 2`."""
    names = ("tensor_parallel_size", "sequence_parallel_size", "cfg_parallel_size")
    sizes = {name: getattr(parallel_config, name, 1) for name in names}
    return " × ".join(f"{name} {size}" for name, size in sizes.items() if size != 1) or "no parallelism"


def check_world_size(od_config: Any) -> None:
    """Compare the number of ranks with the cores that this process may use.

    Raises:
        ValueError: fewer cores than ranks, a list of visible cores of another length than the number of ranks, ranks
            along an axis that has no place in the layout, or logical cores of a size that is not supported.
    """
    runtime.check_logical_cores()
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        size = getattr(od_config.parallel_config, name, 1)
        if size != 1:
            raise ValueError(f"{name} {size} is not supported on Neuron: ranks are laid out over TP × CP × CFG; use 1")
    world = od_config.num_gpus
    layout = parallel_layout(od_config.parallel_config)
    visible = runtime.visible_cores()
    if visible is not None and len(visible) != world:
        listed = ",".join(str(core) for core in visible)
        raise ValueError(
            f"world size {world} ({layout}) does not match the {len(visible)} visible device(s) {listed}; "
            f"list {world} in NEURON_VISIBLE_DEVICES or choose parallel sizes whose product is {len(visible)}"
        )
    count = runtime.device_count()
    if world > count:
        raise ValueError(
            f"world size {world} ({layout}) needs {world} devices, this machine has {count}; "
            f"choose parallel sizes whose product is at most {count}"
        )


def check_shared_memory() -> None:
    """Results and messages go through `/dev/shm`; writing past its end kills a process with SIGBUS.

    Raises:
        RuntimeError: it has less than 16 MiB left.
    """
    space = shared_memory.space()
    if space.too_small:
        raise RuntimeError(space.too_small)
    if space.tight:
        logger.warning("%s", space.tight)


def threads_per_worker(world: int) -> int:
    """This process's cores divided among `world` workers, at least one each.

    With torch's default, all cores each, the workers' threads outnumber the cores; every collective then waits for
    the rank that was scheduled last.
    """
    return max(1, len(os.sched_getaffinity(0)) // world)


def worker_environment(world: int) -> contextlib.AbstractContextManager[None]:
    """Processes started meanwhile get `threads_per_worker` as OMP_NUM_THREADS, unless the user has set it."""
    if runtime.env.is_set("OMP_NUM_THREADS"):
        return contextlib.nullcontext()
    return runtime.openmp_threads(threads_per_worker(world))


def root_communicator(world: int) -> contextlib.AbstractContextManager[Any]:
    """Processes started meanwhile have NEURON_RT_ROOT_COMM_ID, where the ranks of a device's runtime meet.

    Without it libtorch-neuronx-lite takes a free port and lets go of it before it is used; a second engine that starts
    then may be given the same one, and the ranks of both hang. It is not kept bound here, as `rendezvous_port` does:
    whether the runtime could then still listen on it is not known.

    Raises:
        RuntimeError: no port is free.
    """
    if world == 1 or runtime.is_cpu_mode() or runtime.env.is_set("NEURON_RT_ROOT_COMM_ID"):
        return contextlib.nullcontext()
    port = _root_port(min(runtime.visible_cores() or [0]))
    return runtime.environment_defaults({"NEURON_RT_ROOT_COMM_ID": f"localhost:{port}"})


def _root_port(core: int) -> int:
    ports = range(FIRST_ROOT_PORT + core, 1 << 16, ROOT_PORT_STEP)
    for port in ports:
        try:
            # Without SO_REUSEADDR, which the runtime's own socket may not have.
            with socket.socket() as probe:
                probe.bind(("", port))
                return port
        except OSError as error:
            logger.info("port %d of the Neuron runtime's communicator: %s", port, error)
    raise RuntimeError(
        f"the Neuron runtime's communicator finds no free port: {', '.join(map(str, ports))} are taken; "
        "set NEURON_RT_ROOT_COMM_ID=localhost:<a free port>"
    )


@contextlib.contextmanager
def model_environment(od_config: Any) -> Iterator[None]:
    """Processes started meanwhile have the variables of the model's profile; what the user has set stays, and is said.

    Raises:
        SpecError: the model's spec cannot be had.
        ProfileError: its profile is not valid.
    """
    profile = environment.profile_of(od_config.model_class_name)
    for conflict in profile.conflicts:
        logger.info("environment of %s: %s", od_config.model_class_name, conflict)
    with runtime.environment_defaults(profile.variables) as kept:
        for name, value in kept.items():
            if value != profile.variables[name]:
                logger.warning(
                    "%s=%r is set and stays; the profile of %s (%s) has %r",
                    name,
                    value,
                    od_config.model_class_name,
                    profile.sources[name],
                    profile.variables[name],
                )
        yield
