"""Questions of a judge to the policy in training, on the engine that samples its rollouts.

| who | waits for | woken by |
|---|---|---|
| thread of the judge's loop, in `ask` and `abandon` | the producer's lock | whoever holds it |
| producer's thread, in `collect` | nothing: resolves a future | the engine |

Answers are no rollouts: they take no slot of `Admission`, stand in no checkpoint, and nothing is trained on them. They
go before waiting rollouts, as those of evaluations do, because a group that is already sampled waits for them; rollouts
that run go on beside them. Each starts with the newest weights that the engine has taken, and an update within an
answer does what it does within a rollout. The engine replaced, they are asked again.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lit_async_rl.errors import FinalRewardError
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.rewards.judge_models import Answer, opened_reasoning
from lit_async_rl.rewards.judge_policy import NoPolicyError
from lit_async_rl.rollouts.engine_listener import EngineListener
from lit_async_rl.rollouts.evaluation import FIRST_ID, PRIORITY
from lit_async_rl.types import Completion, GenerationRequest, Prompt, SamplingParams

FIRST_QUESTION_ID = 2**10 * FIRST_ID  # evaluations count from `FIRST_ID`, and make no million requests each
Answered = concurrent.futures.Future[Answer]


class PolicyQuestions:
    """Asks the engine of a producer; see `lit_async_rl.rewards.judge_policy.Policy`.

    Args:
        listener: of the engine; its `changed` guards all state.
        model: whose tokenizer and chat template are used.
    """

    def __init__(self, listener: EngineListener, model: str) -> None:
        self._listener = listener
        # One of its own: texts end before the token that ends a turn, whatever `data.scoring.special_tokens` says.
        self._codec = TextCodec(model, "tags")
        self._ids = itertools.count(FIRST_QUESTION_ID)
        self._open: dict[int, tuple[GenerationRequest, Answered]] = {}
        self._is_closed = False
        self.special_tokens: tuple[str, ...] = tuple(map(str, self._codec.tokenizer.all_special_tokens))

    @property
    def is_asked(self) -> bool:
        """Whether an answer is due."""
        return bool(self._open)

    def ask(self, messages: Sequence[Mapping[str, str]], sampling: SamplingParams, future: Answered) -> None:
        """Submits a question; `future` gets the answer.

        Raises:
            FinalRewardError: the question cannot be asked.
            NoPolicyError: the fit has ended.
        """
        with self._listener.changed:
            if self._is_closed:
                raise NoPolicyError
            request = self._request(messages, sampling)
            if future.cancelled():  # while this waited for the lock
                return
            self._open[request.id] = (request, future)
            try:
                self._listener.submit([request])  # an engine that has failed is replaced, and `again` asks the next one
            except ValueError as error:
                del self._open[request.id]
                raise FinalRewardError(f"the policy cannot be asked as a judge: {error}") from error

    def _request(self, messages: Sequence[Mapping[str, str]], sampling: SamplingParams) -> GenerationRequest:
        try:
            ids = self._codec.encode(Prompt(messages=messages))
        except ValueError as error:
            raise FinalRewardError(f"the policy cannot be asked as a judge: {error}") from error
        length = self._listener.engine.max_model_len
        if (room := length - len(ids)) < 1:
            raise FinalRewardError(
                f"a question of {len(ids)} tokens is longer than the engine's max_model_len={length}"
            )
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
        return GenerationRequest(
            id=next(self._ids), prompt_ids=ids, num_samples=1, sampling=sampling, priority=PRIORITY
        )

    def abandon(self, future: Answered) -> None:
        """Takes a question back, if it has no answer yet."""
        with self._listener.changed:
            number = next((number for number, (_, asked) in self._open.items() if asked is future), None)
            if number is None:
                return
            del self._open[number]
            partials = self._listener.partial_completions()
            running = [partial.num_trained_tokens for partial in partials if partial.request_id == number]
            self._listener.num_aborted += sum(running)
            self._listener.abort([number])

    def collect(self, completion: Completion) -> bool:
        """Files an answer; False if the completion is not one."""
        if completion.request_id < FIRST_QUESTION_ID:
            return False
        request, future = self._open.pop(completion.request_id, (None, None))
        if request is not None and future is not None:
            answer = Answer(
                text=opened_reasoning(self._codec, request.prompt_ids) + self._codec.decode(completion.token_ids),
                prompt_tokens=len(request.prompt_ids),
                completion_tokens=len(completion.token_ids),
            )
            _resolve(future, answer)
        return True

    def lose(self, request_id: int) -> bool:
        """Files that the engine gave a question up; False if it is none."""
        if request_id < FIRST_QUESTION_ID:
            return False
        _, future = self._open.pop(request_id, (None, None))
        if future is not None:
            _resolve(future, FinalRewardError("the engine gave a question of the judge up"))
        return True

    def again(self) -> list[GenerationRequest]:
        """The questions without an answer, for an engine that takes the place of another."""
        return [request for request, _ in self._open.values()]

    def close(self) -> None:
        """Fails all unanswered questions. Safe to call twice."""
        with self._listener.changed:
            self._is_closed = True
            left = list(self._open.values())
            self._open.clear()
        for _, future in left:
            _resolve(future, NoPolicyError())


def _resolve(future: Answered, outcome: Answer | FinalRewardError) -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # given up meanwhile
        if isinstance(outcome, Answer):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)
