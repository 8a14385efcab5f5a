# SPDX-License-Identifier: Apache-2.0
"""The loop that every stage shares: learning-rate schedule, averaged weights, log, and exact resumption.

Nothing random is carried from step to step: whatever a step draws comes from `generators(seed, stage, step)`. A run
that is stopped and started again therefore takes the same steps as one that is not.
"""

from __future__ import annotations

import csv
import math
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

SAVE_SECONDS = 120.0
LOG_STEPS = 10


def generators(seed: int, stage: str, step: int) -> tuple[np.random.Generator, torch.Generator]:
    """Fresh generators of NumPy and torch that depend on nothing but the arguments."""
    numbers = np.random.default_rng([seed, zlib.crc32(stage.encode()), step])
    return numbers, torch.Generator().manual_seed(int(numbers.integers(2**62)))


def learning_rate_factor(step: int, steps: int, *, warmup: int, final: float = 0.02) -> float:
    """Linear warm-up, then a cosine down to `final`."""
    warmup = min(warmup, max(1, steps // 10))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


class Average:
    """Exponential moving average of a module's parameters, with a decay that grows to `decay` over the first steps."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = dict(module.named_parameters())
        self.values = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the parameters as they are after `step`."""
        decay = min(self.decay, (1 + step) / (10 + step))
        sources = [parameter.detach() for parameter in self.parameters.values()]
        torch._foreach_lerp_(list(self.values.values()), sources, 1 - decay)

    @torch.no_grad()
    def copy_to_module(self) -> None:
        """Make the averages the parameters."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self.values[name])


@dataclass
class Loop:
    """One stage's training.

    Attributes:
        work: the work folder; state, log and result of the stage go there.
        stage: its name.
        steps: how many.
        module: what is trained; after `run` it holds the averaged weights.
        optimizer: its groups' initial rates are the peak rates.
        decay: of the average.
        warmup: steps.
    """

    work: Path
    stage: str
    steps: int
    module: nn.Module
    optimizer: torch.optim.Optimizer
    decay: float
    warmup: int = 100

    def run(self, step: Callable[[int], dict[str, torch.Tensor]]) -> None:
        """Take every step that is still to take, then leave the averaged weights in the module.

        Args:
            step: from the step's index to named losses; `loss` is differentiated, the others are only logged.
        """
        average = Average(self.module, self.decay)
        peaks = [group["lr"] for group in self.optimizer.param_groups]
        first, rows = self._restore(average)
        saved = time.monotonic()
        for index in range(first, self.steps):
            started = time.monotonic()
            factor = learning_rate_factor(index, self.steps, warmup=self.warmup)
            for group, peak in zip(self.optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            losses = step(index)
            self.optimizer.zero_grad(set_to_none=True)
            losses["loss"].backward()
            norm = nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
            if not torch.isfinite(norm):
                raise RuntimeError(f"stage {self.stage}: the gradient of step {index} is {norm.item()}")
            self.optimizer.step()
            average.update(index)
            row = {name: value.item() for name, value in losses.items()}
            rows.append({"step": index, "seconds": time.monotonic() - started, "gradient": norm.item(), **row})
            last = index + 1 == self.steps
            if last or index % LOG_STEPS == 0:
                shown = ", ".join(f"{name} {value:.4f}" for name, value in row.items())
                print(f"{self.stage} {index + 1}/{self.steps}: {shown}, {rows[-1]['seconds']:.2f} s", flush=True)
            if last or time.monotonic() - saved > SAVE_SECONDS:
                self._save(index + 1, average, rows)
                saved = time.monotonic()
        average.copy_to_module()

    def _state_file(self) -> Path:
        return self.work / "state" / f"{self.stage}.pt"

    def _save(self, steps_done: int, average: Average, rows: list[dict[str, float]]) -> None:
        state = {
            "steps": self.steps,
            "steps_done": steps_done,
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": average.values,
            "rows": rows,
        }
        save_atomically(state, self._state_file())
        log = self.work / "logs" / f"{self.stage}.csv"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)

    def _restore(self, average: Average) -> tuple[int, list[dict[str, float]]]:
        path = self._state_file()
        if not path.exists():
            return 0, []
        state = torch.load(path, weights_only=True)
        if state["steps"] != self.steps:
            raise SystemExit(
                f"{path} is of a run of {state['steps']} steps, this one has {self.steps}; "
                "remove it to start the stage anew"
            )
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        average.values = {name: state["average"][name] for name in average.values}
        print(f"{self.stage}: resumed after step {state['steps_done']}", flush=True)
        return state["steps_done"], state["rows"]


def save_atomically(value: object, path: Path) -> None:
    """`torch.save` that leaves either the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(value, partial)
    partial.replace(path)
