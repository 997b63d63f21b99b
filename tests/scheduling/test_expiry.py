"""The bound holds whatever is dropped, a slot is never empty, and what expires is what is too old."""

import math
from collections import deque
from fractions import Fraction

import pytest
from groups import simulated
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lit_async_rl.prompts.stream import PromptStream
from lit_async_rl.rollouts.intake import Intake
from lit_async_rl.scheduling.admission import Admission, Drop, ExpiringAdmission, Retry


def eight_rounds(admission, bound, num_slots, data, drop_rate=0.0):
    """Groups finish in any order, some are dropped then, and each drop is refilled at once."""
    running: dict[int, int] = {}
    finished: dict[int, int] = {}
    for _ in range(8):
        while admission.num_left_in_round:
            for _ in range(admission.num_admissible):
                running[admission.admit()] = admission.round
            assert len(running) + len(finished) == num_slots(), "a slot is empty"
            chosen = admission.choose()
            if chosen is not None:
                admission.take(chosen)
                assert admission.round - finished.pop(chosen) <= bound
                continue
            assert running, "nothing to wait for: a deadlock"
            index = sorted(running)[data.draw(st.integers(0, len(running) - 1))]
            begun = running.pop(index)
            if data.draw(st.floats(0, 1)) < drop_rate:
                admission.drop(index)
            else:
                finished[index] = begun
                admission.finish(index)
            assert admission.lose() == []
        if running:
            index = min(running)
            finished[index] = running.pop(index)
            admission.finish(index)
        assert admission.choose() is None, "the round is full"
        admission.advance()
        lost = set(admission.lose())
        assert lost == {i for i, begun in (running | finished).items() if admission.round - begun > bound}
        for index in lost:
            (running if index in running else finished).pop(index)


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(0, 5), st.floats(0, 0.8), st.data())
def test_refilled_slots_keep_the_bound_and_the_engine_full(groups, bound, drop_rate, data):
    admission = Admission(groups, bound)
    eight_rounds(admission, bound, lambda: (bound + 1) * groups - admission.num_taken, data, drop_rate)


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(0, 3), st.sampled_from([0.0, 0.5, 2.0, 6.0]), st.data())
def test_what_expires_is_exactly_what_is_too_old(groups, bound, ahead, data):
    """There is always room to begin, progress in every round, and no group trains beyond the bound."""
    eight_rounds(ExpiringAdmission(groups, bound, ahead), bound, lambda: math.floor((1 + ahead) * groups), data)


@given(st.integers(1, 300), st.integers(0, 1000))
@example(25, 16)
def test_slots_are_those_of_the_decimal_number_that_was_written(groups, hundredths):
    admission = ExpiringAdmission(groups, 1, hundredths / 100)
    assert admission.num_admissible == math.floor((1 + Fraction(hundredths, 100)) * groups)


def test_a_prompt_is_tried_so_often_in_a_row_and_no_more():
    intake = Intake()
    assert [intake.lose(n, 0, position, 1.0, 1.0, 3) for n, position in enumerate([7, 7, 5, 7])] == [True] * 3 + [False]
    assert (Drop().make(1, 0).max_tries, Retry(max_tries=3).make(1, 0).max_tries) == (1, 3)
    assert not Intake().lose(0, 0, 7, 1.0, 1.0)


@pytest.mark.parametrize("policy", [Drop(ahead=4.0), Retry(ahead=4.0, max_tries=100)])
def test_dropping_at_the_bound_loses_long_completions_and_says_so(policy):
    # room for all: what is lost is lost because it is long, not because it never began
    steps, producer = simulated(Intake(), 1, lambda p, c: 1.0, 30, num_slots=64, policy=policy)
    for version, groups in enumerate(steps):
        for one in groups:
            assert version - min(v for rollout in one.rollouts for v in rollout.versions) <= 1
    fates = producer.stats().fates
    trained, expired = fates["trained"], fates["expired"]
    assert trained.num_groups == 120
    assert expired.num_groups > 30
    assert expired.length / expired.num_groups > 1.2 * trained.length / trained.num_groups


def test_retry_samples_the_same_prompts_again_and_drop_does_not():
    _, dropped = simulated(Intake(), 0, lambda p, c: 1.0, 12, policy=Drop(ahead=2.0))
    _, retried = simulated(Intake(), 0, lambda p, c: 1.0, 12, policy=Retry(ahead=2.0, max_tries=10**6))
    lost = sum(totals.num_groups for fate, totals in retried.stats().fates.items() if fate != "trained")
    assert lost > 20
    # every position is trained on, waiting to be sampled again, or being sampled: none is lost
    assert retried.stream.position == 48 + len(retried.again) + len(retried.book.groups)
    assert dropped.stream.position > 48 + 12
    assert not dropped.again


def test_waiting_loses_nothing():
    _, producer = simulated(Intake(), 1, lambda p, c: 1.0, 10)
    assert set(producer.stats().fates) == {"trained"}
    assert producer.stats().fates["trained"].num_groups == 40


def test_all_groups_are_looked_at_once_a_round_and_not_for_every_group():
    class Counted(dict):
        looks = 0

        def items(self):
            Counted.looks += 1
            return super().items()

    admission = ExpiringAdmission(4, 1, 8.0)
    admission._deadlines = Counted()
    for _ in range(3):
        for _ in range(admission.num_admissible):
            admission.finish(admission.admit())
            admission.lose()
        for _ in range(admission.num_left_in_round):
            admission.take(admission.choose())
            admission.lose()
        before = Counted.looks
        admission.advance()
        for _ in range(5):
            admission.lose()
        assert Counted.looks <= before + 1


class _Losses(Intake):
    """Records which prompts were lost and are to be sampled again, in `events` shared with the stream."""

    def __init__(self, events):
        super().__init__()
        self.events = events

    def lose(self, index, number, position, **progress):
        again = super().lose(index, number, position, **progress)
        if again:
            self.events.append(("lost", position))
        return again


def test_lost_prompts_are_sampled_again_before_new_ones_and_in_the_order_in_which_they_were_lost(monkeypatch):
    """Newest first would leave some waiting for ever while the engine is behind."""
    events = []
    at = PromptStream.at

    def recorded(stream, position):
        events.append(("sampled", position))
        return at(stream, position)

    monkeypatch.setattr(PromptStream, "at", recorded)
    simulated(_Losses(events), 0, lambda p, c: 1.0, 12, policy=Retry(ahead=2.0, max_tries=10**6))
    waiting = deque()
    num_waiting = []
    num_new = 0
    for what, position in events:
        if what == "lost":
            waiting.append(position)
            num_waiting.append(len(waiting))
        elif waiting:
            assert position == waiting.popleft()
        else:
            assert position == num_new
            num_new += 1
    assert max(num_waiting) > 1, "one at a time has no order"
    assert num_new >= 48
