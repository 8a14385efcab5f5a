# SPDX-License-Identifier: Apache-2.0
"""StableHLO on the CPU: the only module that touches jaxlib, through its internal API (hence the exact pin).

Two clients, each made when it is first needed: one of this process alone, for modules without collectives, and one that
spans the processes of the world, one device each, whose collectives go over gloo as torch's do.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import dlpack

from omni_neuron_runtime.compile.errors import CompileError

# bfloat16 is rounded after every operation, as torch does, instead of wherever it suits the compiler.
_XLA_OPTIONS = (("xla_allow_excess_precision", False),)
_ADDRESS_KEY = "omni_neuron/pjrt_address"
_START_SECONDS = 120
# A heartbeat that is missed aborts every process. A rank that dies is seen by whoever started it and ends the others;
# one that is slow, on a busy machine, is not dead.
_HEARTBEAT_SECONDS = 24 * 3600
_ALIGNMENT = 64

Executable = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


def check_installed(name: str) -> None:
    """Raise `CompileError` about the graph `name` where jaxlib is not installed."""
    try:
        _jaxlib()
    except ImportError as error:
        raise CompileError(
            f"{name}: neuron_stablehlo needs jax and jaxlib, which do not import ({error}); uv pip install "
            f"'omni-neuron-runtime[stablehlo]', or take neuron_check, which needs torch only"
        ) from error


def prepare(spans_world: bool) -> None:
    """Make the client, together with the other ranks where it spans the world: not while any of them waits for a lock.

    Raises:
        CompileError: the other ranks did not come.
    """
    _client(spans_world)


def fingerprint(spans_world: bool) -> str:
    """Hex digits that name the kind of host, compiler and world that an executable is made for."""
    processor = Path("/proc/cpuinfo")
    flags = ""
    if processor.exists():
        wanted = ("model name", "flags", "Features")
        flags = "\n".join(sorted({line for line in processor.read_text().splitlines() if line.startswith(wanted)}))
    facts = [metadata.version("jaxlib"), platform.machine(), flags, repr(_XLA_OPTIONS), str(_world(spans_world))]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def compile_module(text: str, name: str, spans_world: bool) -> bytes:
    """Compile StableHLO for this host, and serialise the result.

    Args:
        text: the module.
        name: for messages.
        spans_world: it has collectives, so that it runs on every rank of `torch.distributed` at once.

    Raises:
        CompileError: XLA refuses it.
    """
    client, devices = _client(spans_world)
    try:
        return client.compile_and_load(text, _device_list(devices), _options(devices)).serialize()
    except _error_type() as error:
        raise CompileError(f"{name}: XLA cannot compile the StableHLO: {error}") from error


def load_executable(serialized: bytes, spans_world: bool) -> Executable:
    """An executable of `compile_module`, from this process or another one of the same fingerprint.

    Returns:
        A function of the module's inputs, contiguous or not, to its outputs.
    """
    _, jax_internal = _jaxlib()
    client, devices = _client(spans_world)
    loaded = client.deserialize_executable(serialized, _device_list(devices), _options(devices))
    [device] = client.local_devices()

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        arrays = [
            jax_internal.dlpack_managed_tensor_to_buffer(_importable(tensor).__dlpack__(), device, None)
            for tensor in inputs
        ]
        results = loaded.execute_sharded(arrays).disassemble_into_single_device_arrays()
        return [dlpack.from_dlpack(result) for [result] in results]

    return run


def execute_on_all_ranks(
    text: str, inputs: Sequence[Sequence[torch.Tensor]], name: str = "module"
) -> list[list[torch.Tensor]]:
    """Compile a module and execute it once for all ranks of its world, in this process, a virtual device each.

    For tests: no rank needs a process. The module is one of `lower_on_paper`, which is the same for every rank.

    Args:
        text: StableHLO; its replica groups hold the ranks 0, 1, … world size − 1.
        inputs: of each rank, weights included, in the order of the module's arguments.
        name: for messages.

    Returns:
        The outputs of each rank.

    Raises:
        CompileError: jaxlib is not installed, or XLA refuses the module.
    """
    check_installed(name)
    import jax
    import numpy
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    xla_client, jax_internal = _jaxlib()
    client = xla_client.make_cpu_client(asynchronous=False, num_devices=len(inputs))
    devices = sorted(client.local_devices(), key=lambda device: device.id)
    try:
        loaded = client.compile_and_load(text, _device_list(devices), _options(devices))
    except _error_type() as error:
        raise CompileError(f"{name}: XLA cannot compile the StableHLO for {len(inputs)} ranks: {error}") from error
    # Arrays of the shape that each rank sees, and to jax equal on all devices; it does not look whether they are.
    everywhere = NamedSharding(Mesh(numpy.array(devices), ("rank",)), PartitionSpec())
    arguments = []
    for tensors in zip(*inputs, strict=True):
        shards = [
            jax_internal.dlpack_managed_tensor_to_buffer(_importable(tensor).__dlpack__(), device, None)
            for tensor, device in zip(tensors, devices, strict=True)
        ]
        shape = tuple(tensors[0].shape)
        arguments.append(jax.make_array_from_single_device_arrays(shape, everywhere, shards))
    results = loaded.execute_sharded(arguments).disassemble_into_single_device_arrays()
    return [[dlpack.from_dlpack(rank) for rank in ranks] for ranks in zip(*results, strict=True)]


def _importable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as XLA can read it in place: dense, and aligned; a copy where it is not."""
    dense = tensor.detach().contiguous()
    return dense if dense.data_ptr() % _ALIGNMENT == 0 else dense.clone()


def _world(spans_world: bool) -> int:
    return dist.get_world_size() if spans_world and dist.is_initialized() else 1


def _client(spans_world: bool) -> tuple[Any, list[Any]]:
    """A client and the devices that a module runs on, in the order of ranks."""
    if _world(spans_world) == 1:
        client = _local_client()
        return client, client.local_devices()
    client = _world_client()
    return client, sorted(client.devices(), key=lambda device: device.process_index)


@functools.cache
def _local_client() -> Any:
    xla_client, _ = _jaxlib()
    return xla_client.make_cpu_client(asynchronous=False)


@functools.cache
def _world_client() -> Any:
    """Made by all ranks together; rank 0 holds the meeting point, whose address goes through torch's store."""
    xla_client, internal = _jaxlib()
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    # A world that was destroyed and made anew in the same processes has a store of its own.
    if rank == 0:
        address = f"127.0.0.1:{_free_port()}"
        _Held.service = internal.get_distributed_runtime_service(
            address, world, heartbeat_timeout=_HEARTBEAT_SECONDS, shutdown_timeout=1
        )
        store.set(_ADDRESS_KEY, address)
    with _deadline_names("the address of rank 0 for the compiled collectives"):
        store.wait([_ADDRESS_KEY], timedelta(seconds=_START_SECONDS))
    address = store.get(_ADDRESS_KEY).decode()
    # No shutdown barrier at exit: a rank that ends, well or badly, must not make the others wait.
    client = internal.get_distributed_runtime_client(
        address,
        rank,
        init_timeout=_START_SECONDS,
        shutdown_timeout=1,
        heartbeat_timeout=_HEARTBEAT_SECONDS,
        shutdown_on_destruction=False,
    )
    with _deadline_names("the other ranks' compiled collectives"):
        client.connect()
    _Held.client = client
    return xla_client.make_cpu_client(
        asynchronous=False,
        distributed_client=client,
        node_id=rank,
        num_nodes=world,
        collectives=internal.make_gloo_tcp_collectives(client, hostname="127.0.0.1"),
        get_local_topology_timeout_minutes=2,
        get_global_topology_timeout_minutes=2,
    )


class _Held:
    """What has to live as long as the process: destroying it ends the other ranks' collectives."""

    service: Any = None
    client: Any = None


@contextlib.contextmanager
def _deadline_names(what: str) -> Iterator[None]:
    started = time.monotonic()
    try:
        yield
    except Exception as error:  # torch's store and jaxlib raise types of their own
        waited = time.monotonic() - started
        raise CompileError(
            f"rank {dist.get_rank()} waited {waited:.0f} s for {what}; every rank compiles and runs the same graphs in "
            f"the same order: {str(error).splitlines()[0]}"
        ) from error


def _options(devices: list[Any]) -> Any:
    import numpy

    xla_client, _ = _jaxlib()
    options = xla_client.CompileOptions()
    options.num_replicas = len(devices)
    options.device_assignment = xla_client.DeviceAssignment.create(numpy.array([[device.id] for device in devices]))
    options.env_option_overrides = list(_XLA_OPTIONS)
    return options


def _device_list(devices: list[Any]) -> Any:
    xla_client, _ = _jaxlib()
    return xla_client.DeviceList(tuple(devices))


def _error_type() -> type[Exception]:
    _, internal = _jaxlib()
    return internal.JaxRuntimeError


def _jaxlib() -> tuple[Any, Any]:
    # XLA's informational lines would go to every worker's stderr.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    import jax  # noqa: F401 - jaxlib's arrays need it registered
    from jaxlib import _jax, xla_client

    return xla_client, _jax


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
