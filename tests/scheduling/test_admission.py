"""The bound as counting: random arrivals, random order of finishing, bounds that change."""

import ast
import math
import subprocess
import sys
from pathlib import Path

import pytest
from flow import make_data
from hypothesis import given
from hypothesis import strategies as st

from lit_async_rl.scheduling.admission import Admission, ExpiringAdmission, RingAdmission


def run(admission: Admission, rounds: int, pick, bounds=None) -> list[tuple[int, int, int]]:
    """(index, admitted, trained) of each group; `pick(n)` chooses which of n unfinished groups finishes next."""
    unfinished: dict[int, int] = {}
    admitted: dict[int, int] = {}
    trained = []
    for _ in range(rounds):
        while admission.num_left_in_round:
            for _ in range(admission.num_admissible):
                index = admission.admit()
                unfinished[index] = admitted[index] = admission.round
            chosen = admission.choose()
            if chosen is not None:
                admission.take(chosen)
                trained.append((chosen, admitted[chosen], admission.round))
                continue
            assert unfinished, "nothing to wait for: a deadlock"
            index = sorted(unfinished)[pick(len(unfinished))]
            del unfinished[index]
            admission.finish(index)
        admission.advance()
        if bounds is not None:
            admission.max_staleness = bounds()
    return trained


@pytest.mark.slow
@given(st.integers(1, 5), st.integers(0, 6), st.booleans(), st.data())
def test_no_group_is_trained_on_beyond_the_bound_and_none_is_lost(groups, bound, in_order, data):
    admission = Admission(groups, bound, in_order)
    trained = run(admission, 12, lambda n: data.draw(st.integers(0, n - 1)))
    assert all(0 <= now - admitted <= bound for _, admitted, now in trained)
    assert len({index for index, _, _ in trained}) == len(trained) == 12 * groups
    if in_order:
        assert [index for index, _, _ in trained] == list(range(12 * groups))


@given(st.integers(1, 8), st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 2.75]), st.data())
def test_a_fractional_ratio_bounds_what_is_under_way_and_its_age(groups, ratio, data):
    admission = Admission(groups, 3, async_ratio=ratio)
    under_way = []

    def pick(n):
        under_way.append(
            admission.next_index - admission.round * groups
        )  # admitted, and not trained on in a round past
        return data.draw(st.integers(0, n - 1))

    trained = run(admission, 10, pick)
    assert all(0 <= now - admitted <= math.ceil(ratio) for _, admitted, now in trained)
    assert len({index for index, _, _ in trained}) == 10 * groups
    assert max(under_way) == math.floor((1 + ratio) * groups)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 1, False, 1.5), r"async_ratio must be in \[0, 1\], got 1\.5"),
        ((2, 1, True, 0.5), "in_order=True"),
        ((2, 1, False, -0.1), "0"),
    ],
)
def test_a_ratio_that_cannot_be_kept_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Admission(*arguments)


@given(st.integers(1, 4), st.data())
def test_a_changed_bound_holds_for_the_groups_admitted_under_it(groups, data):
    admission = Admission(groups, data.draw(st.integers(0, 5)))
    history = [admission.max_staleness]

    def change() -> int:
        history.append(data.draw(st.integers(0, 5)))
        return history[-1]

    for _, admitted, now in run(admission, 15, lambda n: data.draw(st.integers(0, n - 1)), change):
        assert now - admitted <= history[admitted]


def test_synchronous_admits_one_round_at_a_time():
    admission = Admission(3, 0)
    assert admission.num_admissible == 3
    indices = [admission.admit() for _ in range(3)]
    assert admission.num_admissible == 0
    for index in indices:
        admission.take(index)
    assert admission.num_admissible == 0, "slots must not come back before the weights are live"
    admission.advance()
    assert admission.num_admissible == 3


def test_fixed_lag_trains_what_was_sampled_exactly_lag_versions_ago():
    trained = run(Admission(2, 3, in_order=True), 20, lambda n: n - 1)
    assert all(now - admitted == min(now, 3) for _, admitted, now in trained)


def test_a_slow_group_does_not_hold_up_those_behind_it():
    admission = Admission(1, 2)
    slow, quick = admission.admit(), admission.admit()
    admission.finish(quick)
    assert admission.choose() == quick
    admission.take(quick)
    admission.advance()
    second = admission.admit()
    admission.finish(second)
    assert admission.choose() == second
    admission.take(second)
    admission.advance()
    admission.finish(admission.admit())
    assert admission.choose() is None, "the slow one is due now"
    admission.finish(slow)
    assert admission.choose() == slow


@pytest.mark.parametrize(("groups", "bound", "name"), [(0, 1, "groups_per_round"), (1, -1, "max_staleness")])
def test_bad_settings_are_named(groups, bound, name):
    with pytest.raises(ValueError, match=name):
        Admission(groups, bound)


OLD = """
from lit_async_rl.scheduling.admission import check_bound
from lit_async_rl.errors import StalenessError
from lit_async_rl.problem import Prompt
from lit_async_rl.types import Rollout, RolloutGroup

one = dict(token_ids=(1,), logprobs=(0.0,), versions=(50,), finish_reason="stop", text="", reward=0.0)
group = RolloutGroup(index=0, prompt=Prompt(text=""), prompt_ids=(1,), rollouts=(Rollout(**one),), admitted_version=50,
                     max_staleness=4)
check_bound([group], 54)
try:
    check_bound([group], 200)
except StalenessError as error:
    print(error)
"""


@pytest.mark.slow
def test_without_asserts_a_token_of_150_versions_ago_is_refused_too():
    out = subprocess.run([sys.executable, "-O", "-c", OLD], capture_output=True, text=True, timeout=120, check=True)
    assert (
        "group 0 has a token that policy version 50 sampled, but policy version 200 would be trained on it: the "
        "token's staleness exceeds max_staleness=4" in out.stdout
    )


@pytest.mark.slow
def test_no_promise_of_the_package_is_an_assert():
    root = Path(__file__).parents[2]
    files = [*(root / "lit_async_rl").rglob("*.py"), *(root / "callbacks").rglob("*.py")]
    assert len(files) > 100
    # the syntax tree, not the text: examples in docstrings assert, too
    trees = {file: ast.parse(file.read_text()) for file in files}
    assert not [file for file, tree in trees.items() if any(isinstance(node, ast.Assert) for node in ast.walk(tree))]


@pytest.mark.parametrize(("under", "lowered", "now"), [(8, 2, 4), (4, 4, 2), (8, 1, 1)])
@given(data=st.data())
def test_a_resume_holds_the_bound_for_groups_that_were_admitted_under_a_larger_one(under, lowered, now, data):
    """As with `AdaptiveStaleness`, which had lowered the bound when the checkpoint was saved."""
    groups = data.draw(st.integers(1, 3))
    first = Admission(groups, under)
    admitted = {first.admit(): 0 for _ in range(first.num_admissible)}
    first.max_staleness = lowered
    again = Admission(groups, now)
    kept = again.restore(first.state_dict(), first.deadlines)
    assert kept == set(range((now + 1) * groups)), "as many as can train in time"
    unfinished, trained = sorted(kept), []
    for _ in range(under + 2):
        while again.num_left_in_round:
            for _ in range(again.num_admissible):
                unfinished.append(index := again.admit())
                admitted[index] = again.round
            while (chosen := again.choose()) is None:
                again.finish(unfinished.pop(data.draw(st.integers(0, len(unfinished) - 1))))
            again.take(chosen)
            trained.append(again.round - admitted[chosen])
        again.advance()
    assert max(trained) <= now


def test_a_resume_with_a_smaller_bound_keeps_what_a_ratio_had_kept_within_it():
    first = Admission(2, 4, async_ratio=1.0)
    indices = {first.admit() for _ in range(first.num_admissible)}
    again = Admission(2, 2, async_ratio=1.0)
    assert again.restore(first.state_dict(), first.deadlines) == indices
    assert again.deadlines == first.deadlines


@pytest.mark.parametrize(
    "make",
    [
        lambda: ExpiringAdmission(2, 0, ahead=1.0),
        lambda: ExpiringAdmission(4, 1, ahead=3.0),
        lambda: RingAdmission(4, 2, num_sampling=8, capacity=4),
    ],
)
def test_what_may_be_dropped_later_is_kept_by_a_resume_with_the_same_settings(make):
    first = make()
    indices = [first.admit() for _ in range(first.num_admissible)]
    finished = indices[-first.groups_per_round :]
    for index in finished:
        first.finish(index)
    taken = [first.choose() for _ in range(1)]
    deadlines = {taken[0]: first.take(taken[0])}  # of a step that the checkpoint interrupts
    again = make()
    assert again.restore(first.state_dict(num_given_back=1), first.deadlines | deadlines) == set(indices)
    for index in finished:
        again.finish(index)
    assert again.lose() == []
    order = []
    while again.num_left_in_round:
        order.append(again.choose())
        again.take(order[-1])
    assert order == finished


@pytest.mark.parametrize(
    "make",
    [
        lambda: ExpiringAdmission(2, 1, ahead=3.0),
        lambda: RingAdmission(2, 1, num_sampling=4, capacity=8),
    ],
)
def test_a_resume_drops_groups_that_are_too_old_where_the_uninterrupted_run_does(make):
    def train(admission):
        lost = admission.lose()
        taken = []
        while admission.num_left_in_round:
            taken.append(admission.choose())
            admission.take(taken[-1])
        admission.advance()
        return taken, sorted(lost)

    def finish_all(admission):
        for index in (admission.admit() for _ in range(admission.num_admissible)):
            admission.finish(index)

    first = make()
    finish_all(first)
    finish_all(first)
    train(first)
    train(first)
    saved = sorted(first.deadlines)
    assert first.deadlines[saved[0]] < first.round, "a group is too old when this is saved"
    again = make()
    assert again.restore(first.state_dict(), first.deadlines) == set(saved)
    for index in saved:
        again.finish(index)
    for _ in range(3):
        finish_all(again)
        finish_all(first)
        assert train(again) == train(first)


def test_a_ring_that_is_full_takes_the_groups_of_an_interrupted_step_back_once():
    first = RingAdmission(2, 8, num_sampling=2, capacity=3)

    def finish_some(admission, num):
        for _ in range(num):
            admission.finish(admission.admit())

    finish_some(first, 3)
    in_step = {index: first.take(index) for index in (0, 1)}
    finish_some(first, 2)
    again = RingAdmission(2, 8, num_sampling=2, capacity=3)
    kept = again.restore(first.state_dict(len(in_step)), first.deadlines | in_step)
    for index in sorted(kept):
        again.finish(index)
    assert again.lose() == []
    for _ in range(2):
        again.take(again.choose())
    again.advance()
    assert again.lose() == [], "three wait"
    finish_some(again, 1)
    assert again.lose() == [2], "the capacity counts again"


def test_a_new_bound_is_a_number_of_versions():
    with pytest.raises(ValueError, match=r"data\.max_staleness must be >= 0, got -1"):
        make_data(max_staleness=2).set_max_staleness(-1)
