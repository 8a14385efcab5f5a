# SPDX-License-Identifier: Apache-2.0
"""Ops of kernel libraries in graphs: torch.compile sees one node for each call, and StableHLO one composite.

What such a node stands for is not traced: on a device its kernel runs. The op's torch reference says what the kernel
computes, and is what a composite is decomposed into where there is no kernel (`composites`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from omni_neuron_runtime import env, seam
from omni_neuron_runtime.routes import device_route, installed


@dataclass(frozen=True)
class KernelOp:
    """One op, called as `torch.ops.<namespace>.<name>`.

    Attributes:
        name: "namespace.name", of the node and of the composite.
        run: computes it, on whatever device its tensors are: the dispatcher of its library. Typed as
            `torch.library.custom_op` wants it; what it returns is contiguous and shares no memory.
        shapes: takes the same arguments and returns empty tensors like the results.
        reference: takes the same arguments and computes the results in plain torch, without collectives.
        version: of the kernel. Another version is another artifact, whatever the reference.
    """

    name: str
    run: Callable[..., Any]
    shapes: Callable[..., Any]
    reference: Callable[..., Any]
    version: Callable[[], str]


_ops: dict[str, KernelOp] = {}
_waiting: list[KernelOp] = []


def register_kernel_op(op: KernelOp) -> None:
    """Make an op known to torch and to the compile backends.

    On the native route with Lite it is torch's only once Lite registered its backend (`define_for_lite`): importing a
    kernel library must not start the device.

    Raises:
        ValueError: there is one of that name, or the name has no namespace.
    """
    _, _, name = op.name.partition(".")
    if not name or "." in name:
        raise ValueError(f"kernel op {op.name!r}: valid is namespace.name")
    if op.name in _ops:
        raise ValueError(f"kernel op {op.name!r} is registered already")
    _ops[op.name] = op
    if device_route() == "native" and installed("libtorch_neuronx_lite"):
        _waiting.append(op)
    else:
        _define(op)


def define_for_lite() -> None:
    """Give the ops that wait to Lite, which traces kernels through definitions of its own.

    Raises:
        NeuronPackageError: Lite has no such function.
    """
    while _waiting:
        seam.nki_op(_waiting[0].name.replace(".", "::"), _waiting[0].run)
        del _waiting[0]


def define_for_torch() -> None:
    """Give the ops that wait to torch, for the XLA route, which was chosen after they were registered."""
    while _waiting:
        _define(_waiting[0])
        del _waiting[0]


def _define(op: KernelOp) -> None:
    name = op.name.replace(".", "::")
    torch.library.custom_op(name, op.run, mutates_args=()).register_fake(op.shapes)


def kernel_op(name: str) -> KernelOp | None:
    """The op "namespace.name"; None for any other operation."""
    return _ops.get(name)


def reference_decompositions() -> dict[torch._ops.OperatorBase, Callable[..., Any]]:
    """For `aot_autograd`: each op's reference where VLLM_NEURON_DISABLE_NKI_KERNELS=1, so that no kernel is left."""
    if not env.get("VLLM_NEURON_DISABLE_NKI_KERNELS"):
        return {}
    return {_overload(name): op.reference for name, op in _ops.items()}


def _overload(name: str) -> torch._ops.OpOverload:
    namespace, _, op = name.partition(".")
    return getattr(getattr(torch.ops, namespace), op).default
