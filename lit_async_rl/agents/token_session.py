"""Token sessions: ids so far in, sampled tokens out, over any rollout engine.

A session is one sample of a request that the producer has admitted, so its slot is held from before its first call
until its group was trained on: the staleness bound holds for every token of every call, however late. Calls return
before they are answered, because the engine samples in the producer's thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

from lit_async_rl.agents.calls import AgentCallError, CallSampling
from lit_async_rl.types import GenerationRequest, SamplingParams


class TokenSession:
    """The tokens of one sample: any number of calls, each with all ids so far.

    Args:
        request: request of the outer engine that the session is a sample of.
        sample_index: which of its samples.
        submit: gives a request to the inner engine, and returns its id there.
        max_model_len: largest number of tokens of a prompt and its completion.
    """

    def __init__(
        self,
        request: GenerationRequest,
        sample_index: int,
        submit: Callable[[GenerationRequest], int],
        max_model_len: int,
    ) -> None:
        self.request = request
        self.sample_index = sample_index
        self.num_calls = 0
        self._submit = submit
        self.max_model_len = max_model_len
        # the calls of an episode begin alike, those of a group hardly: a group that stays together is a tail
        self._place = _number_of(f"{request.session} {request.id} {sample_index}", num_bytes=7)

    def sample(
        self,
        prompt_ids: tuple[int, ...],
        sampling: CallSampling,
        *,
        num_samples: int = 1,
        num_tries: int = 0,
    ) -> int:
        """Asks for completions, and returns the id of the inner engine's request.

        Args:
            prompt_ids: all tokens of the conversation.
            sampling: what the call asks of the sampler.
            num_samples: number of completions.
            num_tries: samples of the same call that were discarded: with a seed of its own, each try has another one.

        Raises:
            AgentCallError: the ids leave no room in the context.
        """
        room = self.max_model_len - len(prompt_ids)
        if not prompt_ids:
            raise AgentCallError("a call needs a prompt of at least one token", "invalid_prompt", param="messages")
        if room < 1:
            raise AgentCallError(
                f"the model's context is {self.max_model_len} tokens, but the messages have {len(prompt_ids)} tokens",
                "context_length_exceeded",
                param="messages",
            )
        request = replace(
            self.request,
            prompt_ids=prompt_ids,
            num_samples=num_samples,
            sampling=self._params(sampling, room),
            num_resumed=0,
            session=self._place,
            seed=self._seed(sampling, num_tries),
        )
        self.num_calls += 1
        return self._submit(request)

    def _params(self, sampling: CallSampling, room: int) -> SamplingParams:
        run = self.request.sampling
        limits = [run.max_tokens, room, run.max_tokens if sampling.max_tokens is None else sampling.max_tokens]
        stop = tuple(dict.fromkeys((*run.stop, *sampling.stop)))
        if (min(limits), stop) == (run.max_tokens, run.stop):
            return run  # as most calls ask: a copy checks all of its settings again
        return replace(run, max_tokens=min(limits), stop=stop)

    def _seed(self, sampling: CallSampling, num_tries: int) -> int | None:
        """A seed of this call, of this sample: without the sample in it, a group would be one sample many times."""
        base = sampling.seed if sampling.seed is not None else self.request.seed
        if base is None:
            return None
        number = num_tries if sampling.seed is not None else self.num_calls
        return _number_of(f"{base} {self.sample_index} {number}", num_bytes=4)


def _number_of(text: str, num_bytes: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=num_bytes).digest(), "big")
