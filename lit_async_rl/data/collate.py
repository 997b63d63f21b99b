"""Collates the groups of one optimizer step into padded micro-batches.

B rows of a micro-batch, T positions. Rollouts are sorted by length and cut into contiguous runs, which minimizes the
padded size of the largest micro-batch and with it peak memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lit_async_rl.advantages.group import AdvantageEstimator
from lit_async_rl.errors import InvariantError
from lit_async_rl.expert_choices import OWN_CHOICE
from lit_async_rl.losses.aggregation import Aggregation
from lit_async_rl.sampler_head import SamplerHead, blank_head, join_heads
from lit_async_rl.types import Rollout, RolloutBatch, RolloutGroup

Value = TypeVar("Value", bool, int, float)
UNBOUNDED = 2**62  # versions


@dataclass(frozen=True)
class _Row:
    """One rollout with its advantages and token weight, which depend on the step's other rollouts."""

    prompt_ids: tuple[int, ...]
    rollout: Rollout
    advantages: Sequence[float]  # of the completion's tokens
    token_weight: float
    group_index: int
    max_staleness: int | None

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.rollout.completion_ids)


def collate_step(
    groups: Sequence[RolloutGroup],
    *,
    advantage: AdvantageEstimator,
    aggregation: Aggregation,
    num_micro_batches: int,
    pad_token_id: int,
    temperature: float,
    truncated: bool = False,
    keep_groups_whole: bool = False,
) -> list[RolloutBatch]:
    """All micro-batches of one optimizer step; token weights are normalized over the whole step.

    Groups are sorted by admission first, so the result does not depend on the order in which they finished. With
    `keep_groups_whole` no group is split over micro-batches.
    """
    groups = aggregation.select(sorted(groups, key=lambda group: group.index))
    advantages = advantage.per_token(groups)
    of_rollouts = aggregation.of_step(groups)
    if len(of_rollouts) != (number := sum(len(group.rollouts) for group in groups)):
        raise ValueError(
            f"data.aggregation={type(aggregation).__name__} must return one token weight for each of the step's "
            f"{number} rollouts, got {len(of_rollouts)}"
        )
    weights = iter(of_rollouts)
    units = [
        [
            _Row(group.prompt_ids, rollout, row, next(weights), group.index, group.max_staleness)
            for rollout, row in zip(group.rollouts, rows, strict=True)
        ]
        for group, rows in zip(groups, advantages, strict=True)
    ]
    if not keep_groups_whole:
        units = [[row] for unit in units for row in unit]
    parts = split_units(units, num_micro_batches)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    recorded = _head_width(rollouts), _experts_shape(rollouts)
    if truncated and not recorded[0] and any(rollout.completion_ids for rollout in rollouts):
        raise InvariantError("completions of a truncated sampler came without the tokens that it could choose")
    return [_pad(part, pad_token_id, temperature, truncated, *recorded) for part in parts]


def split_units(units: Sequence[list[_Row]], num_parts: int) -> list[list[_Row]]:
    """Partitions units (rows that stay together) into `num_parts` runs with minimal largest padded size.

    Units are sorted by length first; runs may be empty.
    """
    units = sorted((unit for unit in units if unit), key=_longest)
    low = max((len(unit) * _longest(unit) for unit in units), default=0)
    high = sum(len(unit) for unit in units) * max(map(_longest, units), default=0)
    while low < high:  # the smallest padded size that needs no more than num_parts runs
        middle = (low + high) // 2
        if len(_greedy_runs(units, middle)) <= num_parts:
            high = middle
        else:
            low = middle + 1
    runs = _greedy_runs(units, low)
    return runs + [[] for _ in range(num_parts - len(runs))]


def _longest(rows: Sequence[_Row]) -> int:
    return max(row.length for row in rows)


def _greedy_runs(units: Sequence[list[_Row]], max_padded: int) -> list[list[_Row]]:
    runs: list[list[_Row]] = []
    for unit in units:  # by length: the new unit's is the padded length of the run it joins
        if runs and (len(runs[-1]) + len(unit)) * _longest(unit) <= max_padded:
            runs[-1] = runs[-1] + unit
        else:
            runs.append(unit)
    return runs


def _pad(
    rows: Sequence[_Row],
    pad_token_id: int,
    temperature: float,
    truncated: bool,
    head_width: int | None,
    experts_shape: tuple[int, int] | None,
) -> RolloutBatch:
    """One micro-batch; without rows a single row of padding, because every rank must run every forward pass."""
    width = max((row.length for row in rows), default=2)
    columns = torch.arange(width)
    begins = torch.tensor([[len(row.prompt_ids)] for row in rows] or [[0]])
    ends = torch.tensor([[row.length] for row in rows] or [[0]])
    attention_mask = columns < ends
    completion = attention_mask & (columns >= begins)
    rollouts = [row.rollout for row in rows]
    masks = ((True,) * len(r.completion_ids) if r.loss_mask is None else r.loss_mask for r in rollouts)
    loss_mask = _fill(completion, masks, False)
    weights = torch.tensor([[row.token_weight] for row in rows] or [[0.0]])
    bounds = [UNBOUNDED if row.max_staleness is None else row.max_staleness for row in rows] or [UNBOUNDED]
    return RolloutBatch(
        input_ids=_fill(attention_mask, (row.prompt_ids + row.rollout.completion_ids for row in rows), pad_token_id),
        attention_mask=attention_mask,
        loss_mask=loss_mask,
        behavior_logprobs=_fill(completion, (r.behavior_logprobs for r in rollouts), 0.0).masked_fill_(~loss_mask, 0.0),
        versions=_fill(completion, (r.versions for r in rollouts), 0),
        advantages=_fill(completion, (row.advantages for row in rows), 0.0).masked_fill_(~loss_mask, 0.0),
        token_weights=torch.where(loss_mask, weights, 0.0),
        rewards=torch.tensor([row.rollout.reward for row in rows] or [0.0]),
        group_index=torch.tensor([row.group_index for row in rows] or [-1]),
        lengths=torch.tensor([rollout.num_policy_tokens for rollout in rollouts] or [0]),
        temperature=temperature,
        truncated=truncated,
        max_staleness=torch.tensor(bounds),
        **_heads(completion, [rollout.head for rollout in rollouts if rollout.head is not None], head_width),
        experts=_experts(attention_mask.shape, rollouts, experts_shape),
    )


def _head_width(rollouts: Sequence[Rollout]) -> int | None:
    """Entries per token of the step's recorded distributions; None unless every rollout with tokens has them."""
    heads = [rollout.head for rollout in rollouts if rollout.head is not None or rollout.completion_ids]
    known = [head for head in heads if head is not None]
    return known[0].width if known and len(known) == len(heads) else None


def _heads(completion: Bool[Tensor, "B T"], heads: Sequence[SamplerHead], width: int | None) -> dict[str, Any]:
    """Recorded distributions in the places of their tokens, unknown ones elsewhere; nothing if the step has none."""
    if width is None:
        return {}
    whole = join_heads([*heads, blank_head(0, width)])
    shape = (*completion.shape, width)
    head_ids = torch.zeros(shape, dtype=torch.long)
    head_logprobs = torch.full(shape, -torch.inf)
    entropy = torch.full(completion.shape, torch.nan)
    head_ids[completion], head_logprobs[completion] = whole.ids.long(), whole.logprobs
    entropy[completion] = whole.entropy
    return {"head_ids": head_ids, "head_logprobs": head_logprobs, "behavior_entropy": entropy}


def _experts_shape(rollouts: Sequence[Rollout]) -> tuple[int, int] | None:
    """Routers and experts per token, if any rollout of the step has chosen experts."""
    return next((rollout.experts.shape for rollout in rollouts if rollout.experts is not None), None)


def _experts(
    size: tuple[int, ...], rollouts: Sequence[Rollout], shape: tuple[int, int] | None
) -> Int[Tensor, "B T n k"] | None:
    """Chosen experts in the places of their tokens."""
    if shape is None:
        return None
    experts = torch.full((*size, *shape), OWN_CHOICE, dtype=torch.int16)
    for row, rollout in zip(experts, rollouts, strict=False):  # a row of padding has no rollout
        if rollout.experts is not None:
            row[: len(rollout.experts)] = rollout.experts.experts
    return experts


def _fill(mask: Bool[Tensor, "B T"], rows: Iterable[Sequence[Value]], rest: Value) -> Tensor:
    """Scatters values row by row into the places of `mask`, with `rest` elsewhere; builds a single tensor."""
    values = torch.tensor(list(chain.from_iterable(rows)), dtype=torch.tensor(rest).dtype)
    return torch.full(mask.shape, rest).masked_scatter_(mask, values)
