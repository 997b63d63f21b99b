"""From the groups of one optimizer step to padded micro-batches.

B rows of a micro-batch, T positions. Rollouts are sorted by length and cut into runs, so that a micro-batch pads little
and the largest one, which decides peak memory, is as small as runs allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_async_rl.advantages import AdvantageEstimator
from lit_async_rl.aggregation import Aggregation
from lit_async_rl.types import Rollout, RolloutBatch, RolloutGroup


@dataclass(frozen=True)
class _Row:
    """One rollout with what the step's other rollouts decide about it."""

    prompt_ids: tuple[int, ...]
    rollout: Rollout
    advantages: Sequence[float]  # of the completion's tokens
    token_weight: float
    group_index: int

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
    keep_groups_whole: bool = False,
) -> list[RolloutBatch]:
    """All micro-batches of one optimizer step; the token weights of all of them together are what `aggregation` says.

    Groups are put in order of admission first, so the result does not depend on which finished first. With
    `keep_groups_whole` no group is split over micro-batches.
    """
    groups = aggregation.select(sorted(groups, key=lambda group: group.index))
    advantages = advantage.per_token(groups)
    weights = iter(aggregation.of_step(groups))
    units = [
        [
            _Row(group.prompt_ids, rollout, row, next(weights), group.index)
            for rollout, row in zip(group.rollouts, rows, strict=True)
        ]
        for group, rows in zip(groups, advantages, strict=True)
    ]
    if not keep_groups_whole:
        units = [[row] for unit in units for row in unit]
    parts = split_units(units, num_micro_batches)
    return [_pad(part, pad_token_id, temperature) for part in parts]


def split_units(units: Sequence[list[_Row]], num_parts: int) -> list[list[_Row]]:
    """Cuts units (rows that stay together) into `num_parts` runs whose largest padded size is minimal.

    Units are sorted by length first, so that a run pads little; runs may be empty.
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


def _pad(rows: Sequence[_Row], pad_token_id: int, temperature: float) -> RolloutBatch:
    """One micro-batch; without rows a single one of padding, because every rank must run every forward."""
    shape = (max(1, len(rows)), max((row.length for row in rows), default=2))
    input_ids = torch.full(shape, pad_token_id)
    attention_mask, loss_mask = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    versions = torch.zeros(shape, dtype=torch.long)
    behavior_logprobs, advantages, token_weights = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape)
    for n, row in enumerate(rows):
        begin, end = len(row.prompt_ids), row.length
        rollout = row.rollout
        input_ids[n, :end] = torch.tensor(row.prompt_ids + rollout.completion_ids)
        attention_mask[n, :end] = True
        loss_mask[n, begin:end] = True if rollout.loss_mask is None else torch.tensor(rollout.loss_mask)
        behavior_logprobs[n, begin:end] = torch.tensor(rollout.behavior_logprobs)
        versions[n, begin:end] = torch.tensor(rollout.versions)
        advantages[n, begin:end] = torch.tensor(row.advantages)
        token_weights[n, begin:end] = row.token_weight
    return RolloutBatch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        loss_mask=loss_mask,
        behavior_logprobs=_masked(behavior_logprobs, loss_mask),
        versions=versions,
        advantages=_masked(advantages, loss_mask),
        token_weights=_masked(token_weights, loss_mask),
        rewards=torch.tensor([row.rollout.reward for row in rows] or [0.0]),
        group_index=torch.tensor([row.group_index for row in rows] or [-1]),
        temperature=temperature,
    )


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    return values.masked_fill(~mask, 0.0)
