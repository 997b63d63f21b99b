"""Collates the groups of one optimizer step into padded micro-batches.

B rows of a micro-batch, T positions. A rollout is one row, and one more for each of its branches, all in one
micro-batch: a token's advantage is that of its rollout or turn, times the credit of its row; its weight is that of the
rollout, whose length counts all rows. Rollouts are sorted by length and cut into contiguous runs, which minimizes the
padded size of the largest micro-batch and with it peak memory; where prefixes are shared, groups are, by the tokens of
their trees (`lit_async_rl.data.tree_cuts`), unless separate rows take less time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lit_async_rl.advantages.group import AdvantageEstimator
from lit_async_rl.data.tree_cuts import TreePart, split_trees
from lit_async_rl.errors import InvariantError
from lit_async_rl.losses.aggregation import Aggregation
from lit_async_rl.models.packing import TreeCosts
from lit_async_rl.problem import Prompt
from lit_async_rl.sampler_records import OWN_CHOICE, SamplerHead, blank_head, join_heads
from lit_async_rl.types import RolloutBatch, RolloutGroup, TokenRow

Value = TypeVar("Value", bool, int, float)
UNBOUNDED = 2**62  # versions


@dataclass(frozen=True)
class _Row:
    """One row of a rollout with its advantages and token weight, which depend on the whole step."""

    prompt_ids: tuple[int, ...]
    rollout: TokenRow
    reward: float  # NaN of a branch
    num_policy_tokens: int  # of the rollout
    advantages: Sequence[float]  # of the completion's tokens
    token_weight: float
    group_index: int
    rollout_index: tuple[int, int]  # position of the group in the step, and number within it
    max_staleness: int | None

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt_ids + self.rollout.token_ids

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.rollout.token_ids)


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
    shares_prefixes: bool = False,
    tree_costs: TreeCosts | None = None,
    needs_single_rows: str = "",
    source_of: Callable[[Prompt], int] | None = None,
) -> list[RolloutBatch]:
    """All micro-batches of one optimizer step; token weights are normalized over the whole step.

    Groups are first sorted by admission, so the order in which they finished does not matter. With `keep_groups_whole`
    no group is split over micro-batches. With `shares_prefixes` micro-batches are balanced by the tokens that
    `PrefixTreePacking` computes, and groups larger than a micro-batch are cut; with `tree_costs` likewise, if that
    takes less time than separate rows.

    Raises:
        ValueError: a rollout has branches, and a setting of the objective needs one row (`needs_single_rows`, with the
            remedy), or `advantage` does not give a value for each token.
    """
    units = _units(groups, advantage=advantage, aggregation=aggregation, needs_single_rows=needs_single_rows)
    rollouts = [row.rollout for group in units for rows in group for row in rows]
    head_width = _head_width(rollouts)
    experts_shape = _experts_shape(rollouts)
    if truncated and not head_width and any(rollout.token_ids for rollout in rollouts):
        raise InvariantError(
            "data.sampling truncates the distribution (top_p, top_k, min_p), but the engine did not record "
            "which tokens it could sample"
        )
    pad = partial(
        _pad,
        pad_token_id=pad_token_id,
        temperature=temperature,
        truncated=truncated,
        head_width=head_width,
        experts_shape=experts_shape,
    )
    whole_groups = [list(chain.from_iterable(group)) for group in units]
    parts: Sequence[list[_Row]] = split_units(
        whole_groups if keep_groups_whole else list(chain.from_iterable(units)), num_micro_batches
    )
    reason = ""
    if shares_prefixes or tree_costs is not None:
        trees = split_trees(units, num_micro_batches, keep_whole=keep_groups_whole)
        reason = "" if tree_costs is None else _why_rows(trees, parts, tree_costs)
        parts = parts if reason else [part.rows for part in trees]
    batches = [pad(part).replace(as_rows=reason) for part in parts]
    return batches if source_of is None else _with_sources(batches, groups, source_of)


def _units(
    groups: Sequence[RolloutGroup],
    *,
    advantage: AdvantageEstimator,
    aggregation: Aggregation,
    needs_single_rows: str,
) -> list[list[list[_Row]]]:
    """The rows of each rollout of each group, sorted by admission; raises as `collate_step`."""
    whole = sorted(groups, key=lambda group: group.index)
    advantages = advantage.per_token(whole)  # tokens beyond a budget do not train, but count in lengths and baselines
    groups = aggregation.select(whole)
    num_policy_tokens = iter([rollout.num_policy_tokens for group in whole for rollout in group.rollouts])
    of_rollouts = aggregation.of_step(groups)
    if len(of_rollouts) != (number := sum(len(group.rollouts) for group in groups)):
        raise ValueError(
            f"data.aggregation={type(aggregation).__name__} must return one weight for each rollout: the step has "
            f"{number} rollouts, but {len(of_rollouts)} weights were returned"
        )
    weights = iter(of_rollouts)
    for group, rows in zip(groups, advantages, strict=True):
        for rollout, values in zip(group.rollouts, rows, strict=True):
            if rollout.branches and needs_single_rows:
                raise ValueError(
                    "a conversation of this agent has branches, so its rollout has several rows (training sequences). "
                    "Use an agent whose conversations have no branches, or change the setting that needs rollouts of "
                    f"one row: {needs_single_rows}"
                )
            if len(values) != rollout.num_tokens:
                raise ValueError(
                    f"data.advantage={type(advantage).__name__}: per_token must return one advantage for each token "
                    f"of a rollout and its branches: a rollout has {rollout.num_tokens} tokens, but {len(values)} "
                    "advantages were returned"
                )
    return [
        [
            [
                _Row(
                    group.prompt_ids if row.prompt_ids is None else row.prompt_ids,
                    row,
                    reward=rollout.reward if row is rollout else math.nan,
                    num_policy_tokens=length,
                    advantages=[value * row.credit for value in islice(values, len(row.token_ids))],
                    token_weight=token_weight,
                    group_index=group.index,
                    rollout_index=(position, number),
                    max_staleness=group.max_staleness,
                )
                for row in rollout.rows
            ]
            for number, (rollout, values, token_weight, length) in enumerate(
                zip(group.rollouts, map(iter, rows), weights, num_policy_tokens, strict=False)
            )
        ]
        for position, (group, rows) in enumerate(zip(groups, advantages, strict=True))
    ]


def _why_rows(parts: Sequence[TreePart[_Row]], separate: Sequence[Sequence[_Row]], costs: TreeCosts) -> str:
    """Reason for separate rows, by estimate; empty if trees cost less."""
    rows = [part for part in separate if part]
    longest = max(map(_longest, rows), default=0)
    if longest - 1 > costs.window:  # the last token is not computed
        return f"the longest has {longest} tokens, and the model's attention window {costs.window}"
    if sum(costs.of_trees(part.trees) for part in parts) <= sum(
        costs.of_rows(len(part), _longest(part)) for part in rows
    ):
        return ""
    computed = sum(tree.num_tokens for part in parts for tree in part.trees)
    share = 1 - computed / sum(row.length for part in rows for row in part)
    return f"trees would take longer, because rows have {share:.0%} of their tokens in common"


def _with_sources(
    batches: Sequence[RolloutBatch], groups: Sequence[RolloutGroup], source_of: Callable[[Prompt], int]
) -> list[RolloutBatch]:
    """Batches with the number of each row's source; rows of padding have the first."""
    sources = {group.index: source_of(group.prompt) for group in groups}
    return [
        batch.replace(source=torch.tensor([sources.get(index, 0) for index in batch.group_index.tolist()]))
        for batch in batches
    ]


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
    *,
    pad_token_id: int,
    temperature: float,
    truncated: bool,
    head_width: int | None,
    experts_shape: tuple[int, int] | None,
) -> RolloutBatch:
    """One micro-batch; without rows one of padding, because every rank must run every forward pass."""
    width = max((row.length for row in rows), default=2)
    columns = torch.arange(width)
    begins = torch.tensor([[len(row.prompt_ids)] for row in rows] or [[0]])
    ends = torch.tensor([[row.length] for row in rows] or [[0]])
    attention_mask = columns < ends
    completion = attention_mask & (columns >= begins)
    rollouts = [row.rollout for row in rows]
    masks = ((True,) * len(r.token_ids) if r.loss_mask is None else r.loss_mask for r in rollouts)
    loss_mask = _fill(completion, masks, False)
    weights = torch.tensor([[row.token_weight] for row in rows] or [[0.0]])
    numbers = {index: n for n, index in enumerate(dict.fromkeys(row.rollout_index for row in rows))}
    has_credits = any(rollout.credit != 1 for rollout in rollouts)
    bounds = [UNBOUNDED if row.max_staleness is None else row.max_staleness for row in rows] or [UNBOUNDED]
    return RolloutBatch(
        input_ids=_fill(attention_mask, (row.tokens for row in rows), pad_token_id),
        attention_mask=attention_mask,
        loss_mask=loss_mask,
        behavior_logprobs=_fill(completion, (r.logprobs for r in rollouts), 0.0).masked_fill_(~loss_mask, 0.0),
        versions=_fill(completion, (r.versions for r in rollouts), 0),
        advantages=_fill(completion, (row.advantages for row in rows), 0.0).masked_fill_(~loss_mask, 0.0),
        token_weights=torch.where(loss_mask, weights, 0.0),
        rewards=torch.tensor([row.reward for row in rows] or [0.0]),
        group_index=torch.tensor([row.group_index for row in rows] or [-1]),
        lengths=torch.tensor([row.num_policy_tokens for row in rows] or [0]),
        rollout=torch.tensor([numbers[row.rollout_index] for row in rows]) if len(numbers) < len(rows) else None,
        credits=_fill(completion, ((r.credit,) * len(r.token_ids) for r in rollouts), 1.0) if has_credits else None,
        temperature=temperature,
        truncated=truncated,
        max_staleness=torch.tensor(bounds),
        **_heads(completion, [rollout.head for rollout in rollouts if rollout.head is not None], head_width),
        experts=_experts(attention_mask.shape, rollouts, experts_shape),
    )


def _head_width(rollouts: Sequence[TokenRow]) -> int | None:
    """Entries per token of the step's recorded distributions; None unless every rollout with tokens has them."""
    heads = [rollout.head for rollout in rollouts if rollout.head is not None or rollout.token_ids]
    known = [head for head in heads if head is not None]
    return known[0].width if known and len(known) == len(heads) else None


def _heads(completion: Bool[Tensor, "B T"], heads: Sequence[SamplerHead], width: int | None) -> dict[str, Any]:
    """Recorded distributions at their tokens, unknown ones elsewhere; nothing if the step has none."""
    if width is None:
        return {}
    whole = join_heads([*heads, blank_head(0, width)])
    shape = (*completion.shape, width)
    head_ids = torch.zeros(shape, dtype=torch.long)
    head_logprobs = torch.full(shape, -torch.inf)
    entropy = torch.full(completion.shape, torch.nan)
    head_ids[completion] = whole.ids.long()
    head_logprobs[completion] = whole.logprobs
    entropy[completion] = whole.entropy
    return {"head_ids": head_ids, "head_logprobs": head_logprobs, "behavior_entropy": entropy}


def _experts_shape(rollouts: Sequence[TokenRow]) -> tuple[int, int] | None:
    """Routers and experts per token, if any rollout of the step has chosen experts."""
    return next((rollout.experts.shape for rollout in rollouts if rollout.experts is not None), None)


def _experts(
    size: tuple[int, ...], rollouts: Sequence[TokenRow], shape: tuple[int, int] | None
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


# -- A step that is trained on while it is still being sampled (Periodic Asynchrony, arXiv:2511.18871) ----------------
# Groups come in the order in which they finish. Every so many of them are a micro-batch, which is trained on at once;
# the optimizer step comes after the last. The gradient of a step is a sum over its groups, so their order does not
# matter; but what the sum is divided by (the tokens of the step, say) is known only at its end. Micro-batches are
# therefore weighted by a guess Z' of that divisor, made from the first of them, and the gradient is rescaled by Z' / Z,
# once, before a callback reads it.
#
# What differs from the paper: a micro-batch may be several groups, and `max_staleness` above 0 may be streamed too.


@dataclass(frozen=True)
class PartWeights(Aggregation):
    """Token weights of some groups of a step, as if the step's divisor were `divisor_of_step`.

    Args:
        aggregation: of the step.
        divisor_of_step: Z'.
    """

    aggregation: Aggregation
    divisor_of_step: float

    def __call__(self, lengths: Sequence[int], group_sizes: Sequence[int]) -> list[float]:
        """Weights in the part, rescaled from its own divisor to the step's."""
        divisor = self.aggregation.divisor(lengths, group_sizes)
        factor = 1.0 if divisor is None else divisor / self.divisor_of_step
        return [factor * weight for weight in self.aggregation(lengths, group_sizes)]


class StreamedStep:
    """The parts of one optimizer step, in the order in which their groups finish.

    Args:
        aggregation: weight of each token in the average over the step.
        num_groups: of the step.
        num_parts: number of nearly equal parts.

    Attributes:
        groups: received so far.
        num_begun: parts received so far.
    """

    def __init__(self, aggregation: Aggregation, num_groups: int, num_parts: int) -> None:
        self.aggregation = aggregation
        self.num_groups = num_groups
        self.num_parts = num_parts
        self.groups: list[RolloutGroup] = []
        self.num_begun = 0
        self._divisor = 0.0  # of the groups that have come
        self._guess = 1.0

    @property
    def is_done(self) -> bool:
        """Whether all groups were received."""
        return len(self.groups) == self.num_groups

    @property
    def next_size(self) -> int:
        """Number of groups in the next part."""
        return (self.num_begun + 1) * self.num_groups // self.num_parts - len(self.groups)

    def add(self, groups: Sequence[RolloutGroup]) -> PartWeights:
        """Adds the next part; returns its token weights."""
        if len(groups) != self.next_size:
            raise InvariantError(f"a streamed micro-batch must have {self.next_size} groups, got {len(groups)}")
        lengths = [rollout.num_trained_tokens for group in groups for rollout in group.rollouts]
        divisor = self.aggregation.divisor(lengths, [len(group.rollouts) for group in groups])
        if divisor is not None:
            self._divisor += divisor
        if not self.groups:
            self._guess = self._divisor * self.num_groups / len(groups) or 1.0
        self.groups += groups
        self.num_begun += 1
        return PartWeights(self.aggregation, self._guess)

    @property
    def gradient_scale(self) -> float:
        """Factor of the step's gradient after the last part; 1 after the others."""
        return self._guess / self._divisor if self.is_done and self._divisor else 1.0
