"""Rollouts that do not train, or not as a whole, count in lengths and baselines as if they did."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from groups import group

from lit_async_rl.advantages.group import (
    GDPO,
    AdvantageEstimator,
    GlobalMeanStd,
    GroupMean,
    GroupMeanStd,
    LeaveOneOut,
    LengthWeighted,
    LogMeanExp,
    TurnReturns,
)
from lit_async_rl.data.collate import collate_step
from lit_async_rl.losses.aggregation import TokenBudget, TokenMean
from lit_async_rl.rollouts.intake import OverlongFilter
from lit_async_rl.types import RolloutGroup


def masked_step(seed: int) -> list[RolloutGroup]:
    """Groups of which some rollouts were cut, or are masked by their own environment's tokens."""
    random_of = random.Random(seed)
    found = []
    for index in range(3):
        lengths = [random_of.randint(2, 9) for _ in range(4)]
        made = group([random_of.random() for _ in lengths], lengths=lengths, index=index)
        masks = [(True, False) if random_of.random() < 0.5 else (True, True) for _ in lengths]
        rollouts = tuple(
            replace(one, loss_mask=(*mask, *[True] * (length - 2)))
            for one, mask, length in zip(made.rollouts, masks, lengths, strict=True)
        )
        found.append(replace(made, rollouts=rollouts))
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "estimator",
    [
        LengthWeighted(),
        GroupMean(),
        GroupMeanStd(),
        LeaveOneOut(),
        GlobalMeanStd(),
        GDPO(),
        LogMeanExp(),
        TurnReturns(),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_budget_of_tokens_changes_no_advantage(estimator: AdvantageEstimator, seed: int) -> None:
    groups = masked_step(seed)
    found = {}
    for budget in (None, 7, 1):
        aggregation = TokenMean() if budget is None else TokenBudget(budget, fill=True)
        (batch,) = collate_step(
            groups,
            advantage=estimator,
            aggregation=aggregation,
            num_micro_batches=1,
            pad_token_id=0,
            temperature=1.0,
        )
        found[budget] = [batch.advantages[:, 0].tolist(), batch.lengths.tolist()]
    assert found[7] == found[1] == found[None]


def test_a_masked_rollout_stays_in_the_length_weighted_baseline() -> None:
    made = group([1.0, 1.0, 0.0], lengths=[11, 12, 20], reasons=["stop", "stop", "length"])
    values = [row[0] for row in LengthWeighted().per_token([OverlongFilter()(made)])[0]]
    baseline = sum(n * reward for n, reward in ((11, 1.0), (12, 1.0), (20, 0.0))) / (11 + 12 + 20)
    assert values == pytest.approx([1 - baseline, 1 - baseline, -baseline])
    assert values == pytest.approx([0.4651, 0.4651, -0.5349], abs=1e-4)
    assert values == [row[0] for row in LengthWeighted().per_token([made])[0]]
