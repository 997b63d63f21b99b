"""What a replica answers is checked, each sample counts once, and what is missing is sampled elsewhere."""

import re
from dataclasses import replace

import pytest
import torch

from lit_async_rl.engines.base import Completion, GenerationRequest, SamplingParams
from lit_async_rl.engines.embedded.own_process import pack_completions
from lit_async_rl.ray.entries import Assignment, Part, ReplicaEntry, State
from lit_async_rl.ray.weights import GivenWeights, Table
from lit_async_rl.sampler_records import SamplerHead


def request(**changes):
    settings = dict(id=7, prompt_ids=(3, 4), num_samples=4, sampling=SamplingParams(max_tokens=5)) | changes
    return GenerationRequest(**settings)


def completion(sample_index, **changes):
    settings = dict(token_ids=(5, 6), logprobs=(-1.0, -0.5), versions=(2, 3), finish_reason="stop") | changes
    return Completion(request_id=7, sample_index=sample_index, **settings)


def answer(*completions, numbers=None):
    packed, tensors = pack_completions(completions)
    return {
        "completions": packed,
        "assignments": numbers or [1] * len(completions),
        "tensors": {name: tensor.numpy() for name, tensor in tensors.items()},
    }


def entry_with(asked=None, samples=(0, 1, 2, 3), **settings):
    entry = ReplicaEntry(0, sent=3)
    entry.held[7] = Assignment(1, Part(asked or request(), samples, **settings), oldest=2)
    return entry


def unpacked(entry, given, **settings):
    return entry.unpack(given, **(dict(vocab_size=64, max_model_len=100) | settings))


def test_samples_are_numbered_as_they_were_asked_for_and_take_their_tokens_off_the_load():
    entry = entry_with(samples=(1, 3))
    found, problem = unpacked(entry, answer(completion(1), completion(0)))
    assert problem == ""
    assert [sample.completion.sample_index for sample in found] == [3, 1]
    assert [sample.num_tokens for sample in found] == [5, 7]  # the prompt with the last one
    assert not entry.held


def test_only_the_answer_to_the_latest_assignment_counts():
    entry = entry_with()
    found, problem = unpacked(entry, answer(completion(0), completion(1), numbers=[99, 1]))
    assert ([sample.position for sample in found], problem) == ([1], "")
    entry.held.clear()
    assert unpacked(entry, answer(completion(2))) == ([], "")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(versions=(1, 3)), r"versions\[0\]=1, older than version 2"),
        (dict(versions=(2, 4)), r"versions\[1\]=4, newer than the policy's newest version 3"),
        (dict(token_ids=(5, 64)), "not in the vocabulary of 64 tokens"),
        (dict(logprobs=(-1.0, float("nan"))), r"logprobs\[1\]=nan"),
        (dict(head=SamplerHead(torch.zeros(2), torch.zeros(2, 1).int(), torch.zeros(2, 1))), "head"),
        (dict(finish_reason="abort"), "finish_reason='abort'"),
    ],
)
def test_a_completion_that_cannot_be_right_is_described_and_those_before_it_are_kept(changes, words):
    entry = entry_with()
    found, problem = unpacked(entry, answer(completion(0), completion(1, **changes), completion(2)))
    assert [sample.position for sample in found] == [0]
    assert entry.held[7].again() == Part(request(), (1, 2, 3), num_lost=1)
    assert re.search(words, problem)
    assert problem.startswith("returned a wrong completion: request 7, sample 1 ")


def test_a_sample_twice_or_beyond_the_last_is_described():
    for given, words in (
        ([completion(0), completion(0)], "sample_index is a duplicate"),
        ([completion(4)], "sample_index=4, must be an int from 0 to 3"),
    ):
        assert words in unpacked(entry_with(), answer(*given))[1]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"completions": 3, "assignments": [], "tensors": {}},
        {"completions": [[1, 2]], "assignments": [1], "tensors": {}},
        {"completions": [], "assignments": [1], "tensors": {}},
    ],
)
def test_what_is_no_answer_is_an_error(given):
    with pytest.raises((KeyError, TypeError, ValueError)):
        unpacked(entry_with(), given)


def test_what_is_left_of_a_request_with_seeds_is_sampled_under_the_same_numbers():
    asked = request(seed=11)
    entry = entry_with(asked)
    unpacked(entry, answer(completion(2)))
    part = entry.held[7].again()
    assert part == Part(asked, (0, 1, 2, 3), frozenset({2}), num_lost=1)
    other = ReplicaEntry(1, sent=3)
    other.held[7] = Assignment(1, part, oldest=2)
    assert other.held[7].num_missing == 3
    found, problem = unpacked(other, answer(*map(completion, range(4))))
    assert ([sample.position for sample in found], problem) == ([0, 1, 3], "")
    assert not other.held


def test_losses_of_a_request_are_counted_since_its_last_sample():
    entry = entry_with(num_lost=3)
    assert entry.held[7].again().num_lost == 4
    unpacked(entry, answer(completion(1)))
    assert entry.held[7].again().num_lost == 1


def test_partial_completions_stay_missing():
    entry = entry_with()
    unpacked(entry, answer(completion(1)))
    partial = [replace(completion(n), finish_reason="abort") for n in range(3)]
    found, problem = unpacked(entry, answer(*partial), is_partial=True)
    assert ([sample.position for sample in found], problem) == ([0, 2], "")
    assert entry.held[7].num_missing == 3


def test_weights_are_compared_with_what_was_sent_and_with_nothing_that_is_forgotten():
    weights = GivenWeights()
    entry = ReplicaEntry(0, state=State.READY, sent=9)
    others = [ReplicaEntry(number, state=State.READY, sent=9, verified=8) for number in (1, 2)]
    for version, b in ((5, 1), (8, 2), (9, 3)):
        weights.replace(Table(version, sums={"a": 1, "b": b}), None, None, entries=others)
    assert (weights.version, weights.version_before) == (9, 8)
    assert not weights.verify(entry, 5, {"a": 1, "b": 7})  # while it loaded, newer ones went out
    assert entry.verified == -1
    assert not weights.verify(entry, 8, {"b": 2})
    assert not weights.verify(entry, 9, {"b": 3})
    assert entry.verified == 9
    for version, sums, problem in ((9, {"a": 2}, "(version 9)"), (10, {}, "version 10, which were never sent")):
        again = ReplicaEntry(0, state=State.READY, sent=9, sums={"a": 1, "b": 3})
        assert problem in weights.verify(again, version, sums)
        assert again.verified == -1
