"""A judge on an engine: the policy in training on the engine of its rollouts, or another model on its own engine.

| who | waits for | woken by |
|---|---|---|
| judge's event loop, in `ask` | a thread, then the answer | `Questions` |
| thread of that loop, in `ask` and `abandon` of `Questions` | the listener's lock | whoever holds it |
| listener's thread, in `collect` | nothing: resolves a future | the engine |

Answers of the policy are no rollouts: they take no slot of `Admission`, stand in no checkpoint, and nothing is trained
on them. They go before waiting rollouts, as those of evaluations do, because a group that is already sampled waits for
them; rollouts that run go on beside them. Each starts with the newest weights that the engine has taken, and an update
within an answer does what it does within a rollout. The engine replaced, they are asked again.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lit_async_rl.engines.base import RolloutEngine
from lit_async_rl.errors import FinalRewardError, RewardSetupError, describe
from lit_async_rl.judges.judge_models import Answer, Permit
from lit_async_rl.models.architecture import stored_buffers
from lit_async_rl.models.loading import load_policy
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.problem import Prompt
from lit_async_rl.rollouts.engine_listener import EngineListener
from lit_async_rl.rollouts.evaluation import FIRST_ID, PRIORITY
from lit_async_rl.rollouts.producer import Producer
from lit_async_rl.runtime.guarded_calls import in_thread
from lit_async_rl.runtime.spans import unrecorded
from lit_async_rl.types import Completion, GenerationRequest, SamplingParams

POLICY = "policy"  # in place of an engine: the run's own
FIRST_QUESTION_ID = 2**10 * FIRST_ID  # evaluations count from `FIRST_ID`, and make no million requests each
END_S = 10.0  # for the thread and the engine of a `LocalModel`
MAX_TAG_TOKENS = 16  # of the opening tag of reasoning with the whitespace behind it
Answered = concurrent.futures.Future[Answer]
NO_POLICY = (
    f"JudgeReward.engine={POLICY} asks the policy in training, on the engine of a fit, and there is none here: outside "
    "of training, and for a reward in a process of its own or of a monitor, use another judge"
)


class NoPolicyError(RewardSetupError):
    """No fit is running in this process, so there is no policy to ask."""

    def __init__(self, message: str = NO_POLICY) -> None:  # scorers rebuild it with the prompt in the message
        super().__init__(message)


class Questions:
    """Asks the engine of a listener, from any thread.

    Args:
        listener: of the engine; its `changed` guards all state.
        model: whose tokenizer and chat template are used.
        who: name of the judge, for messages.
    """

    def __init__(self, listener: EngineListener, model: str, who: str) -> None:
        self.listener = listener
        # One of its own: texts end before the token that ends a turn, whatever `data.scoring.special_tokens` says.
        self._codec = TextCodec(model, "tags")
        self._who = who
        self._ids = itertools.count(FIRST_QUESTION_ID)
        self._open: dict[int, tuple[GenerationRequest, Answered]] = {}
        self._problem: FinalRewardError | None = None  # once there are no answers any more
        self.special_tokens: tuple[str, ...] = tuple(map(str, self._codec.tokenizer.all_special_tokens))

    @property
    def is_waiting(self) -> bool:
        """Whether an answer is due."""
        return bool(self._open)

    def ask(self, messages: Sequence[Mapping[str, str]], sampling: SamplingParams, future: Answered) -> None:
        """Submits a question; `future` gets the answer, which ends at the latest where the engine's context does.

        Raises:
            FinalRewardError: the question cannot be asked, or the questions were closed.
        """
        with self.listener.changed:
            if self._problem is not None:
                raise self._problem
            try:
                prompt_ids = self._codec.encode(Prompt(messages=messages))
            except ValueError as error:
                raise FinalRewardError(f"{self._who} cannot be asked: {error}") from error
            max_model_len = self.listener.engine.max_model_len
            if (room := max_model_len - len(prompt_ids)) < 1:
                raise FinalRewardError(
                    f"a question to the judge has {len(prompt_ids)} tokens, which is more than the engine's "
                    f"max_model_len={max_model_len}"
                )
            if future.cancelled():  # while this waited for the lock
                return
            request = GenerationRequest(
                id=next(self._ids),
                prompt_ids=prompt_ids,
                num_samples=1,
                sampling=replace(sampling, max_tokens=min(sampling.max_tokens, room)),
                priority=PRIORITY,
            )
            self._open[request.id] = (request, future)
            try:
                self.listener.submit([request])  # an engine that has failed is replaced, and `again` asks the next one
            except ValueError as error:
                del self._open[request.id]
                raise FinalRewardError(f"{self._who} cannot be asked: {error}") from error

    def abandon(self, future: Answered) -> None:
        """Takes a question back, if it has no answer yet."""
        with self.listener.changed:
            number = next((number for number, (_, asked) in self._open.items() if asked is future), None)
            if number is None:
                return
            del self._open[number]
            partials = self.listener.partial_completions()
            running = [partial.num_trained_tokens for partial in partials if partial.request_id == number]
            self.listener.num_aborted += sum(running)
            self.listener.abort([number])

    def collect(self, completion: Completion) -> None:
        """Files an answer. An opening reasoning tag at the end of the prompt belongs to it."""
        request, future = self._open.pop(completion.request_id, (None, None))
        if request is None or future is None:
            return
        end = self._codec.decode(request.prompt_ids[-MAX_TAG_TOKENS:])
        opening = re.search(r"<(?:\w+:)?think(?:ing)?>\s*\Z", end)
        text = ("" if opening is None else opening[0]) + self._codec.decode(completion.token_ids)
        answer = Answer(text=text, prompt_tokens=len(request.prompt_ids), completion_tokens=len(completion.token_ids))
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # the caller gave up
            future.set_result(answer)

    def lose(self, request_id: int, number: int | None = None) -> None:
        """Files that the engine gave a question up, which has one answer only."""
        _, future = self._open.pop(request_id, (None, None))
        if future is not None:
            _fail(future, FinalRewardError("the engine gave a question of the judge up"))

    def again(self) -> list[GenerationRequest]:
        """The questions without an answer, for an engine that takes the place of another."""
        return [request for request, _ in self._open.values()]

    def close(self, problem: FinalRewardError) -> None:
        """Fails all unanswered questions and those asked from now on. Safe to call twice: the first problem counts."""
        with self.listener.changed:
            self._problem = self._problem or problem
            left = list(self._open.values())
            self._open.clear()
        for _, future in left:
            _fail(future, self._problem)


def _fail(future: Answered, problem: FinalRewardError) -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # the caller gave up
        future.set_exception(problem)


class EngineModel:
    """Asks a model on an engine, which decodes concurrent questions in one batch.

    Args:
        who: name of the judge, for messages.
        closed: error of questions without an engine, or that are left when it is not asked any more.
        sampling: parameters for the answers.
        on_request: called before each request; may refuse it by raising.

    Attributes:
        questions: asks the engine; None without one.
    """

    def __init__(
        self, *, who: str, closed: FinalRewardError, sampling: SamplingParams, on_request: Callable[[bool], None]
    ) -> None:
        self._who = who
        self._closed = closed
        self._sampling = sampling
        self._on_request = on_request
        self.questions: Questions | None = None

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Special tokens of the model's tokenizer."""
        return () if self.questions is None else self.questions.special_tokens

    async def open(self) -> None:
        """Loads the model, if there is something to load."""

    async def close(self) -> None:
        """Releases what `open` has loaded."""

    async def ask(self, messages: Sequence[Mapping[str, str]], permit: Permit, deadline: float) -> Answer:
        """Answers a conversation; see `Endpoint.ask`."""
        questions = self.questions
        if questions is None:
            raise self._closed
        self._on_request(True)
        loop = asyncio.get_running_loop()
        began = time.monotonic()
        future: Answered = concurrent.futures.Future()
        try:
            # In a thread, so that other questions proceed while the listener's lock is held.
            await loop.run_in_executor(None, questions.ask, messages, self._sampling, future)
            left_s = deadline - loop.time()
            answer = await asyncio.wait_for(asyncio.wrap_future(future), max(0.001, left_s))
        except (TimeoutError, asyncio.TimeoutError):
            raise FinalRewardError(f"{self._who} did not answer within JudgeLimits.timeout_s") from None
        finally:
            if future.cancel() or future.cancelled():
                loop.run_in_executor(None, questions.abandon, future)
        return replace(answer, latency_s=time.monotonic() - began)


class PolicyModel(EngineModel):
    """The policy in training, within a fit.

    Args:
        sampling: parameters for the answers.
        on_request: see `EngineModel`.
    """

    WHO = "the policy as a judge"

    def __init__(self, *, sampling: SamplingParams, on_request: Callable[[bool], None]) -> None:
        super().__init__(who=self.WHO, closed=NoPolicyError(), sampling=sampling, on_request=on_request)

    def use(self, producer: Producer | None) -> None:
        """Asks the engine of this producer from now on, as all judges of its reward do; None ends that."""
        before = self.questions
        self.questions = None if producer is None else self._questions_of(producer)
        if before is not None:
            before.close(self._closed)

    def _questions_of(self, producer: Producer) -> Questions:
        owner = producer.owners.of(FIRST_QUESTION_ID)
        if not isinstance(owner, Questions):
            owner = Questions(producer.listener, producer.book.codec.model, self.WHO)
            producer.owners.add(FIRST_QUESTION_ID, owner)
        return owner


class LocalModel(EngineModel):
    """A model on an engine of its own, which is not replaced when it fails: the judge has failed then.

    The policy's engine would not do: it has the weights of the policy.

    Args:
        model: Hugging Face name or folder.
        engine: template; each run sets up a fresh engine with the same settings.
        sampling: parameters for the answers.
        on_request: see `EngineModel`.
    """

    def __init__(
        self,
        model: str,
        engine: RolloutEngine,
        *,
        sampling: SamplingParams,
        on_request: Callable[[bool], None],
    ) -> None:
        who = f"the judge {model!r}"
        closed = FinalRewardError(f"{who} was closed")
        super().__init__(who=who, closed=closed, sampling=sampling, on_request=on_request)
        self._model = model
        self._given = engine
        self._lock = threading.Lock()  # guards `questions` and whether they are wanted
        self._is_closed = threading.Event()

    async def open(self) -> None:
        """Loads the model, unless it is loaded.

        Raises:
            RewardSetupError: the model cannot be loaded.
        """
        if self.questions is None:
            self._is_closed = threading.Event()
            await in_thread(None, partial(self._load, self._is_closed))

    async def close(self) -> None:
        """Closes the engine, at once or when it is loaded."""
        with self._lock:
            self._is_closed.set()
            questions = self.questions
            self.questions = None
        if questions is not None:
            await in_thread(None, partial(self._end, questions))

    def _load(self, is_closed: threading.Event) -> None:
        engine = self._given.fresh()
        try:
            with unrecorded():  # the engine takes its lanes when it is set up
                engine.setup(self._model)
                engine.load_weights(0, _weights(self._model))
                listener = EngineListener(
                    engine,
                    threading.Condition(),
                    on_completion=lambda completion: questions.collect(completion),
                    on_turn=lambda: self._look(questions),
                    on_given_up=lambda request_id: questions.lose(request_id),
                    on_lost=lambda request_id, sample: questions.lose(request_id),
                )
            listener.has_loaded(0)
            questions = Questions(listener, self._model, self._who)
        except Exception as error:
            engine.close()
            raise self._failure(error) from error
        listener.start()
        with self._lock:
            if not is_closed.is_set():
                self.questions = questions
                return
        self._end(questions)

    def _failure(self, error: Exception) -> RewardSetupError:
        reason = describe(error).replace("model.model", "JudgeReward.model")
        return RewardSetupError(f"{self._who} failed: {reason}")

    def _look(self, questions: Questions) -> None:
        if (error := questions.listener.engine_error) is not None:
            questions.close(self._failure(error))

    def _end(self, questions: Questions) -> None:
        questions.close(self._closed)
        questions.listener.stop(END_S)
        questions.listener.calls.close(END_S)


def _weights(model: str) -> Iterator[tuple[str, Any]]:
    lm = load_policy(model)
    yield from lm.named_parameters()
    yield from stored_buffers(lm)
