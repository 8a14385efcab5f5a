# SPDX-License-Identifier: Apache-2.0
"""Classifier-free guidance with its branches on different ranks: the CFG axis."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from omni_neuron_parallel.groups import AxisGroup, get_group

logger = logging.getLogger(__name__)

Prediction = torch.Tensor | tuple[torch.Tensor, ...]


def check_cfg_parallel_size(cfg_size: int, num_branches: int) -> None:
    """Refuse a CFG group in which a rank would have no branch of its own.

    Args:
        cfg_size: ranks of the CFG group.
        num_branches: predictions that one guided step combines; 2 for a positive and a negative prompt.

    Raises:
        ValueError: naming both and the valid sizes.
    """
    if not 1 <= cfg_size <= num_branches:
        valid = ", ".join(map(str, range(1, num_branches + 1)))
        raise ValueError(
            f"cfg_parallel_size = {cfg_size}: guidance has {num_branches} branches, one a rank at most; "
            f"valid sizes are {valid}"
        )


@functools.cache
def warn_of_idle_cfg_ranks(cfg_size: int) -> None:
    """Warn, once a process, that without guidance all CFG ranks but one repeat the first one's work.

    Args:
        cfg_size: ranks of the CFG group, at least 2.
    """
    idle = "half" if cfg_size == 2 else f"{cfg_size - 1} in {cfg_size}"
    logger.warning(
        "cfg_parallel_size = %d, but this request has steps without guidance: in them %s of the "
        "cores idle, since all compute the same branch. Ask for guidance in all steps, or set cfg_parallel_size to "
        "1 and give the cores to tensor or context parallelism.",
        cfg_size,
        idle,
    )


def gather_branches(local: Sequence[tuple[torch.Tensor, ...]], group: AxisGroup) -> list[tuple[torch.Tensor, ...]]:
    """Every rank's predictions, in one all-gather. Collective over `group`; traceable.

    Args:
        local: this rank's predictions; as many on every rank, of the same shapes and floating-point dtypes.
        group: the ranks that hold the others.

    Returns:
        The predictions in the round-robin order of branches: each rank's first in group order, then each rank's
        second, and so on; shapes and dtypes as given.
    """
    tensors = [tensor for prediction in local for tensor in prediction]
    # The narrower of two floating-point dtypes is held exactly by the wider.
    widest = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
    packed = torch.cat([tensor.reshape(-1).to(widest) for tensor in tensors])
    ranks = []
    for row in group.all_gather(packed.unsqueeze(0), dim=0).unbind(0):
        parts = row.split([tensor.numel() for tensor in tensors])
        ranks.append([part.reshape(like.shape).to(like.dtype) for part, like in zip(parts, tensors, strict=True)])
    outputs = len(local[0])
    return [tuple(rank[slot * outputs : (slot + 1) * outputs]) for slot in range(len(local)) for rank in ranks]


class NeuronCFGParallelMixin:
    """Guidance whose branches run on different CFG ranks; put it before vLLM-Omni's `CFGParallelMixin`.

    Each rank of `get_group("cfg")` computes its branch, one all-gather exchanges all outputs of all branches, and every
    rank combines them, so that the result is the same everywhere. Gather and combine are one method
    (`gather_and_combine_cfg_noise`, or `gather_and_combine_multi_branch_cfg_noise`) that traces into one graph; a
    pipeline may replace it by its compiled self.

    The methods have vLLM-Omni's signatures and call the pipeline's `predict_noise`, `combine_cfg_noise` and
    `combine_multi_branch_cfg_noise` as it does, overridden or not. They defer to `super()` in a CFG group of one,
    without guidance, and for `cfg_normalize` and `output_slice`. In the last two cases vLLM-Omni splits the branches
    over its own CFG group where it has one (in its workers, whose groups this package adopts); where it has none every
    rank computes all branches: the same result, without the speed.
    """

    predict_noise: Callable[..., Prediction]
    combine_cfg_noise: Callable[..., Prediction]
    combine_multi_branch_cfg_noise: Callable[..., Prediction]

    def predict_noise_maybe_with_cfg(
        self,
        do_true_cfg: bool,
        true_cfg_scale: float,
        positive_kwargs: dict[str, Any],
        negative_kwargs: dict[str, Any] | None,
        cfg_normalize: bool = True,
        output_slice: int | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> Prediction:
        """One step's prediction: positive on CFG rank 0, negative on rank 1.

        Args:
            do_true_cfg: whether the step has guidance; if not, every rank computes the positive branch and none
                communicates.
            true_cfg_scale: the guidance scale.
            positive_kwargs: of `predict_noise` for the prompt.
            negative_kwargs: of `predict_noise` for the negative prompt; needed with guidance.
            cfg_normalize: as in vLLM-Omni.
            output_slice: as in vLLM-Omni.
            kwargs: passed on to `combine_cfg_noise` if not None.

        Returns:
            What `combine_cfg_noise` makes of the branches, or the positive prediction; the same on every rank.

        Raises:
            ValueError: more CFG ranks than branches, or guidance without `negative_kwargs`.
        """
        group = get_group("cfg")
        if _defers(group, do_true_cfg, 2, cfg_normalize, output_slice):
            return super().predict_noise_maybe_with_cfg(  # type: ignore[misc]
                do_true_cfg, true_cfg_scale, positive_kwargs, negative_kwargs, cfg_normalize, output_slice, kwargs
            )
        if negative_kwargs is None:
            # On every rank: if only the rank of the negative branch raised, the others would wait for it.
            raise ValueError("do_true_cfg is set, but negative_kwargs is None")
        local = self.predict_noise(**(positive_kwargs, negative_kwargs)[group.rank])
        return self.gather_and_combine_cfg_noise(local, true_cfg_scale, kwargs)

    def gather_and_combine_cfg_noise(
        self, local: Prediction, true_cfg_scale: float, kwargs: dict[str, Any] | None = None
    ) -> Prediction:
        """The combined prediction from this rank's branch `local`. Collective over the CFG group; traceable."""
        positive, negative = gather_branches([_as_tuple(local)], get_group("cfg"))
        context = {} if kwargs is None else {"kwargs": kwargs}
        return self.combine_cfg_noise(positive, negative, true_cfg_scale, False, **context)

    def predict_noise_with_multi_branch_cfg(
        self,
        do_true_cfg: bool,
        true_cfg_scale: float | dict[str, float],
        branches_kwargs: list[dict[str, Any]],
        cfg_normalize: bool = False,
        output_slice: int | None = None,
    ) -> Prediction:
        """One step's prediction from N branches: branch i on CFG rank i mod size.

        Args:
            do_true_cfg: whether the step has guidance; if not, every rank computes branch 0.
            true_cfg_scale: passed on to `combine_multi_branch_cfg_noise`.
            branches_kwargs: of `predict_noise`, one a branch, the positive one first.
            cfg_normalize: as in vLLM-Omni.
            output_slice: as in vLLM-Omni.

        Returns:
            What `combine_multi_branch_cfg_noise` makes of the branches; the same on every rank.

        Raises:
            ValueError: more CFG ranks than branches.
        """
        group, branches = get_group("cfg"), len(branches_kwargs)
        if _defers(group, do_true_cfg, branches, cfg_normalize, output_slice):
            return super().predict_noise_with_multi_branch_cfg(  # type: ignore[misc]
                do_true_cfg, true_cfg_scale, branches_kwargs, cfg_normalize, output_slice
            )
        local = [self.predict_noise(**kwargs) for kwargs in branches_kwargs[group.rank :: group.size]]
        return self.gather_and_combine_multi_branch_cfg_noise(local, true_cfg_scale, branches)

    def gather_and_combine_multi_branch_cfg_noise(
        self, local: list[Prediction], true_cfg_scale: float | dict[str, float], num_branches: int
    ) -> Prediction:
        """The combined prediction from this rank's branches `local`. Collective over the CFG group; traceable."""
        group = get_group("cfg")
        own = [_as_tuple(prediction) for prediction in local]
        # Ranks without a last branch send zeros in its place, so that all send as much.
        missing = -(-num_branches // group.size) - len(own)
        own += [tuple(torch.zeros_like(tensor) for tensor in own[0])] * missing
        predictions = gather_branches(own, group)[:num_branches]
        unwrapped: list[Prediction] = [parts[0] if len(parts) == 1 else parts for parts in predictions]
        return self.combine_multi_branch_cfg_noise(unwrapped, true_cfg_scale, False)


def _defers(
    group: AxisGroup, do_true_cfg: bool, num_branches: int, cfg_normalize: bool, output_slice: int | None
) -> bool:
    if group.size == 1:
        return True
    if not do_true_cfg:
        # One of the ranks says it for all.
        if group.ranks[group.rank] == 0:
            warn_of_idle_cfg_ranks(group.size)
        return True
    check_cfg_parallel_size(group.size, num_branches)
    return cfg_normalize or output_slice is not None


def _as_tuple(prediction: Prediction) -> tuple[torch.Tensor, ...]:
    return prediction if isinstance(prediction, tuple) else (prediction,)
