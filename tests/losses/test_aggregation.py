"""Averages: weights of tokens over one optimizer step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_async_rl.losses.aggregation import Aggregation, FixedLength, PromptMean, SequenceMean, TokenBudget, TokenMean

AVERAGES = [TokenMean(), SequenceMean(), PromptMean()]
ALL = [*AVERAGES, FixedLength(16), TokenBudget(1000)]

groups_of_lengths = st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=5), min_size=1, max_size=5)


def weigh(aggregation: Aggregation, groups: list[list[int]]) -> tuple[list[int], list[float]]:
    lengths = [length for group in groups for length in group]
    return lengths, aggregation(lengths, [len(group) for group in groups])


@pytest.mark.parametrize("average", AVERAGES, ids=lambda a: type(a).__name__)
@given(groups=groups_of_lengths)
def test_weights_of_an_average_sum_to_one_over_the_step(average: Aggregation, groups: list[list[int]]) -> None:
    lengths, weights = weigh(average, groups)
    total = sum(length * weight for length, weight in zip(lengths, weights, strict=True))
    assert total == pytest.approx(1.0 if any(lengths) else 0.0)


@pytest.mark.parametrize("aggregation", ALL, ids=str)
@given(groups=groups_of_lengths)
def test_weights_are_finite_and_not_negative_also_for_empty_rollouts(
    aggregation: Aggregation, groups: list[list[int]]
) -> None:
    _, weights = weigh(aggregation, groups)
    assert all(0 <= weight <= 1 for weight in weights)


@given(groups=groups_of_lengths)
def test_each_average_counts_what_it_names_the_same(groups: list[list[int]]) -> None:
    lengths, tokens = weigh(TokenMean(), groups)
    assert len(set(tokens)) == 1
    _, sequences = weigh(SequenceMean(), groups)
    per_rollout = [length * weight for length, weight in zip(lengths, sequences, strict=True) if length]
    assert per_rollout == pytest.approx([1 / max(1, len(per_rollout))] * len(per_rollout))
    prompts = iter(weigh(PromptMean(), groups)[1])
    per_prompt = [sum(length * next(prompts) for length in group) for group in groups]
    full = [total for total, group in zip(per_prompt, groups, strict=True) if any(group)]
    assert full == pytest.approx([1 / max(1, len(full))] * len(full))


@given(groups=groups_of_lengths)
def test_an_empty_rollout_changes_no_weight_of_an_average(groups: list[list[int]]) -> None:
    for average in AVERAGES:
        _, weights = weigh(average, groups)
        _, with_empty = weigh(average, [[*groups[0], 0], *groups[1:]])
        del with_empty[len(groups[0])]
        assert with_empty == pytest.approx(weights)


@given(groups=groups_of_lengths)
def test_constant_weights_do_not_look_at_lengths(groups: list[list[int]]) -> None:
    lengths, weights = weigh(FixedLength(16), groups)
    assert weights == [1 / (len(lengths) * 16)] * len(lengths)
    assert weigh(TokenBudget(1000), groups)[1] == [1 / 1000] * len(lengths)


def test_averages_of_equal_lengths_agree() -> None:
    groups = [[5, 5], [5, 5]]
    for aggregation in (TokenMean(), SequenceMean(), PromptMean(), FixedLength(5), TokenBudget(20)):
        assert weigh(aggregation, groups)[1] == pytest.approx([1 / 20] * 4)


def test_a_step_without_rollouts_is_no_error() -> None:
    assert all(aggregation([], []) == [] for aggregation in ALL)


@pytest.mark.parametrize(
    ("make", "setting"), [(lambda: FixedLength(0), "max_tokens"), (lambda: TokenBudget(0), "num_tokens")]
)
def test_a_constant_that_is_not_positive_is_refused(make, setting: str) -> None:
    with pytest.raises(ValueError, match=setting):
        make()


def test_a_budget_that_masks_tokens_is_refused_where_groups_are_trained_one_by_one() -> None:
    budget = TokenBudget(10, fill=True)
    with pytest.raises(ValueError, match=r"data\.stream_groups cannot be combined with TokenBudget\.fill=true"):
        budget.divisor([72, 70], [1, 1])
    assert TokenBudget(10).divisor([72, 70], [1, 1]) is None
