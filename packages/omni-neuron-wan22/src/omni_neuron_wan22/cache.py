# SPDX-License-Identifier: Apache-2.0
"""A step that reuses what the middle blocks added to the tokens in an earlier one (DBCache, as cache-dit publishes it).

The first F blocks are always computed. If what they add to the tokens has changed little since the last step that was
computed whole, the middle blocks are skipped and what they added then is added again; the last B blocks are computed.

An expert is cut into three graphs: `front`, then on the host the decision, then `compute` or `reuse`. So each graph is
whole, and a compile backend needs no control flow. The change is measured over the tokens of all TP and CP ranks,
without pads, and all of them see the same two sums, bit for bit: a rank cannot decide alone. The branches of guidance
decide each for itself, wherever they are computed, so CFG parallelism changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import nn

from omni_neuron_parallel import get_group
from omni_neuron_wan22.cache_settings import CacheSettings
from omni_neuron_wan22.transformer import CrossAttentionKV, Tokens, WanTransformer3DModel

BRANCHES = ("positive", "negative")


class StepRule(Protocol):
    """What decides about a step, on the host; `DBCacheRule` in use."""

    def begin(self) -> None:
        """Forget all steps."""

    def may_reuse(self, key: str, change: float | None) -> bool:
        """Count a step of `key` and decide it.

        Args:
            key: the expert and the branch.
            change: relative change since the key's last computed step; None where there was none.
        """


class CachedExpert:
    """The three graphs of one expert."""

    def __init__(self, model: WanTransformer3DModel, settings: CacheSettings):
        self.model = model
        self.first = settings.Fn_compute_blocks
        self.last = len(model.blocks) - settings.Bn_compute_blocks
        self.groups = (get_group("tp"), model.context_group)

    def front(
        self,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        cross_attention: CrossAttentionKV,
        previous: torch.Tensor,
        first_frame_timestep: torch.Tensor | None,
    ) -> tuple[Tokens, torch.Tensor, torch.Tensor]:
        """The first blocks.

        Args:
            latents, timestep, cross_attention, first_frame_timestep: as in the model's `forward`.
            previous: what this returned as its second value at the last computed step, `[B, S_tp, hidden]`.

        Returns:
            The tokens after the blocks; what the blocks added to them; and two sums over the tokens of all ranks,
            float32 `[2]`: of |added − previous| and of |previous|.
        """
        embedded = self.model.embed(latents, timestep, first_frame_timestep)
        tokens = self.model.run_blocks(embedded, cross_attention, latents.shape, 0, self.first)
        added = tokens.hidden - embedded.hidden
        holds_token, before = self._holds_token(latents.shape)[:, None], previous.float()
        sizes = [(added.float() - before).abs(), before.abs()]
        sums = torch.stack([torch.where(holds_token, size, 0.0).sum() for size in sizes])[None]
        # Gathered and added in one order everywhere, rather than reduced: the same bits whatever a collective does.
        for group in self.groups:
            sums = group.all_gather(sums, 0).sum(0, keepdim=True)
        return tokens, added, sums[0]

    def compute(
        self, tokens: Tokens, cross_attention: CrossAttentionKV, latent_shape: torch.Size
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All blocks after the first ones: the prediction, and what the middle ones added `[B, S_tp, hidden]`."""
        middle = self.model.run_blocks(tokens, cross_attention, latent_shape, self.first, self.last)
        return self._predict(middle, cross_attention, latent_shape), middle.hidden - tokens.hidden

    def reuse(
        self, tokens: Tokens, added: torch.Tensor, cross_attention: CrossAttentionKV, latent_shape: torch.Size
    ) -> torch.Tensor:
        """The prediction with the middle blocks replaced by what they added in an earlier step."""
        middle = tokens._replace(hidden=tokens.hidden + added)
        return self._predict(middle, cross_attention, latent_shape)

    def _predict(self, tokens: Tokens, cross_attention: CrossAttentionKV, latent_shape: torch.Size) -> torch.Tensor:
        tokens = self.model.run_blocks(tokens, cross_attention, latent_shape, self.last)
        return self.model.predict(tokens, latent_shape).sample

    def _holds_token(self, latent_shape: torch.Size) -> torch.Tensor:
        """Bool `[S_tp]`: False where this rank's row is a pad, of TP's split or of CP's."""
        context, sequence = self.model.shards(latent_shape)
        rows = sequence.shard.shard_length
        row = torch.arange(rows, device=self.model.context_place.device) + self.model.sequence_place * rows
        token = row + self.model.context_place * context.shard_length
        return (row < context.shard_length) & (token < context.sequence_length)


@dataclass
class _Kept:
    """What the last computed step of an expert and branch left: what its first and its middle blocks added."""

    front: torch.Tensor
    middle: torch.Tensor


@dataclass(frozen=True)
class StepRecord:
    """One step of an expert and branch.

    Attributes:
        cached: whether it reused.
        change: relative change of what the first blocks added; NaN where there was nothing to compare with.
    """

    cached: bool
    change: float


class BlockCache:
    """The cached forward of a pipeline's experts; it stands where a model would be called.

    Call `begin` before each video, `end` after it.

    Args:
        experts: by name.
        settings: which blocks are always computed; the rest is reported only.
        rule: what decides.

    Attributes:
        compiled: whether `graphs` are.
    """

    def __init__(self, experts: Mapping[str, WanTransformer3DModel], settings: CacheSettings, rule: StepRule):
        self.settings = settings
        self._rule = rule
        self._experts = {name: CachedExpert(model, settings) for name, model in experts.items()}
        self._kept: dict[tuple[str, str], _Kept] = {}
        self._records: dict[tuple[str, str], list[StepRecord]] = {}
        self._num_steps = 0
        self.compiled = False
        self._reuse_is_compiled: set[tuple[str, torch.Size]] = set()

    def graphs(self) -> Iterator[tuple[str, CachedExpert, str]]:
        """What can be compiled, each as one graph: its name, the object and the method."""
        for name, expert in self._experts.items():
            for part in ("front", "compute", "reuse"):
                yield f"{name}.cache_{part}", expert, part

    def begin(self, num_steps: int) -> None:
        """Forget the last video, finished or not; the next one has `num_steps` steps."""
        self._rule.begin()
        self._kept, self._records, self._num_steps = {}, {}, num_steps

    def end(self) -> None:
        """Free the tensors and complete the report. Collective over the CFG ranks."""
        self._kept = {}
        self._gather_records()

    def predict(
        self,
        model: nn.Module,
        branch: str,
        *,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        cross_attention_kv_cache: CrossAttentionKV,
        first_frame_timestep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One step of one branch: the prediction `[B, C, T, H, W]`, computed whole or with the middle blocks' past.

        Args:
            model: one of the experts.
            branch: of guidance, one of `BRANCHES`; "positive" without it.
            hidden_states, timestep, cross_attention_kv_cache, first_frame_timestep: as in the model's `forward`.
        """
        name, expert = next(item for item in self._experts.items() if item[1].model is model)
        shape = hidden_states.shape
        kept = self._kept.get((name, branch))
        previous = self._no_tokens(expert.model, hidden_states) if kept is None else kept.front
        tokens, added, sums = expert.front(
            hidden_states, timestep, cross_attention_kv_cache, previous, first_frame_timestep
        )
        difference, size = sums.tolist()
        change = None if kept is None else difference / size if size else math.inf
        reuse = self._rule.may_reuse(f"{name} {branch}", change)
        record = StepRecord(reuse, math.nan if change is None else change)
        self._records.setdefault((name, branch), []).append(record)
        if reuse:
            assert kept is not None
            return expert.reuse(tokens, kept.middle, cross_attention_kv_cache, shape)
        prediction, middle = expert.compute(tokens, cross_attention_kv_cache, shape)
        self._kept[name, branch] = _Kept(added, middle)
        if self.compiled and (name, shape) not in self._reuse_is_compiled:
            # Now, in a step that compiles anyway, and on all ranks at once; later one branch alone might need it.
            self._reuse_is_compiled.add((name, shape))
            expert.reuse(tokens, middle, cross_attention_kv_cache, shape)
        return prediction

    def report(self) -> dict[str, Any]:
        """The settings, and by expert and branch the number of steps, those that reused, and every step's change.

        After `end`; complete on the first rank of a CFG group.
        """
        return {
            "backend": "cache_dit",
            **asdict(self.settings),
            "experts": {
                name: {branch: _summary(steps) for branch in BRANCHES if (steps := self._records.get((name, branch)))}
                for name in self._experts
            },
        }

    def _gather_records(self) -> None:
        """On the first rank of a CFG group, add what the others have recorded of branches that it has not computed."""
        keys = [(name, branch) for name in self._experts for branch in BRANCHES]
        # Rows of [reused, change], NaN where there was no step: one shape, whatever a rank has computed.
        own = torch.full((len(keys), self._num_steps, 2), math.nan, dtype=torch.float64)
        for row, key in enumerate(keys):
            for step, record in enumerate(self._records.get(key, ())):
                own[row, step] = torch.tensor([record.cached, record.change], dtype=torch.float64)
        for gathered in (get_group("cfg").gather_to_first(own) or [])[1:]:
            for key, rows in zip(keys, gathered.tolist(), strict=True):
                steps = [StepRecord(bool(cached), change) for cached, change in rows if not math.isnan(cached)]
                if steps:
                    self._records.setdefault(key, steps)

    def _no_tokens(self, model: WanTransformer3DModel, latents: torch.Tensor) -> torch.Tensor:
        rows = model.shards(latents.shape)[1].shard.shard_length
        return torch.zeros(latents.shape[0], rows, model.config.hidden_size, dtype=model.dtype, device=latents.device)


def _summary(steps: list[StepRecord]) -> dict[str, Any]:
    return {
        "steps": len(steps),
        "cached_steps": [index for index, step in enumerate(steps) if step.cached],
        "changes": [None if math.isnan(step.change) else round(step.change, 4) for step in steps],
    }
