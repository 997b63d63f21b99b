"""Advantages against numpy-style loops, and what all of them have in common."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse import ArgumentParser

from lit_async_rl.advantages.group import (
    AdvantageEstimator,
    AsymRE,
    GlobalMeanStd,
    GroupMean,
    GroupMeanStd,
    LeaveOneOut,
    LengthWeighted,
    LogMeanExp,
    Raw,
)

CENTERED_GROUPS = [GroupMean(), GroupMeanStd(), LeaveOneOut(), GlobalMeanStd(group_baseline=True)]
ZERO_WHEN_EQUAL = [*CENTERED_GROUPS, LengthWeighted(), LogMeanExp(), LogMeanExp(tau=0.1)]
ALL = [*ZERO_WHEN_EQUAL, Raw(), AsymRE(), GlobalMeanStd()]
every = pytest.mark.parametrize("estimator", ALL, ids=lambda e: repr(e).split(" object")[0])

rewards = st.lists(st.lists(st.floats(-2, 2), min_size=1, max_size=6), min_size=1, max_size=4)


def lengths_of(groups: list[list[float]]) -> list[list[int]]:
    return [[1 + 3 * n for n, _ in enumerate(group)] for group in groups]


@pytest.mark.parametrize("estimator", ZERO_WHEN_EQUAL, ids=str)
@given(reward=st.floats(-10, 10), size=st.integers(1, 8), length=st.integers(0, 5))
def test_a_group_of_equal_rewards_gives_exactly_zero(
    estimator: AdvantageEstimator, reward: float, size: int, length: int
) -> None:
    assert estimator([[reward] * size], [[length] * size]) == [[0.0] * size]


@pytest.mark.parametrize("estimator", ZERO_WHEN_EQUAL, ids=str)
def test_a_group_of_equal_rewards_stays_zero_beside_others(estimator: AdvantageEstimator) -> None:
    assert estimator([[0.1] * 3, [0.0, 1.0]])[0] == [0.0] * 3


def test_a_whole_step_of_equal_rewards_gives_zero_with_global_statistics() -> None:
    assert GlobalMeanStd()([[0.1] * 3, [0.1] * 2]) == [[0.0] * 3, [0.0] * 2]


@pytest.mark.parametrize("estimator", CENTERED_GROUPS, ids=str)
@given(groups=rewards)
def test_centered_advantages_sum_to_zero_in_each_group(
    estimator: AdvantageEstimator, groups: list[list[float]]
) -> None:
    for values in estimator(groups):
        assert sum(values) == pytest.approx(0, abs=1e-9 * max(1.0, *map(abs, values)) + 1e-9)


@every
@given(groups=rewards)
def test_output_has_the_shape_of_the_rewards_and_is_finite(
    estimator: AdvantageEstimator, groups: list[list[float]]
) -> None:
    result = estimator(groups, lengths_of(groups))
    assert [len(values) for values in result] == [len(group) for group in groups]
    assert all(math.isfinite(value) for values in result for value in values)


@every
@given(groups=rewards, data=st.data())
def test_order_within_a_group_does_not_matter(
    estimator: AdvantageEstimator, groups: list[list[float]], data: st.DataObject
) -> None:
    orders = [data.draw(st.permutations(range(len(group)))) for group in groups]
    shuffled = [[group[n] for n in order] for group, order in zip(groups, orders, strict=True)]
    lengths = lengths_of(groups)
    moved = [[group[n] for n in order] for group, order in zip(lengths, orders, strict=True)]
    for values, order, got in zip(estimator(groups, lengths), orders, estimator(shuffled, moved), strict=True):
        assert got == pytest.approx([values[n] for n in order], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("estimator", [e for e in ALL if not isinstance(e, Raw)], ids=str)
@given(groups=rewards, shift=st.floats(-3, 3))
def test_a_constant_added_to_all_rewards_changes_nothing(
    estimator: AdvantageEstimator, groups: list[list[float]], shift: float
) -> None:
    groups = [[round(reward, 1) for reward in group] for group in groups]  # apart or equal, nothing in between
    lengths = lengths_of(groups)
    shifted = [[reward + shift for reward in group] for group in groups]
    for values, moved in zip(estimator(groups, lengths), estimator(shifted, lengths), strict=True):
        assert moved == pytest.approx(values, rel=1e-4, abs=1e-4)


@given(groups=rewards)
def test_values_equal_the_formulas(groups: list[list[float]]) -> None:
    flat = [reward for group in groups for reward in group]
    lengths = lengths_of(groups)
    asym, soft = AsymRE(shift=-0.3)(groups), LogMeanExp(tau=0.7)(groups)
    for g, group in enumerate(groups):
        mean, size = statistics.fmean(group), len(group)
        weighted = sum(n * r for n, r in zip(lengths[g], group, strict=True)) / sum(lengths[g])
        for n, reward in enumerate(group):
            others = [r for m, r in enumerate(group) if m != n]
            assert Raw()(groups)[g][n] == reward
            assert GroupMean()(groups)[g][n] == pytest.approx(reward - mean, abs=1e-12)
            assert asym[g][n] == pytest.approx(reward - (mean - 0.3), abs=1e-12)
            value = 0.7 * math.log(sum(math.exp(r / 0.7) for r in group) / size)
            assert soft[g][n] == pytest.approx(reward - value, abs=1e-9)
            if size > 1:
                assert LeaveOneOut()(groups)[g][n] == pytest.approx(reward - statistics.fmean(others), abs=1e-9)
                assert LengthWeighted()(groups, lengths)[g][n] == pytest.approx(reward - weighted, abs=1e-9)
            std = statistics.pstdev(group)
            assert GroupMeanStd(eps=0.1)(groups)[g][n] == pytest.approx((reward - mean) / (std + 0.1), abs=1e-9)
            expected = (reward - statistics.fmean(flat)) / (statistics.pstdev(flat) + 0.1)
            assert GlobalMeanStd(eps=0.1)(groups)[g][n] == pytest.approx(expected, abs=1e-9)


def test_group_baseline_is_divided_by_the_spread_of_the_whole_step() -> None:
    result = GlobalMeanStd(group_baseline=True, eps=0.0)([[0.0, 1.0], [0.0, 0.0]])
    assert result == [pytest.approx([-(2**0.5), 2**0.5]), [0.0, 0.0]]


def test_length_weighted_without_lengths_is_the_group_mean() -> None:
    assert LengthWeighted()([[0.0, 1.0, 1.0]])[0] == pytest.approx(GroupMean()([[0.0, 1.0, 1.0]])[0])


def test_completions_without_tokens_are_no_baseline_and_no_error() -> None:
    assert LengthWeighted()([[1.0, 0.0], [1.0, 0.0]], [[0, 0], [0, 4]]) == [[0.0, 0.0], [1.0, 0.0]]


@every
def test_empty_groups_and_steps_are_no_error(estimator: AdvantageEstimator) -> None:
    assert estimator([]) == []
    assert estimator([[], []]) == [[], []]


@every
@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(estimator: AdvantageEstimator, reward: float) -> None:
    with pytest.raises(ValueError, match=r"rewards must be finite, but group 1"):
        estimator([[0.0], [1.0, reward]])


@pytest.mark.parametrize("make", [lambda: GroupMeanStd(eps=-1.0), lambda: GlobalMeanStd(eps=-1.0)])
def test_a_negative_eps_is_refused(make) -> None:
    with pytest.raises(ValueError, match="eps"):
        make()


def test_a_temperature_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="tau"):
        LogMeanExp(tau=0.0)


@pytest.mark.parametrize("estimator", ALL, ids=str)
def test_every_estimator_is_named_and_built_by_yaml(estimator: AdvantageEstimator) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--advantage", type=AdvantageEstimator)
    config = {"class_path": f"lit_async_rl.advantages.group.{type(estimator).__name__}"}
    built = parser.instantiate_classes(parser.parse_object({"advantage": config})).advantage
    assert type(built) is type(estimator)
