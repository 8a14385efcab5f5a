# SPDX-License-Identifier: Apache-2.0
"""Solvers of the flow ODE: UniPC of order 2 (the default) and Euler.

All of a solver's arithmetic on noise levels is done once, in float64, when the timesteps are set; a step is then one
linear combination of tensors with plain numbers as coefficients. That traces into a fixed graph, needs no linear solve
on the device, and is what makes every rank compute the same bits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch

SAMPLE_SOLVERS = ("unipc", "euler")


@dataclass(frozen=True)
class _Update:
    """sample · x + previous · m₋₁ + present · m₀ + next · m₁; m are clean-latent predictions, newest last."""

    sample: float
    older: float
    previous: float
    present: float

    def apply(self, sample: torch.Tensor, *predictions: torch.Tensor | None) -> torch.Tensor:
        """The combination; a prediction whose coefficient is 0 may be None."""
        result = sample * self.sample
        for coefficient, prediction in zip((self.older, self.previous, self.present), predictions, strict=True):
            if coefficient:
                assert prediction is not None
                result = result + prediction * coefficient
        return result


class SchedulerOutput(NamedTuple):
    """What `step` returns; `[0]` and `.prev_sample` are the same."""

    prev_sample: torch.Tensor


class _FlowScheduler(ABC):
    """Timesteps and bookkeeping shared by the solvers."""

    order = 1

    def __init__(self, num_train_timesteps: int = 1000, shift: float = 5.0):
        # Pipelines of diffusers and vLLM-Omni read `scheduler.config`.
        self.config = SimpleNamespace(num_train_timesteps=num_train_timesteps, shift=shift)
        self.sigmas = torch.empty(0)
        self.timesteps = torch.empty(0)
        self.step_index = 0
        self._levels: list[float] = []

    def set_timesteps(
        self,
        num_inference_steps: int,
        device: torch.device | str | None = None,
        *,
        shift: float | None = None,
    ) -> None:
        """Start a new trajectory of `num_inference_steps`; nothing of an earlier one remains.

        Raises:
            ValueError: fewer than one step, or a shift that is not positive.
        """
        shift = self.config.shift if shift is None else shift
        _check_schedule(num_inference_steps, shift)
        self.sigmas, timesteps = self._schedule(num_inference_steps, shift)
        self.timesteps = timesteps.to(device)
        # The solvers work on float32 noise levels, as their references do; arithmetic on them is float64.
        self._levels = self.sigmas.tolist()
        self.step_index = 0

    @abstractmethod
    def _schedule(self, num_inference_steps: int, shift: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The noise levels `[steps + 1]` float32, down to 0, and the timesteps `[steps]`."""

    def _begin_step(self) -> int:
        """The index of the step that begins.

        Raises:
            RuntimeError: the trajectory is over.
        """
        steps = len(self._levels) - 1
        if self.step_index >= steps:
            raise RuntimeError(f"the trajectory of {max(0, steps)} steps is over; call set_timesteps first")
        return self.step_index

    def scale_model_input(self, sample: torch.Tensor, timestep: object = None) -> torch.Tensor:
        """The identity: a flow model takes the sample as it is."""
        return sample

    def set_begin_index(self, begin_index: int = 0) -> None:
        """Start at step `begin_index`; diffusers' pipelines call it with 0 after `set_timesteps`."""
        self.step_index = begin_index

    def _shifted(self, sigmas: np.ndarray, shift: float) -> np.ndarray:
        """σ ↦ shift · σ / (1 + (shift − 1) · σ), Esser et al. 2024, eq. 23."""
        return np.asarray(shift * sigmas / (1 + (shift - 1) * sigmas))


class NeuronFlowUniPCMultistepScheduler(_FlowScheduler):
    """UniPC-2 with the B(h) = eʰ − 1 variant on the flow path x = (1 − σ) x₀ + σ · noise (Zhao et al. 2023, alg. 1, 2).

    The predictor is of order 2 but for the first and the last step; every step but the first is preceded by the
    corrector. Timesteps are those of Wan's own code: σ evenly spaced from 1 − 1/1000 to 0, then shifted, then times
    1000 and cut to integers.

    Args:
        num_train_timesteps: the timestep of pure noise.
        shift: default flow shift.
    """

    def _schedule(self, num_inference_steps: int, shift: float) -> tuple[torch.Tensor, torch.Tensor]:
        train = self.config.num_train_timesteps
        # Rounded to float32 as in the reference, whose integer timesteps depend on the last digit.
        unshifted = np.linspace(float(np.float32(1 - 1 / train)), 0.0, num_inference_steps + 1)[:-1]
        sigmas = self._shifted(unshifted, shift)
        timesteps = torch.from_numpy((sigmas * train).astype(np.int64))
        return torch.from_numpy(np.append(sigmas, 0.0)).float(), timesteps

    def set_timesteps(
        self,
        num_inference_steps: int,
        device: torch.device | str | None = None,
        *,
        shift: float | None = None,
    ) -> None:
        """As the base class, and compute every step's coefficients."""
        super().set_timesteps(num_inference_steps, device, shift=shift)
        levels, steps = self._levels, len(self._levels) - 1
        orders = [min(2, step + 1, steps - step) for step in range(steps)]
        self._predictors = [_predictor(levels, step, order) for step, order in enumerate(orders)]
        # The corrector of a step has the order of the predictor that led to it.
        correctors = [_corrector(levels, step, orders[step - 1]) for step in range(1, steps)]
        self._correctors = [None, *correctors]
        self._last_sample: torch.Tensor | None = None
        self._older: torch.Tensor | None = None
        self._previous: torch.Tensor | None = None

    def step(
        self,
        model_output: torch.Tensor,
        timestep: object,
        sample: torch.Tensor,
        return_dict: bool = True,
        generator: object = None,
    ) -> SchedulerOutput:
        """Advance one step; steps are counted, `timestep` and `generator` are there for the usual signature.

        Args:
            model_output: predicted velocity, any shape.
            timestep: not used.
            sample: the latents that the velocity was predicted for, same shape.
            return_dict: there for the usual signature; the result serves either way.
            generator: not used; the solver draws nothing.

        Returns:
            The latents at the next noise level, in the dtype of `sample`.

        Raises:
            RuntimeError: the trajectory is over.
        """
        step = self._begin_step()
        prediction = sample - self._levels[step] * model_output
        corrector = self._correctors[step]
        if corrector is not None:
            assert self._last_sample is not None
            sample = corrector.apply(self._last_sample, self._older, self._previous, prediction).to(sample.dtype)
        self._older, self._previous = self._previous, prediction
        self._last_sample = sample
        updated = self._predictors[step].apply(sample, self._older, self._previous, None).to(sample.dtype)
        self.step_index += 1
        return SchedulerOutput(updated)


class FlowEulerScheduler(_FlowScheduler):
    """Euler's method on the flow ODE: x ← x + (σ' − σ) · velocity, σ evenly spaced from 1 to 0 and shifted.

    Timesteps are float32 and start at 1000.

    Args:
        num_train_timesteps: the timestep of pure noise.
        shift: default flow shift.
    """

    def _schedule(self, num_inference_steps: int, shift: float) -> tuple[torch.Tensor, torch.Tensor]:
        sigmas = torch.from_numpy(self._shifted(np.linspace(1.0, 0.0, num_inference_steps + 1), shift)).float()
        return sigmas, sigmas[:-1] * self.config.num_train_timesteps

    def step(
        self,
        model_output: torch.Tensor,
        timestep: object,
        sample: torch.Tensor,
        return_dict: bool = True,
        generator: object = None,
    ) -> SchedulerOutput:
        """As `NeuronFlowUniPCMultistepScheduler.step`."""
        step = self._begin_step()
        difference = self._levels[step + 1] - self._levels[step]
        updated = (sample + difference * model_output).to(sample.dtype)
        self.step_index += 1
        return SchedulerOutput(updated)


def make_scheduler(sample_solver: str, flow_shift: float) -> NeuronFlowUniPCMultistepScheduler | FlowEulerScheduler:
    """A fresh scheduler by its public name.

    Raises:
        ValueError: an unknown name, listing the known ones.
    """
    if sample_solver == "unipc":
        return NeuronFlowUniPCMultistepScheduler(shift=flow_shift)
    if sample_solver == "euler":
        return FlowEulerScheduler(shift=flow_shift)
    raise ValueError(f"sample_solver = {sample_solver!r}: valid values are {', '.join(SAMPLE_SOLVERS)}")


def _check_schedule(num_inference_steps: int, shift: float) -> None:
    if num_inference_steps < 1:
        raise ValueError(f"num_inference_steps = {num_inference_steps}: at least 1 is needed")
    if not shift > 0 or not math.isfinite(shift):
        raise ValueError(f"flow_shift = {shift}: a positive number is needed (default 5; vLLM-Omni notes 12 for 480p)")


def _log_snr(sigma: float) -> float:
    """λ = log((1 − σ) / σ), half the log signal-to-noise ratio."""
    return math.inf if sigma == 0 else math.log1p(-sigma) - math.log(sigma)


def _b_vector(hh: float, order: int) -> list[float]:
    """The right-hand side b of UniPC's order conditions for B(h) = eʰ − 1 (Zhao et al. 2023, eq. 10, with h → −h)."""
    b_h = math.expm1(hh)
    phi = b_h / hh - 1
    factorial = 1.0
    values = []
    for k in range(1, order + 1):
        values.append(phi * factorial / b_h)
        factorial *= k + 1
        phi = phi / hh - 1 / factorial
    return values


def _predictor(levels: list[float], step: int, order: int) -> _Update:
    """UniP from level `step` to the next, as coefficients of the sample and of the predictions m₋₁, m₀."""
    sigma, sigma_next = levels[step], levels[step + 1]
    h = _log_snr(sigma_next) - _log_snr(sigma)
    phi_1 = math.expm1(-h)
    scale, alpha = sigma_next / sigma, 1 - sigma_next
    sample, present = scale, -alpha * phi_1
    if order == 1:
        return _Update(sample, 0.0, present, 0.0)
    # One difference quotient D = (m₋₁ − m₀) / r; its weight is 1/2 at order 2, not the solution of the 1×1 system.
    ratio = (_log_snr(levels[step - 1]) - _log_snr(sigma)) / h
    difference = -alpha * phi_1 * 0.5 / ratio
    return _Update(sample, difference, present - difference, 0.0)


def _corrector(levels: list[float], step: int, order: int) -> _Update:
    """UniC at level `step`, from the sample one level before and the predictions m₋₂, m₋₁ and m₀ (the present one)."""
    sigma_before, sigma = levels[step - 1], levels[step]
    h = _log_snr(sigma) - _log_snr(sigma_before)
    phi_1 = math.expm1(-h)
    scale, alpha = sigma / sigma_before, 1 - sigma
    factor = -alpha * phi_1
    if order == 1:
        # rho = 1/2 for the only difference, m₀ − m₋₁.
        return _Update(scale, 0.0, factor * 0.5, factor * 0.5)
    ratio = (_log_snr(levels[step - 2]) - _log_snr(sigma_before)) / h
    # [1 1; r 1] · [rho_1 rho_2]ᵀ = b
    b_1, b_2 = _b_vector(-h, 2)
    rho_1 = (b_2 - b_1) / (ratio - 1)
    rho_2 = b_1 - rho_1
    older = factor * rho_1 / ratio
    return _Update(scale, older, factor * (1 - rho_1 / ratio - rho_2), factor * rho_2)
