"""What becomes of a group that has its rewards: kept, changed, or dropped and counted."""

import collections
from dataclasses import replace

import pytest
from flow import fit, make_data, make_module
from groups import collate, group, simulated
from hypothesis import given
from hypothesis import strategies as st

from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.rollouts.intake import DynamicSampling, Intake, OverlongFilter, OverlongPenalty


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_dynamic_sampling_trains_on_groups_with_a_signal_only_and_counts_the_others(max_staleness):
    calls = collections.Counter()

    def reward(prompt, completion):
        """One of two completions of every third prompt is right."""
        calls[prompt.text] += 1
        return float(has_signal(prompt) and calls[prompt.text] % 2 == 0)

    def has_signal(prompt):
        return sum(map(int, filter(str.isdigit, prompt.text))) % 3 == 0

    steps, producer = simulated(Intake([DynamicSampling()]), max_staleness, reward, 10)
    for version, groups in enumerate(steps):
        for one in groups:
            assert has_signal(one.prompt)
            assert len({rollout.reward for rollout in one.rollouts}) == 2
            assert version - min(v for rollout in one.rollouts for v in rollout.versions) <= max_staleness
    fates, book = producer.stats().fates, producer.book
    assert fates["trained"].num_groups == 40
    dropped = fates["no_signal"]
    assert 40 + dropped.num_groups + len(book.groups) == producer.stream.position
    assert dropped.num_groups > 20
    assert dropped.length > 0


def test_a_solved_task_ends_instead_of_sampling_for_ever(caplog):
    intake = Intake([DynamicSampling(max_in_a_row=5)])
    steps, producer = simulated(intake, 0, lambda p, c: 1.0, 3)
    assert sum(len(groups) for groups in steps) == 12
    assert producer.stats().fates["no_signal"].num_groups == 5
    assert [record for record in caplog.records if "5 groups in a row" in record.getMessage()]


def test_groups_without_a_signal_are_kept_when_too_many_came_in_a_row():
    keeps, flat, signal = DynamicSampling(tolerance=0.25, max_in_a_row=2), group([0.5, 0.75]), group([0.0, 0.5])
    came = [flat, signal, flat, flat, flat, flat, signal, flat]
    assert [keeps(one) is one for one in came] == [False, True, False, False, True, True, True, False]


def test_the_penalty_counts_what_the_policy_wrote():
    (said, told) = group([1.0, 1.0], [9, 9]).rollouts
    told = replace(told, loss_mask=(True,) * 5 + (False,) * 4)  # an environment's answer, say
    shaped = OverlongPenalty(9, 4)(replace(group([1.0, 1.0]), rollouts=(said, told)))
    assert [rollout.reward for rollout in shaped.rollouts] == [0.0, 1.0]


def dapo_penalty(length, max_tokens, buffer, factor):
    """As the paper writes it, in three cases."""
    if length <= max_tokens - buffer:
        return 0.0
    if length <= max_tokens:
        return factor * ((max_tokens - buffer) - length) / buffer
    return -factor


@given(st.integers(1, 40), st.integers(1, 30), st.integers(0, 30), st.floats(0, 2))
def test_overlong_penalty_is_the_papers(length, buffer, extra, factor):
    shaped = OverlongPenalty(buffer + extra, buffer, factor)(group([1.0, 0.0], [length, 1]))
    expected = [
        1.0 + dapo_penalty(length, buffer + extra, buffer, factor),
        dapo_penalty(1, buffer + extra, buffer, factor),
    ]
    assert [rollout.reward for rollout in shaped.rollouts] == pytest.approx(expected, abs=1e-12)


def test_cut_off_rollouts_do_not_train_and_stay_in_the_baseline():
    module, data = make_module(), make_data(filters=[OverlongFilter()], sampling=SamplingParams(max_tokens=8))
    fit(module, data, max_steps=1)  # eight digits and no end: hardly any is finished
    rollouts = [rollout for one in data.last_step_groups for rollout in one.rollouts]
    finished = [rollout for rollout in rollouts if rollout.finish_reason == "stop"]
    assert len(finished) < len(rollouts) == 16
    assert module.stabilizer_signals["mask"].sum() == sum(len(rollout.token_ids) for rollout in finished)
    mixed = OverlongFilter()(group([1.0, 0.0], reasons=["stop", "length"]))
    assert [rollout.num_trained_tokens for rollout in mixed.rollouts] == [3, 0]
    assert [rollout.reward for rollout in mixed.rollouts] == [1.0, 0.0]


def test_filters_act_in_their_order():
    """Two equally right completions, one too long: accuracy says no signal, the shaped reward says there is one."""
    two = group([1.0, 1.0], [3, 9])
    accuracy_first = Intake([DynamicSampling(), OverlongPenalty(9, 4)])
    shaped_first = Intake([OverlongPenalty(9, 4), DynamicSampling()])
    assert accuracy_first.filter_group(two, 0) is None
    kept = shaped_first.filter_group(two, 0)
    assert kept is not None
    assert [rollout.reward for rollout in kept.rollouts] == [1.0, 0.0]
    assert accuracy_first.pass_rates.of(0) == 1.0
    shaped_first.trained(kept, 0, 0)
    assert shaped_first.pass_rates.of(0) == 1.0, "a pass rate is that of rewards before they were shaped"


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)], ids=["filter_first", "penalty_first"])
def test_a_cut_completion_is_penalised_and_masked_in_either_order(order):
    filters = [OverlongFilter(), OverlongPenalty(max_tokens=10, buffer_tokens=4)][order]
    found = group([1.0, 1.0, 1.0], [3, 8, 10], reasons=["stop", "stop", "length"])
    for one in filters:
        found = one(found)
    assert [rollout.reward for rollout in found.rollouts] == [1.0, 0.5, 0.0]
    assert [rollout.num_trained_tokens for rollout in found.rollouts] == [3, 8, 0]


def test_masked_completions_count_in_the_mean_length():
    found = OverlongFilter()(group([1.0, 0.0], [3, 10], reasons=["stop", "length"]))
    (batch,) = collate([found], 1)
    assert sorted(batch.lengths.tolist()) == [3, 10]
    assert int(batch.loss_mask.sum()) == 3
