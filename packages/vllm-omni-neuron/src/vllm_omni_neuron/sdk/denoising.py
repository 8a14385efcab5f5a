# SPDX-License-Identifier: Apache-2.0
"""The denoising loop: component and guidance of every step, what is kept between steps, checks of the ranks.

Latents, timesteps, guidance and the scheduler are on the host; the device runs the components and nothing else. A step
sends it a few MiB and takes as much back, whereas an operation between graphs would be compiled for itself, and
torch-neuronx's Lite refuses some of them, such as a change of dtype.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from vllm_omni.diffusion.cancellation import check_request_cancellation
from vllm_omni.diffusion.distributed.cfg_parallel import CFGParallelMixin
from vllm_omni.diffusion.forward_context import DenoiseProgressMixin
from vllm_omni.diffusion.models.progress_bar import ProgressBarMixin

from omni_neuron_parallel import NeuronCFGParallelMixin, check_rank_agreement, collective_step, get_group
from omni_neuron_runtime import env
from vllm_omni_neuron.sdk.spec import ModelSpec
from vllm_omni_neuron.sdk.stage_clock import StageClock

Prediction = torch.Tensor | tuple[torch.Tensor, ...]
"""What a DiT predicts for one branch of guidance."""


@dataclass
class Trajectory:
    """What one request's denoising runs use and record.

    Attributes:
        request: what was asked for, a `GenerationRequest` or the model's subclass.
        encoded: what `encode_prompt` returned, by branch; only branches that some step needs.
        condition: what `prepare` made of other inputs, such as an image; None without any.
        conditioning: what `condition_model` returned, by component and branch, while steps need it.
        steps: steps taken so far of the output that is made, by component.
    """

    request: Any
    encoded: dict[str, Any]
    condition: Any = None
    conditioning: dict[tuple[str, str], Any] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)


class Denoising(NeuronCFGParallelMixin, CFGParallelMixin, ProgressBarMixin, DenoiseProgressMixin):
    """The part of `NeuronDiffusionPipeline` that denoises; see there for the methods that a model writes."""

    spec: ClassVar[ModelSpec]
    scheduler: Any  # a new one for every output: nothing of the last one's shift or solver can stick
    device: torch.device
    checkpoint: Any
    request: Any  # the running one
    clock = StageClock()  # a running request has its own
    if TYPE_CHECKING:  # from vLLM-Omni's mixins, whose types mypy does not follow (see pyproject.toml)
        progress_bar: Callable[..., Any]
        record_denoise_step: Callable[..., None]

    def make_scheduler(self, request: Any) -> Any:
        """A scheduler as in diffusers, its timesteps set: `timesteps`, and `step(…).prev_sample` in float32.

        On the host; by default the checkpoint's.
        """
        scheduler = self.checkpoint.scheduler()
        scheduler.set_timesteps(request.num_inference_steps)
        return scheduler

    def choose_model(self, timestep: float, request: Any) -> tuple[str, float]:
        """The component that takes a step, and its guidance scale; by default the first transformer and the request's.

        Args:
            timestep: as the scheduler has it.
        """
        return self.spec.of_kind("transformer")[0].name, request.guidance_scale

    def branches(self, request: Any, scale: float) -> tuple[str, ...]:
        """The branches of a step with this guidance scale: of one or more, the first the prompt's own.

        A step of one branch has no guidance. By default "positive" and, where the scale is above 1, "negative".
        """
        return ("positive", "negative") if scale > 1.0 else ("positive",)

    def branch_text(self, branch: str, request: Any) -> str:
        """The text of a branch; by default of "positive" the prompt, of "negative" the negative prompt."""
        return {"positive": request.prompt, "negative": request.negative_prompt}[branch]

    def branches_of(self, request: Any) -> tuple[str, ...]:
        """The branches that some step of the request needs; `self.scheduler` is the request's."""
        scales = dict.fromkeys(self.choose_model(value, request)[1] for value in self.scheduler.timesteps.tolist())
        return tuple(dict.fromkeys(branch for scale in scales for branch in self.branches(request, scale)))

    def condition_model(self, name: str, encoded: Any, trajectory: Trajectory) -> Any:
        """What the component `name` needs of a branch in every step, such as the text's keys and values.

        Called once for a component and a branch, and kept for all of their steps. With CFG parallelism ranks are asked
        about different branches: no place for a collective over the world. By default `encoded`, as `encode_prompt`
        returned it.
        """
        return encoded

    @abstractmethod
    def model_inputs(
        self, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Any, trajectory: Trajectory
    ) -> dict[str, Any]:
        """The keywords of the component's forward; tensors among them are sent to the device.

        Tensor capture tells steps apart by the value of the keyword `timestep`, if there is one.

        Args:
            latents: float32, of `latent_shape`, on the host. What is to be another dtype on the device is so here.
            timestep: float32 `[1]`, as the scheduler has it, on the host.
            conditioning: what `condition_model` made for the branch. Only a branch that this rank computes is asked
                about.
            trajectory: of the request.
        """

    def predict_noise(self, current_model: nn.Module, branch: str, **inputs: Any) -> Prediction:
        """One forward for one branch; by default the model's output, or the first of several.

        Tensor capture observes this method. A tuple means several predictions, which `combine_branches` combines each
        for itself and the scheduler's `step` takes as a tuple.

        Args:
            current_model: the component.
            branch: of guidance.
            **inputs: what `model_inputs` returned.
        """
        output = current_model(**inputs)
        return output if isinstance(output, torch.Tensor) else output[0]

    def combine_branches(self, predictions: list[Prediction], scale: float) -> Prediction:
        """One prediction of those of `branches`, in that order, the same on every rank; all on the host.

        By default negative + scale · (positive − negative) (Ho and Salimans 2022), of two branches. `self.request` is
        the running request, where its settings matter.

        Raises:
            NotImplementedError: more branches, and the model does not say how to combine them.
        """
        if len(predictions) != 2:
            raise NotImplementedError(
                f"{type(self).__name__} has {len(predictions)} branches; combine_branches must be written for them"
            )
        pairs = zip(*map(_as_tuple, predictions), strict=True)
        combined = tuple(negative + scale * (positive - negative) for positive, negative in pairs)
        return combined[0] if len(combined) == 1 else combined

    def postprocess_prediction(
        self, prediction: Prediction, latents: torch.Tensor, timestep: torch.Tensor
    ) -> Prediction:
        """What the scheduler takes, of a combined prediction in float32 on the host; by default that itself.

        Args:
            latents, timestep: as for `model_inputs`.
        """
        return prediction

    def finish(self, latents: torch.Tensor, trajectory: Trajectory) -> torch.Tensor:
        """What comes out, of the denoised latents; by default those themselves."""
        return latents

    def diffuse(self, latents: torch.Tensor, trajectory: Trajectory) -> torch.Tensor:
        """Denoise `latents` (float32, on the host) over all steps, each with the component that it belongs to.

        Raises:
            DiffusionRequestAbortedError: the caller has cancelled the request; on every rank before the same step.
        """
        self.request = request = trajectory.request
        self.scheduler = self.make_scheduler(request)
        timesteps = self.scheduler.timesteps
        plan = [self.choose_model(value, request) for value in timesteps.tolist()]
        trajectory.steps = dict.fromkeys((component.name for component in self.spec.of_kind("transformer")), 0)
        self.check_agreement(latents, "initial noise")
        with self.progress_bar(total=len(plan)) as progress:
            for step, (timestep, (name, scale)) in enumerate(zip(timesteps, plan, strict=True)):
                check_request_cancellation()
                self.record_denoise_step(step, timestep, total_steps=len(plan))
                _keep_conditioning(trajectory, {later for later, _ in plan[step:]})
                with self.clock.step(name):
                    with collective_step(f"denoising step {step + 1} of {len(plan)}"):
                        prediction = self._predict(latents, timestep, name, scale, trajectory)
                    latents = self.scheduler.step(prediction, timestep, latents).prev_sample
                trajectory.steps[name] += 1
                self.check_agreement(latents, f"latents after step {step + 1} of {len(plan)}")
                progress.update()
        # For the next output, which begins with that component; two components' at once would need more memory.
        _keep_conditioning(trajectory, {plan[0][0]})
        return self.finish(latents, trajectory)

    def check_agreement(self, tensor: torch.Tensor, what: str) -> None:
        """Where `OMNI_NEURON_CHECK_RANK_AGREEMENT` is set, compare a tensor over all ranks. Collective then.

        Raises:
            RankDisagreementError: it differs between ranks.
        """
        if env.get("OMNI_NEURON_CHECK_RANK_AGREEMENT"):
            check_rank_agreement(tensor, what)

    def combine_multi_branch_cfg_noise(
        self, predictions: list[Prediction], true_cfg_scale: float, cfg_normalize: bool = False
    ) -> Prediction:
        """What vLLM-Omni's guidance mixin calls; see `combine_branches`."""
        return self.combine_branches([_on_host(prediction) for prediction in predictions], true_cfg_scale)

    def gather_and_combine_multi_branch_cfg_noise(
        self, local: list[Prediction], true_cfg_scale: float | dict[str, float], num_branches: int
    ) -> Prediction:
        """As the parallel layer's, which gathers what it gets: host tensors."""
        on_host = [_on_host(prediction) for prediction in local]
        return super().gather_and_combine_multi_branch_cfg_noise(on_host, true_cfg_scale, num_branches)

    def _predict(
        self, latents: torch.Tensor, timestep: torch.Tensor, name: str, scale: float, trajectory: Trajectory
    ) -> Prediction:
        branches, group = self.branches(trajectory.request, scale), get_group("cfg")
        guided = len(branches) > 1
        # Of one dtype, whichever scheduler made it: another one would be another graph.
        timestep = timestep.float().expand(latents.shape[0])
        arguments: list[dict[str, Any]] = []
        for number, branch in enumerate(branches):
            # With CFG parallelism a rank computes some branches, and needs what belongs to those only.
            if guided and number % group.size != group.rank:
                arguments.append({})
                continue
            conditioning = self._conditioning(name, branch, trajectory)
            inputs = self.to_device(self.model_inputs(latents, timestep, conditioning, trajectory))
            arguments.append({"current_model": getattr(self, name), "branch": branch, **inputs})
        prediction = _on_host(self.predict_noise_with_multi_branch_cfg(guided, scale, arguments))
        parts = tuple(part.float() for part in _as_tuple(prediction))
        return self.postprocess_prediction(parts if isinstance(prediction, tuple) else parts[0], latents, timestep)

    def to_device(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """`inputs` with the tensors among its values on this rank's device, each of the dtype that it has."""
        return {
            name: value.to(self.device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()
        }

    def _conditioning(self, name: str, branch: str, trajectory: Trajectory) -> Any:
        key = (name, branch)
        if key not in trajectory.conditioning:
            trajectory.conditioning[key] = self.condition_model(name, trajectory.encoded[branch], trajectory)
        return trajectory.conditioning[key]


def _keep_conditioning(trajectory: Trajectory, names: Collection[str]) -> None:
    """Drop the conditioning of other components than these."""
    trajectory.conditioning = {key: value for key, value in trajectory.conditioning.items() if key[0] in names}


def _as_tuple(prediction: Prediction) -> tuple[torch.Tensor, ...]:
    return prediction if isinstance(prediction, tuple) else (prediction,)


def _on_host(prediction: Prediction) -> Prediction:
    return tuple(part.cpu() for part in prediction) if isinstance(prediction, tuple) else prediction.cpu()
