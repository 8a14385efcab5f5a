# SPDX-License-Identifier: Apache-2.0
"""What is checked and arranged in the engine's process before a worker starts."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

import omni_neuron_runtime as runtime

logger = logging.getLogger(__name__)

# Each worker's queue to the engine touches a few MiB; a video goes through in one piece (81×720×1280×3 bytes are
# 224 MB in uint8 and four times that in float32), and AWS's documentation asks containers for 2 GiB.
SHM_MINIMUM_BYTES = 16 << 20
SHM_ADVISED_BYTES = 1 << 30


def parallel_layout(parallel_config: Any) -> str:
    """The parallel sizes above one, for messages: `tensor_parallel_size 2 × cfg_parallel_size 2`."""
    names = ("tensor_parallel_size", "sequence_parallel_size", "cfg_parallel_size")
    sizes = {name: getattr(parallel_config, name, 1) for name in names}
    return " × ".join(f"{name} {size}" for name, size in sizes.items() if size != 1) or "no parallelism"


def check_world_size(od_config: Any) -> None:
    """Compare the number of ranks with the cores that this process may use.

    Raises:
        ValueError: fewer cores than ranks, a list of visible cores of another length than the number of ranks, or
            ranks along an axis that has no place in the layout.
    """
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


def check_shared_memory(path: str = "/dev/shm") -> None:
    """Results and messages go through `/dev/shm`; writing past its end kills a process with SIGBUS.

    Raises:
        RuntimeError: it has less than 16 MiB left.
    """
    stats = os.statvfs(path)
    free, size = stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize
    text = f"{path} has {free / 2**20:.0f} MiB free of {size / 2**20:.0f} MiB"
    if free < SHM_MINIMUM_BYTES:
        raise RuntimeError(
            f"{text}, at least {SHM_MINIMUM_BYTES >> 20} MiB are needed for workers to exchange messages: "
            "remove stale files from it, or start the container with --shm-size=2g"
        )
    if free < SHM_ADVISED_BYTES:
        logger.warning(
            "%s: a large video may not fit on its way from the worker and would kill it with SIGBUS; "
            "start the container with --shm-size=2g",
            text,
        )


def threads_per_worker(world: int) -> int:
    """This process's cores divided among `world` workers, at least one each.

    With torch's default, all cores each, the workers' threads outnumber the cores; every collective then waits for
    the rank that was scheduled last.
    """
    return max(1, len(os.sched_getaffinity(0)) // world)


@contextlib.contextmanager
def worker_environment(world: int) -> Iterator[None]:
    """Processes started meanwhile get `threads_per_worker` as OMP_NUM_THREADS, unless the user has set it.

    Set in the environment and not by the worker: torch sizes its pool when it is imported.
    """
    if runtime.env.is_set("OMP_NUM_THREADS"):
        yield
        return
    os.environ["OMP_NUM_THREADS"] = str(threads_per_worker(world))
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
