# SPDX-License-Identifier: Apache-2.0
"""Launching kernels: `jit`, `Kernel[lnc]`, `simulate`, `run_spmd`, and the threads of ranks × cores."""

from __future__ import annotations

import contextvars
import functools
import inspect
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from omni_neuron_nkisim.arguments import any_torch, export_result, import_argument, program_of, tensors_in
from omni_neuron_nkisim.configuration import Settings, current_settings
from omni_neuron_nkisim.context import Core, enter_core, running_core
from omni_neuron_nkisim.dtypes import DType
from omni_neuron_nkisim.errors import NkiValidationError
from omni_neuron_nkisim.layout import Dims, row_major
from omni_neuron_nkisim.memory import SHARED_HBM, Storage, fresh_bytes
from omni_neuron_nkisim.stats import RunStats, remember
from omni_neuron_nkisim.tensors import NkiTensor

Place = tuple[int, int]  # rank and core


class LaunchAbortedError(Exception):
    """Another core failed; only that core's error is reported."""


@dataclass
class _Meeting:
    """Cores that wait for each other."""

    label: str
    expected: frozenset[Place]
    arrived: dict[Place, Any] = field(default_factory=dict)
    done: bool = False


class Launch:
    """One launch: its cores, what they share, and where they meet.

    Attributes:
        ranks: of the world that the kernel sees.
        cores: those that run.
    """

    def __init__(self, name: str, launched: int, lnc: int, settings: Settings) -> None:
        self.name, self.lnc, self.settings = name, lnc, settings
        self.ranks = launched
        if settings.symmetric_ranks is not None:
            if settings.execute or launched != 1:
                raise NkiValidationError(
                    f"{name}: symmetric_ranks is {settings.symmetric_ranks}; it goes with execute=False and one entry "
                    f"of arguments (execute={settings.execute}, {launched} entries)"
                )
            self.ranks = settings.symmetric_ranks
        target = settings.resolved_target()
        settings.version()
        self.cores = {
            (rank, core): Core(self, rank, core, settings, target) for rank in range(launched) for core in range(lnc)
        }
        self._changed = threading.Condition()
        self._meetings: dict[object, _Meeting] = {}
        self._finished: set[Place] = set()
        self._waiting: dict[Place, str] = {}
        self._failed = False
        self._shared: dict[int, list[tuple[NkiTensor, str]]] = {rank: [] for rank in range(launched)}

    def allocate_shared(self, core: Core, shape: Dims, element: DType, name: str) -> NkiTensor:
        """The shared HBM tensor that is this core's next; the rank's other core gets the same one.

        Raises:
            NkiValidationError: the cores' allocations differ.
        """
        number = core.next_call("shared_hbm")
        with self._changed:
            tensors = self._shared[core.rank]
            if number == len(tensors):
                nbytes = int(np.prod(shape, dtype=np.int64)) * element.itemsize
                base = fresh_bytes(nbytes, element) if core.executes else None
                storage = Storage(SHARED_HBM, name, nbytes, nbytes, 0, base)
                if self.lnc == 2:
                    storage.share()
                tensors.append((NkiTensor(storage, element, shape, row_major(shape)), name))
            tensor, first_name = tensors[number]
        if (tensor.shape, tensor.dtype, first_name) != (shape, element.name, name):
            raise NkiValidationError(
                f"nl.ndarray: shared_hbm tensor {number} is {name} {element.name}{list(shape)} on core {core.core}, "
                f"{first_name} {tensor.dtype}{list(tensor.shape)} on the other; both allocate the same ones in order"
            )
        return tensor

    def meet(
        self,
        core: Core,
        key: object,
        expected: Iterable[Place],
        label: str,
        payload: Any,
        action: Callable[[dict[Place, Any]], None],
    ) -> None:
        """Wait until every expected core has come to `key`; the last one runs `action` while the others stand still.

        Raises:
            NkiValidationError: somebody ends without coming, is late, or comes with another call.
            LaunchAbortedError: another core failed.
        """
        me = (core.rank, core.core)
        deadline = time.monotonic() + self.settings.timeout_s
        with self._changed:
            meeting = self._meetings.setdefault(key, _Meeting(label, frozenset(expected)))
            if meeting.label != label:
                raise NkiValidationError(
                    f"{_names([me])} calls {label} where {_names(meeting.arrived)} called {meeting.label}"
                )
            meeting.arrived[me] = payload
            if len(meeting.arrived) == len(meeting.expected):
                action(meeting.arrived)
                meeting.done = True
                del self._meetings[key]
                for place in meeting.expected:
                    self._waiting.pop(place, None)
                self._changed.notify_all()
                return
            self._waiting[me] = label
            self._changed.notify_all()
            while not meeting.done:
                if self._failed:
                    raise LaunchAbortedError
                missing = meeting.expected - meeting.arrived.keys()
                gone = missing & self._finished
                if gone:
                    raise NkiValidationError(f"{_names([me])} waits in {label}, but {_names(gone)} ended without it")
                if len(self._waiting) + len(self._finished) == len(self.cores):
                    waits = "; ".join(f"{_names([place])} in {what}" for place, what in sorted(self._waiting.items()))
                    raise NkiValidationError(f"every core waits for another one: {waits}")
                self._changed.wait(max(0.0, deadline - time.monotonic()))
                if not meeting.done and not self._failed and time.monotonic() >= deadline:
                    raise NkiValidationError(
                        f"{_names([me])} waited {self.settings.timeout_s:g} s in {label} for {_names(missing)}"
                    )

    def run(self, function: Callable[..., Any], arguments: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
        """Run `function` on every core and return each rank's result, still as `NkiTensor`.

        Raises:
            Exception: that of the first failing core by rank and number.
        """
        results: dict[Place, Any] = {}
        errors: dict[Place, BaseException] = {}

        def body(place: Place) -> None:
            core = self.cores[place]
            args, kwargs = arguments[place[0]]
            enter_core(core)
            try:
                with np.errstate(all="ignore"):
                    results[place] = function(*args, **kwargs)
            except LaunchAbortedError:
                pass
            except BaseException as error:
                errors[place] = error
            finally:
                enter_core(None)
            with self._changed:
                self._finished.add(place)
                self._failed = self._failed or place in errors
                self._changed.notify_all()

        places = list(self.cores)
        if len(places) == 1:
            body(places[0])
        else:
            threads = [
                threading.Thread(
                    target=contextvars.copy_context().run, args=(body, place), name=f"nkisim {place}", daemon=True
                )
                for place in places
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        remember(RunStats(self.name, {place: core.stats for place, core in self.cores.items()}))
        if errors:
            place = min(errors)
            if len(places) > 1:
                errors[place].add_note(f"in {self.name} on {_names([place])}")
            raise errors[place]
        return [self._agreed(rank, results, given) for rank, given in enumerate(arguments)]

    def _agreed(self, rank: int, results: dict[Place, Any], arguments: Any) -> Any:
        """The rank's result after its cores' last writes are joined."""
        result = results[rank, 0]
        if self.lnc == 1:
            return result
        allocated = [self.cores[rank, core].next_call("shared_hbm") for core in range(2)]
        if allocated[0] != allocated[1]:
            raise NkiValidationError(
                f"{self.name}: core 0 allocated {allocated[0]} shared_hbm tensors, core 1 {allocated[1]}; both have to"
            )
        for tensor in (*tensors_in(list(arguments)), *(tensor for tensor, _ in self._shared[rank])):
            tensor.storage.synchronise(f"the end of {self.name}")
            tensor.storage.cores = None
        views = [
            [(id(t.storage), t.offset, t.shape, t.strides) for t in tensors_in(results[rank, core])]
            for core in range(2)
        ]
        if views[0] != views[1]:
            raise NkiValidationError(f"{self.name}: the two cores of rank {rank} return different tensors")
        return result


def _names(places: Iterable[Place]) -> str:
    return ", ".join(f"rank {rank} core {core}" for rank, core in sorted(places))


class Kernel:
    """A function that runs as a kernel: `kernel(…)` on one core per rank, `kernel[2](…)` on two.

    Called inside a running kernel it is an ordinary function call.
    """

    def __init__(self, function: Callable[..., Any], lnc: int = 1) -> None:
        self.function, self.lnc = function, lnc
        functools.update_wrapper(self, function)

    def __getitem__(self, lnc: int) -> Kernel:
        if lnc not in (1, 2) or isinstance(lnc, bool):
            raise NkiValidationError(f"{self.function.__name__}[{lnc!r}]: the grid is 1 or 2 cores")
        return Kernel(self.function, lnc)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Launch it on one rank; arguments and results as in `run_spmd`."""
        if running_core() is not None:
            return self.function(*args, **kwargs)
        return run_spmd(self, [(args, kwargs)], lnc=self.lnc)[0]


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`nki.jit`: a decorator or a call; `mode` is ignored, as since NKI 0.3.

    Raises:
        NkiValidationError: an option that NKI 0.3 to 0.6 does not have, such as `platform_target`.
    """
    unknown = set(options) - {"mode"}
    if unknown:
        raise NkiValidationError(
            f"nki.jit: unknown options {', '.join(sorted(unknown))}; the target is NEURON_PLATFORM_TARGET_OVERRIDE's"
        )
    return jit if function is None else function if isinstance(function, Kernel) else Kernel(function)


def simulate(kernel: Kernel | Callable[..., Any]) -> Kernel:
    """`nki.simulate(kernel)(…)` and `nki.simulate(kernel[2])(…)`: what a call does in this simulator anyway."""
    return jit(kernel)


def run_spmd(kernel: Kernel | Callable[..., Any], per_rank_args: Sequence[Any], lnc: int | None = None) -> list[Any]:
    """Run a kernel on several ranks at once, one thread per core.

    Args:
        kernel: a jitted kernel or a plain function.
        per_rank_args: for each rank `(args, kwargs)`, or a tuple of positional arguments. NumPy arrays and CPU torch
            tensors are used in place, so that what the kernel writes into them shows.
        lnc: cores per rank, 1 or 2; None takes the kernel's grid (`kernel[2]`), or 1.

    Returns:
        Each rank's result: NumPy arrays, torch tensors if an argument was one, `TensorSpec` where nothing is executed.

    Raises:
        NkiValidationError: the kernel broke a rule, or the ranks' arguments differ in more than data, so that the
            programs would. Other errors of the kernel are passed on; all cores are stopped.
    """
    target: Kernel = jit(kernel)
    if running_core() is not None:
        raise NkiValidationError(f"run_spmd({target.function.__name__}): called inside a kernel")
    if not per_rank_args:
        raise NkiValidationError(f"run_spmd({target.function.__name__}): per_rank_args is empty; one entry per rank")
    settings, name = current_settings(), target.function.__name__
    launch = Launch(name, len(per_rank_args), target[lnc or target.lnc].lnc, settings)
    imported: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    parameters = list(inspect.signature(target.function).parameters)
    for entry in per_rank_args:
        args, kwargs = _split(entry, name)
        labels = [parameters[n] if n < len(parameters) else f"args[{n}]" for n in range(len(args))]
        taken = (
            tuple(import_argument(v, label, settings.execute, name) for label, v in zip(labels, args, strict=True)),
            {key: import_argument(value, key, settings.execute, name) for key, value in kwargs.items()},
        )
        for tensor in tensors_in(list(taken)) if launch.lnc == 2 else ():
            tensor.storage.share()
        imported.append(taken)
    _check_one_program(name, parameters, imported)
    results = launch.run(target.function, imported)
    return [
        export_result(result, any_torch(list(_split(entry, name))), name)
        for result, entry in zip(results, per_rank_args, strict=True)
    ]


def _check_one_program(name: str, parameters: list[str], entries: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
    first: dict[str, Any] = {}
    for rank, (args, kwargs) in enumerate(entries):
        labels = [parameters[n] if n < len(parameters) else f"args[{n}]" for n in range(len(args))]
        given = {
            label: program_of(value) for label, value in ({**dict(zip(labels, args, strict=True)), **kwargs}).items()
        }
        first = first or given
        for label in sorted(given.keys() | first.keys()):
            if given.get(label) != first.get(label):
                raise NkiValidationError(
                    f"run_spmd({name}): {label} is {given.get(label)} on rank {rank} and {first.get(label)} on rank 0; "
                    "all ranks run one program, only the data of tensors may differ"
                )


def _split(entry: Any, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if (
        isinstance(entry, tuple)
        and len(entry) == 2
        and isinstance(entry[0], tuple | list)
        and isinstance(entry[1], dict)
    ):
        return tuple(entry[0]), entry[1]
    if isinstance(entry, tuple):
        return entry, {}
    raise NkiValidationError(
        f"run_spmd({name}): an entry of per_rank_args is {entry!r}; (args, kwargs) or a tuple of args"
    )
