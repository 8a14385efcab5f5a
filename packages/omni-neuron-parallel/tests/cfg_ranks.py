# SPDX-License-Identifier: Apache-2.0
"""Guided predictions on one rank or several. Importable by spawned processes."""

from __future__ import annotations

from typing import Any

import torch

from omni_neuron_parallel import AxisGroup, NeuronCFGParallelMixin, get_group


class SequentialGuidance:
    """What a pipeline inherits behind the mixin, as vLLM-Omni defines it, without its groups: all branches here."""

    def predict_noise_maybe_with_cfg(
        self,
        do_true_cfg: bool,
        true_cfg_scale: float,
        positive_kwargs: dict[str, Any],
        negative_kwargs: dict[str, Any] | None,
        cfg_normalize: bool = True,
        output_slice: int | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.deferred = True
        if not do_true_cfg:
            return self.predict_noise(**positive_kwargs)
        positive, negative = (as_tuple(self.predict_noise(**branch)) for branch in (positive_kwargs, negative_kwargs))
        if output_slice is not None:
            positive, negative = (tuple(part[:, :output_slice] for part in branch) for branch in (positive, negative))
        context = {} if kwargs is None else {"kwargs": kwargs}
        return self.combine_cfg_noise(positive, negative, true_cfg_scale, cfg_normalize, **context)

    def combine_cfg_noise(
        self, positive: Any, negative: Any, scale: float, normalize: bool = False, kwargs: dict[str, Any] | None = None
    ) -> Any:
        combined = tuple(n + scale * (p - n) for p, n in zip(positive, negative, strict=True))
        if normalize:
            combined = tuple(
                c * p.norm(dim=-1, keepdim=True) / c.norm(dim=-1, keepdim=True)
                for p, c in zip(positive, combined, strict=True)
            )
        return combined[0] if len(combined) == 1 else combined

    def predict_noise_with_multi_branch_cfg(
        self,
        do_true_cfg: bool,
        true_cfg_scale: Any,
        branches_kwargs: list[dict[str, Any]],
        cfg_normalize: bool = False,
        output_slice: int | None = None,
    ) -> Any:
        self.deferred = True
        if not do_true_cfg:
            return self.predict_noise(**branches_kwargs[0])
        predictions = [self.predict_noise(**branch) for branch in branches_kwargs]
        return self.combine_multi_branch_cfg_noise(predictions, true_cfg_scale, cfg_normalize)

    def combine_multi_branch_cfg_noise(self, predictions: list[Any], scales: Any, normalize: bool = False) -> Any:
        """Distance of each branch to the last, weighed on its own: every branch has another part in the result."""
        columns = [torch.stack(parts) for parts in zip(*map(as_tuple, predictions), strict=True)]
        weights = [scales[name] for name in sorted(scales)]
        combined = tuple(
            column[-1] + sum(weight * (part - column[-1]) for weight, part in zip(weights, column[:-1], strict=True))
            for column in columns
        )
        return combined[0] if len(combined) == 1 else combined


def as_tuple(prediction: Any) -> tuple[torch.Tensor, ...]:
    return prediction if isinstance(prediction, tuple) else (prediction,)


class Pipeline(NeuronCFGParallelMixin, SequentialGuidance):
    """A model of one matrix product and one sine, with one output or several of its own shapes and dtypes."""

    def __init__(self, outputs: int = 1) -> None:
        self.outputs, self.calls, self.deferred = outputs, [], False
        self.weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))

    def predict_noise(self, seed: int) -> Any:
        self.calls.append(seed)
        latents = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(seed))
        video = torch.sin(latents @ self.weight)
        audio, text = video[:, :, :5].to(torch.bfloat16), video[0, 0, :7].double()
        return (video, audio, text)[: self.outputs] if self.outputs > 1 else video


class OwnCombine(Pipeline):
    """Guides the video, takes the audio of the positive branch, and has the request's context in what it returns."""

    def combine_cfg_noise(
        self, positive: Any, negative: Any, scale: float, normalize: bool = False, kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert isinstance(positive, tuple)
        assert normalize is False
        factor = (kwargs or {"factor": 1.0})["factor"]
        video = super().combine_cfg_noise(positive[:1], negative[:1], scale * factor, normalize)
        return video, positive[1]


def guided(
    kind: str, outputs: int, options: dict[str, Any]
) -> tuple[tuple[torch.Tensor, ...], list[int], bool, list[str]]:
    """The prediction, the branches that this rank computed, whether `super()` did, and the collectives issued."""
    pipeline = {"plain": Pipeline, "own": OwnCombine}[kind](outputs)
    arguments = {
        "do_true_cfg": True,
        "true_cfg_scale": 4.0,
        "positive_kwargs": {"seed": 1},
        "negative_kwargs": {"seed": 2},
        "cfg_normalize": False,
    }
    with Collectives() as collectives:
        prediction = pipeline.predict_noise_maybe_with_cfg(**{**arguments, **options})
    return as_tuple(prediction), pipeline.calls, pipeline.deferred, collectives.names


def guided_by_branches(
    branches: int, outputs: int, options: dict[str, Any]
) -> tuple[tuple[torch.Tensor, ...], list[int], bool, list[str]]:
    """As `guided`, with N branches."""
    pipeline = Pipeline(outputs)
    scales = {f"scale {index}": 1.5 + index for index in range(branches - 1)}
    arguments = {
        "do_true_cfg": True,
        "true_cfg_scale": scales,
        "branches_kwargs": [{"seed": seed} for seed in range(branches)],
    }
    with Collectives() as collectives:
        prediction = pipeline.predict_noise_with_multi_branch_cfg(**{**arguments, **options})
    return as_tuple(prediction), pipeline.calls, pipeline.deferred, collectives.names


def refused(function: str) -> str:
    """The message of the ValueError that this rank gets."""
    pipeline = Pipeline()
    try:
        if function == "two":
            pipeline.predict_noise_maybe_with_cfg(True, 4.0, {"seed": 1}, {"seed": 2}, False)
        elif function == "many":
            pipeline.predict_noise_with_multi_branch_cfg(True, 4.0, [{"seed": seed} for seed in range(3)])
        else:
            pipeline.predict_noise_maybe_with_cfg(True, 4.0, {"seed": 1}, None, False)
    except ValueError as error:
        assert not pipeline.calls
        return str(error)
    return "accepted"


def traced(outputs: int) -> tuple[bool, int]:
    """Whether the compiled gather and combine gives the bits of the eager one, and the number of graphs."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    pipeline = OwnCombine(outputs)
    local = pipeline.predict_noise(seed=1 + get_group("cfg").rank)
    eager = pipeline.gather_and_combine_cfg_noise(local, 4.0, {"factor": 0.5})
    compiled = torch.compile(pipeline.gather_and_combine_cfg_noise, fullgraph=True, dynamic=False, backend=backend)
    same = all(torch.equal(a, b) for a, b in zip(compiled(local, 4.0, {"factor": 0.5}), eager, strict=True))
    return same, len(graphs)


class Collectives:
    """Names and shapes of the collectives that groups of several ranks are asked for in its context."""

    METHODS = ("all_reduce", "all_gather", "reduce_scatter", "start_rotate")

    def __init__(self) -> None:
        self.names: list[str] = []
        self.shapes: list[tuple[int, ...]] = []

    def __enter__(self) -> Collectives:
        self._originals = {name: getattr(AxisGroup, name) for name in self.METHODS}
        for name, original in self._originals.items():
            setattr(AxisGroup, name, self._counting(name, original))
        return self

    def __exit__(self, *error: object) -> None:
        for name, original in self._originals.items():
            setattr(AxisGroup, name, original)

    def _counting(self, name: str, original: Any) -> Any:
        def call(group: AxisGroup, tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            if group.size > 1:
                self.names.append(name)
                self.shapes.append(tuple(tensor.shape))
            return original(group, tensor, *arguments, **options)

        return call
