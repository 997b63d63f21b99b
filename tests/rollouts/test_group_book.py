"""Groups from their first request to the step that trains on them."""

import pytest
from flow import MODEL

from lit_async_rl.engines.base import Completion, SamplingParams
from lit_async_rl.errors import InvariantError
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.problem import Prompt
from lit_async_rl.rollouts.group_book import GroupBook, GroupEntry, GroupState


def test_a_group_that_is_given_up_before_any_rollout_began_has_no_tokens():
    book = GroupBook(TextCodec(MODEL), 2, SamplingParams(max_tokens=4))
    (request,) = book.open(0, 0, Prompt(text="3 1 2"), version=0)
    group = book.groups[0]
    tokens, seconds = book.progress_of(group, [])
    assert tokens == 0.0
    assert seconds >= 0.0
    begun = Completion(
        request_id=request.id,
        sample_index=1,
        token_ids=(3, 4, 5),
        logprobs=(-1.0,) * 3,
        versions=(0,) * 3,
        finish_reason="abort",
    )
    assert book.progress_of(group, [begun])[0] == 3.0, "the mean over rollouts that began"
    assert book.drop(group) == (request.id,)
    assert not book.groups
    assert not group.is_open


def sampled(sample: int) -> Completion:
    return Completion(
        request_id=0, sample_index=sample, token_ids=(3,), logprobs=(-1.0,), versions=(0,), finish_reason="stop"
    )


def test_a_group_passes_through_its_states_and_is_forgotten_when_it_was_trained_on():
    book = GroupBook(TextCodec(MODEL), 2, SamplingParams(max_tokens=4))
    for index in (0, 1):
        book.open(index, index, Prompt(text="3 1 2"), version=0)
    group = book.groups[0]
    seen = [group.state]
    for sample in (1, 0):
        assert book.collect(sampled(sample)) == (group, sample)
        seen.append(group.state)
    with pytest.raises(InvariantError, match="group 0 is in state scoring, but was read as finished"):
        _ = group.finished
    assert [book.reward(group, sample, float(sample)) for sample in (0, 1)] == [False, True]
    seen.append(group.state)
    taken = book.hand_out(0, deadline=3, max_staleness=2)
    assert [rollout.reward for rollout in taken.rollouts] == [0.0, 1.0]
    saved = [(entry.index, entry.state.value, entry.deadline) for entry in book.save({1: 5}, [])]
    assert saved == [(0, "taken", 3), (1, "sampling", 5)]
    seen.append(group.state)
    assert book.begin_step() == [group]
    assert list(book.groups) == [1]
    assert [state.value for state in [*seen, group.state]] == [
        "sampling", "sampling", "scoring", "finished", "taken", "trained",
    ]  # fmt: skip
    assert not book.reward(group, 0, 1.0), "a reward that comes too late"


def test_groups_may_be_admitted_while_a_notice_counts_those_that_lack_completions(monkeypatch):
    book = GroupBook(TextCodec(MODEL), 2, SamplingParams(max_tokens=4))
    for index in range(2):
        book.open(index, 0, Prompt(text="3 1 2"), version=0)

    def state(entry):
        """Read by the notice, while another thread admits a group."""
        book.open(len(book.groups), 0, Prompt(text="3 1 2"), version=0)
        return vars(entry)["state"]

    def set_state(entry, value):
        vars(entry)["state"] = value

    monkeypatch.setattr(GroupEntry, "state", property(state, set_state))
    assert [group.index for group in book.in_state(GroupState.SAMPLING)] == [0, 1]
    assert len(book.groups) == 4
