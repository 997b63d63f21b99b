"""The ledger of requests: what it keeps of those that have ended, and what it says of late completions."""

import gc
import weakref

import pytest
from instant_episodes import Instant

from lit_async_rl.engines.base import Completion, GenerationRequest, SamplingParams
from lit_async_rl.engines.completion_check import RequestLedger
from lit_async_rl.errors import CompletionError
from lit_async_rl.problem import Prompt


def completion(number: int, sample: int = 0, **changes) -> Completion:
    known = dict(token_ids=(1,), logprobs=(-1.0,), versions=(0,), finish_reason="stop")
    return Completion(request_id=number, sample_index=sample, **(known | changes))


def opened(num_samples: int = 2) -> tuple[RequestLedger, list[weakref.ref]]:
    """A ledger with the requests 0, which is finished, 1, which is aborted half-way, and 2, which runs."""
    ledger, prompts = RequestLedger(Instant(), vocab_size=10), []
    for number in range(3):
        prompt = Prompt(text=f"a prompt of thousands of tokens: {number}")
        prompts.append(weakref.ref(prompt))
        sampling = SamplingParams(max_tokens=4)
        ledger.open(
            [GenerationRequest(id=number, prompt_ids=(1, 2), num_samples=num_samples, sampling=sampling, prompt=prompt)]
        )
        assert ledger.receive(completion(number))
    assert ledger.receive(completion(0, sample=1))
    ledger.abort([1])
    return ledger, prompts


@pytest.mark.slow
def test_nothing_but_numbers_is_kept_of_requests_that_have_ended():
    """The last 16,384 were kept with prompts and tokens: 177 KiB each at 4,000 tokens."""
    ledger, prompts = opened()
    gc.collect()
    assert [prompt() is None for prompt in prompts] == [True, True, False]
    assert [ledger.num_missing(number) for number in range(3)] == [0, 0, 1]


def test_late_and_duplicate_completions_are_told_apart_without_them():
    ledger, _ = opened()
    assert not ledger.receive(completion(1, sample=1))  # late, of an aborted request
    for number, sample in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0)):
        with pytest.raises(CompletionError, match="has come already: sample_index is a duplicate"):
            ledger.receive(completion(number, sample=sample))
    for number in range(3):
        with pytest.raises(CompletionError, match="has sample_index=2, must be an int from 0 to 1"):
            ledger.receive(completion(number, sample=2))
    with pytest.raises(CompletionError, match="which was never asked for"):
        ledger.receive(completion(3))
    assert ledger.receive_partials([completion(n, 1, finish_reason="abort") for n in range(3)]) == [
        completion(2, 1, finish_reason="abort")
    ]
