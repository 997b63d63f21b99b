"""Requests to the rollout engine for the calls of an agent: ids so far in, sampled tokens out.

A call belongs to a sample of an admitted request, whose slot is held until the group was trained on: the staleness
bound holds for every token of every call, however late.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from lit_async_rl.agents.calls import AgentCallError, CallSampling
from lit_async_rl.types import GenerationRequest, SamplingParams


def call_request(
    outer: GenerationRequest,
    sample_index: int,
    prompt_ids: tuple[int, ...],
    sampling: CallSampling,
    *,
    max_model_len: int,
    num_samples: int,
    num_calls: int,
    num_tries: int,
) -> GenerationRequest:
    """The request to the inner engine for a call.

    Args:
        outer: request of the outer engine.
        sample_index: which of its samples calls.
        prompt_ids: all tokens of the conversation.
        sampling: what the call asks of the sampler.
        max_model_len: largest number of tokens of a prompt and its completion.
        num_samples: number of completions.
        num_calls: earlier calls of the sample.
        num_tries: discarded samples of the same call; each try of a call with a seed derives another seed.

    Raises:
        AgentCallError: the ids leave no room in the context.
    """
    room = max_model_len - len(prompt_ids)
    if not prompt_ids:
        raise AgentCallError("a call needs a prompt of at least one token", "invalid_prompt", param="messages")
    if room < 1:
        raise AgentCallError(
            f"the model's context is {max_model_len} tokens, but the messages have {len(prompt_ids)} tokens",
            "context_length_exceeded",
            param="messages",
        )
    # a seed of this call, of this sample: without the sample in it, a group would be one sample many times
    base, number = (outer.seed, num_calls) if sampling.seed is None else (sampling.seed, num_tries)
    return replace(
        outer,
        prompt_ids=prompt_ids,
        num_samples=num_samples,
        sampling=_params(outer.sampling, sampling, room),
        num_resumed=0,
        # the calls of an episode begin alike, those of a group hardly: a group that stays together is a tail
        session=_number_of(f"{outer.session} {outer.id} {sample_index}", num_bytes=7),
        seed=None if base is None else _number_of(f"{base} {sample_index} {number}", num_bytes=4),
    )


def _params(run: SamplingParams, sampling: CallSampling, room: int) -> SamplingParams:
    limits = [run.max_tokens, room, run.max_tokens if sampling.max_tokens is None else sampling.max_tokens]
    stop = tuple(dict.fromkeys((*run.stop, *sampling.stop)))
    if (min(limits), stop) == (run.max_tokens, run.stop):
        return run  # as most calls ask: a copy checks all of its settings again
    return replace(run, max_tokens=min(limits), stop=stop)


def _number_of(text: str, num_bytes: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=num_bytes).digest(), "big")
