"""The policy in training as a judge, on the engine that samples its rollouts: `PolicyModel`.

| who | waits for | woken by |
|---|---|---|
| judge's event loop, in `PolicyModel.ask` | a thread, then the answer | `PolicyQuestions` |
| thread of that loop, in `ask` and `abandon` of `PolicyQuestions` | the producer's lock | whoever holds it |
| producer's thread, in `collect` | nothing: resolves a future | the engine |

Answers are no rollouts: they take no slot of `Admission`, stand in no checkpoint, and are not trained on. They go
before waiting rollouts, like evaluations, because a group that is already sampled waits for them; running rollouts go
on beside them. Each starts with the newest weights that the engine has taken, and an update within an answer acts as
within a rollout. A replaced engine's questions are asked again.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import time
from collections.abc import Callable, Mapping, Sequence

from lit_async_rl.errors import FinalRewardError, RewardSetupError
from lit_async_rl.judges.judge_models import Answer, Asked, Permit, answer_of, decoded_answer, request_of, resolve
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.rollouts.engine_listener import EngineListener
from lit_async_rl.rollouts.evaluation import FIRST_ID, PRIORITY
from lit_async_rl.rollouts.producer import Producer
from lit_async_rl.types import Completion, GenerationRequest, SamplingParams

POLICY = "policy"  # in place of an engine: the run's own
FIRST_QUESTION_ID = 2**10 * FIRST_ID  # evaluations count from `FIRST_ID`, and make no million requests each
Answered = concurrent.futures.Future[Answer]
WHO = "the policy as a judge"
NO_POLICY = (
    f"JudgeReward.engine={POLICY} asks the policy in training, on the engine of a fit, and there is none here: outside "
    "of training, and for a reward in a process of its own or of a monitor, use another judge"
)


class NoPolicyError(RewardSetupError):
    """No fit is running in this process: there is no policy to ask."""

    def __init__(self, message: str = NO_POLICY) -> None:  # scorers rebuild it with the prompt in the message
        super().__init__(message)


class PolicyModel:
    """Asks the policy in training.

    Args:
        sampling: parameters for the answers.
        on_request: see `Endpoint`.

    Attributes:
        policy: answers the questions; None outside a fit.
    """

    def __init__(self, *, sampling: SamplingParams, on_request: Callable[[bool], None]) -> None:
        self._sampling = sampling
        self._on_request = on_request
        self.policy: PolicyQuestions | None = None

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Special tokens of the policy's tokenizer."""
        return () if self.policy is None else self.policy.special_tokens

    async def open(self) -> None:
        """Does nothing: there is nothing to load."""

    async def close(self) -> None:
        """Does nothing: there is nothing to release."""

    async def ask(self, messages: Sequence[Mapping[str, str]], permit: Permit, deadline: float) -> Answer:
        """Answers a conversation; see `Endpoint.ask`."""
        policy = self.policy
        if policy is None:
            raise NoPolicyError
        self._on_request(True)
        loop = asyncio.get_running_loop()
        began = time.monotonic()
        future: concurrent.futures.Future[Answer] = concurrent.futures.Future()
        try:
            # In a thread, so that other questions proceed while the producer's lock is held.
            await loop.run_in_executor(None, policy.ask, messages, self._sampling, future)
            return await answer_of(future, deadline, began=began, who=WHO)
        finally:
            if future.cancel() or future.cancelled():
                loop.run_in_executor(None, policy.abandon, future)


class PolicyQuestions:
    """Asks the engine of a producer, from any thread.

    Args:
        listener: of the engine; its `changed` guards all state.
        model: whose tokenizer and chat template are used.
    """

    def __init__(self, listener: EngineListener, model: str) -> None:
        self._listener = listener
        # One of its own: texts end before the token that ends a turn, whatever `data.scoring.special_tokens` says.
        self._codec = TextCodec(model, "tags")
        self._ids = itertools.count(FIRST_QUESTION_ID)
        self._open: dict[int, Asked] = {}
        self._is_closed = False
        self.special_tokens: tuple[str, ...] = tuple(map(str, self._codec.tokenizer.all_special_tokens))

    @property
    def is_waiting(self) -> bool:
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
            request = request_of(
                messages,
                codec=self._codec,
                sampling=sampling,
                max_model_len=self._listener.engine.max_model_len,
                number=next(self._ids),
                who=WHO,
                priority=PRIORITY,
            )
            if future.cancelled():  # while this waited for the lock
                return
            self._open[request.id] = (request, future)
            try:
                self._listener.submit([request])  # an engine that has failed is replaced, and `again` asks the next one
            except ValueError as error:
                del self._open[request.id]
                raise FinalRewardError(f"{WHO} cannot be asked: {error}") from error

    def abandon(self, future: Answered) -> None:
        """Withdraws a question that has no answer yet."""
        with self._listener.changed:
            number = next((number for number, (_, asked) in self._open.items() if asked is future), None)
            if number is None:
                return
            del self._open[number]
            partials = self._listener.partial_completions()
            running = [partial.num_trained_tokens for partial in partials if partial.request_id == number]
            self._listener.num_aborted += sum(running)
            self._listener.abort([number])

    def collect(self, completion: Completion) -> None:
        """Files an answer."""
        request, future = self._open.pop(completion.request_id, (None, None))
        if request is not None and future is not None:
            resolve(future, decoded_answer(self._codec, request.prompt_ids, completion.token_ids))

    def lose(self, request_id: int, number: int | None = None) -> None:
        """Files that the engine gave a question up."""
        _, future = self._open.pop(request_id, (None, None))
        if future is not None:
            resolve(future, FinalRewardError("the engine gave a question of the judge up"))

    def again(self) -> list[GenerationRequest]:
        """The unanswered questions, for an engine that replaces another."""
        return [request for request, _ in self._open.values()]

    def close(self) -> None:
        """Fails all unanswered questions. Safe to call twice."""
        with self._listener.changed:
            self._is_closed = True
            left = list(self._open.values())
            self._open.clear()
        for _, future in left:
            resolve(future, NoPolicyError())


def questions_of(producer: Producer) -> PolicyQuestions:
    """The questions to a producer's engine, the same for all judges of its reward."""
    owner = producer.owners.of(FIRST_QUESTION_ID)
    if not isinstance(owner, PolicyQuestions):
        owner = PolicyQuestions(producer.listener, producer.book.codec.model)
        producer.owners.add(FIRST_QUESTION_ID, owner)
    return owner
