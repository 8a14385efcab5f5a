# SPDX-License-Identifier: Apache-2.0
"""A plan: what can be said of a layout before it runs, its step time by a roofline, and how layouts rank.

The time is a lower bound by the figures of `hardware.TARGETS`: no efficiency of any kernel is assumed. Compute and HBM
overlap perfectly; a collective waits for what it sends and is waited for, except that a ring's rotation travels while
the block at hand is computed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from omni_neuron_parallel.planning.compute import SELF_ATTENTION, Work, hbm_bytes, plan_work
from omni_neuron_parallel.planning.hardware import Target
from omni_neuron_parallel.planning.layout import Case, Layout, Method, VideoShape, methods_of
from omni_neuron_parallel.planning.memory import Memory, plan_memory
from omni_neuron_parallel.planning.model import ModelSizes
from omni_neuron_parallel.planning.traffic import Traffic, plan_traffic
from omni_neuron_parallel.topology import divisors, valid_tensor_parallel_sizes


@dataclass(frozen=True)
class Transfer:
    """The time of one kind of collective in a step.

    Attributes:
        traffic: what is sent.
        seconds: on the wire.
        hidden: of them, behind compute.
    """

    traffic: Traffic
    seconds: float
    hidden: float = 0.0

    @property
    def exposed(self) -> float:
        """Seconds that the step waits."""
        return self.seconds - self.hidden


@dataclass(frozen=True)
class Plan:
    """What is known of a layout before it runs. All figures are of one denoising step with guidance, on one rank.

    Attributes:
        case: model, layout and video.
        target: the chip.
        memory: the memory table.
        work: FLOPs by part.
        hbm_bytes: read and written.
        compute_seconds: TensorE, or ScalarE where exponentials take longer, part by part.
        hbm_seconds: `hbm_bytes` / bandwidth.
        transfers: collectives with their times.
    """

    case: Case
    target: Target
    memory: Memory
    work: tuple[Work, ...]
    hbm_bytes: float
    compute_seconds: float
    hbm_seconds: float
    transfers: tuple[Transfer, ...]

    @property
    def exposed_seconds(self) -> float:
        """Wire time that the step waits for."""
        return sum(transfer.exposed for transfer in self.transfers)

    @property
    def hidden_seconds(self) -> float:
        """Wire time behind compute."""
        return sum(transfer.hidden for transfer in self.transfers)

    @property
    def step_seconds(self) -> float:
        """The roofline: max(compute, HBM) + exposed."""
        return max(self.compute_seconds, self.hbm_seconds) + self.exposed_seconds


def part_seconds(work: Work, target: Target) -> float:
    """The least time of one part: its matrix products, or its exponentials where those take longer."""
    return max(work.rank_flops / target.matmul_flops.value, work.rank_exponentials / target.exponentials.value)


def plan(case: Case, target: Target, devices: int | None = None) -> Plan:
    """Plan one layout.

    Args:
        case: model, layout and video.
        target: the chip.
        devices: logical cores there are; None for the target's own number.

    Raises:
        PlanError: the layout cannot run, or the model cannot make such a video.
    """
    case.shape.check(case.model)
    case.layout.check(case.model, int(target.devices.value) if devices is None else devices)
    work = plan_work(case)
    attention = next(part for part in work if part.name == SELF_ATTENTION)
    moved = hbm_bytes(case)
    return Plan(
        case=case,
        target=target,
        memory=plan_memory(case, int(target.hbm_bytes.value)),
        work=work,
        hbm_bytes=moved,
        compute_seconds=sum(part_seconds(part, target) for part in work),
        hbm_seconds=moved / target.hbm_bandwidth.value,
        transfers=tuple(
            _transfer(traffic, part_seconds(attention, target) / case.layout.cp, case, target)
            for traffic in plan_traffic(case)
        ),
    )


def _transfer(traffic: Traffic, step_block_seconds: float, case: Case, target: Target) -> Transfer:
    seconds = traffic.seconds(target)
    if traffic.collective != "rotate":
        return Transfer(traffic, seconds)
    # One block of keys is computed while the next is on its way: cp − 1 of the cp blocks of a layer hide a rotation.
    block = step_block_seconds * (case.layout.cp - 1)
    return Transfer(traffic, seconds, min(seconds, block))


@dataclass(frozen=True)
class Suggestion:
    """One layout and the best way to run it.

    Attributes:
        plan: the fastest of the choices of method and sequence parallelism that fit, else the fastest.
        others: the remaining choices, fastest first.
    """

    plan: Plan
    others: tuple[Plan, ...]


def suggest(
    model: ModelSizes,
    shape: VideoShape,
    target: Target,
    devices: int | None = None,
    *,
    vae_patch: int = 1,
    method: Method | None = None,
    sequence_parallel: bool | None = None,
) -> list[Suggestion]:
    """Every layout whose world divides the devices, by step time, the fastest first.

    Args:
        model: the model.
        shape: the video.
        target: the chip.
        devices: logical cores there are; None for the target's own number.
        vae_patch: ranks that decode; a world that it does not divide takes its largest divisor below.
        method: "gather" or "ring"; None tries those that the model can.
        sequence_parallel: on or off; None tries both.

    Raises:
        PlanError: the model cannot make such a video.
    """
    shape.check(model)
    cores = int(target.devices.value) if devices is None else devices
    suggestions = []
    for tp, cfg in itertools.product(valid_tensor_parallel_sizes(model.heads, cores), divisors(model.branches)):
        for cp in divisors(cores):
            world = tp * cp * cfg
            if cores % world:
                continue
            decoding = max(size for size in divisors(world) if size <= max(vae_patch, 1))
            layout = Layout(tp, cp, cfg, decoding)
            methods = methods_of(model) if method is None and cp > 1 else (method or "gather",)
            switches = (False, True) if sequence_parallel is None and tp > 1 else (bool(sequence_parallel) and tp > 1,)
            plans = [
                plan(Case(model, replace(layout, method=chosen, sequence_parallel=switch), shape), target, cores)
                for chosen, switch in itertools.product(methods, switches)
            ]
            plans.sort(key=lambda choice: (not choice.memory.fits, choice.step_seconds, choice.memory.peak))
            suggestions.append(Suggestion(plans[0], tuple(plans[1:])))
    return sorted(suggestions, key=lambda suggestion: suggestion.plan.step_seconds)
