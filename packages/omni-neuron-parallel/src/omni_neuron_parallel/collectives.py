# SPDX-License-Identifier: Apache-2.0
"""What a collective says when it fails, and the ring's permutation as one operation that can be traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import torch
from torch._C._distributed_c10d import _resolve_process_group

_steps: ContextVar[tuple[str, ...]] = ContextVar("collective_steps", default=())


class CollectiveError(RuntimeError):
    """A collective failed or passed its deadline; the message names axis, ranks, this rank, operation and step."""


@contextlib.contextmanager
def collective_step(label: str) -> Iterator[None]:
    """Name what runs meanwhile, such as "denoising step 3 of 20", in the errors of its collectives; nests.

    For eager code around a compiled model, not for code that is compiled.
    """
    token = _steps.set((*_steps.get(), label))
    try:
        yield
    finally:
        _steps.reset(token)


def collective_errors(
    axis: str, ranks: Sequence[int], rank: int, operation: str
) -> contextlib.AbstractContextManager[None]:
    """Turn torch's errors of the collective inside into `CollectiveError`; nothing is wrapped while compiling.

    Args:
        axis: the group's name.
        ranks: the group's global ranks.
        rank: this process's global rank.
        operation: what the group does.
    """
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()
    return _translated(axis, ranks, rank, operation)


@contextlib.contextmanager
def _translated(axis: str, ranks: Sequence[int], rank: int, operation: str) -> Iterator[None]:
    try:
        yield
    except CollectiveError:
        raise
    except RuntimeError as error:  # torch's errors of process groups are this or a subclass
        steps = _steps.get()
        step = f" in {', '.join(steps)}" if steps else ""
        raise CollectiveError(
            f"{operation} of the {axis} group {list(ranks)} failed on rank {rank}{step}: {str(error).splitlines()[0]} "
            f"(where a rank of the group died, its own error or the system's log says why; where one is slow, the "
            f"deadline is OMNI_NEURON_COLLECTIVE_TIMEOUT_S)"
        ) from error


torch.library.define("omni_neuron::collective_permute", "(Tensor input, int[] targets, str group_name) -> Tensor")


@torch.library.impl("omni_neuron::collective_permute", "CPU")
def _collective_permute_on_host(input: torch.Tensor, targets: Sequence[int], group_name: str) -> torch.Tensor:  # noqa: A002
    # Gloo has no permutation, but an all-to-all in which every rank sends all it has to one other is the same.
    place = _resolve_process_group(group_name).rank()  # type: ignore[arg-type]
    sent, received = [0] * len(targets), [0] * len(targets)
    sent[targets[place]] = received[targets.index(place)] = input.shape[0]
    return torch.ops._c10d_functional.all_to_all_single(input, received, sent, group_name)


@torch.library.register_fake("omni_neuron::collective_permute")
def _fake_collective_permute(input: torch.Tensor, targets: Sequence[int], group_name: str) -> torch.Tensor:  # noqa: A002
    return torch.empty_like(input)


def collective_permute(tensor: torch.Tensor, targets: Sequence[int], group_name: str) -> torch.Tensor:
    """Start to send `tensor` to another rank and to receive one of the same shape: one asynchronous collective.

    It is the operation `omni_neuron::collective_permute`, one node in a traced graph, which a compile backend lowers to
    a collective-permute: every rank is given all the pairs, and the graph is the same on every rank.

    Args:
        tensor: contiguous, of at least one dim; not to be written to before the result is waited for.
        targets: for each place in the process group the place that it sends to; a permutation. Places are c10d's
            (ascending ranks) for host tensors, those of the registered replica groups for device tensors.
        group_name: of the process group.

    Returns:
        The tensor to come; `torch.ops._c10d_functional.wait_tensor` makes it valid.
    """
    return torch.ops.omni_neuron.collective_permute(tensor, list(targets), group_name)
