"""Multi-turn rollouts: wraps an engine and lets an environment respond after each turn.

Each turn is a request to the inner engine whose prompt is the conversation so far; a finished episode is returned as
one completion in which the environment's tokens are masked.

| who | waits for | woken by |
|---|---|---|
| `poll` (producer's thread) | a finished episode | the inner engine, and every `WAKE_S` |
| event loop's thread | environments | themselves, bounded by `step_timeout_s` |
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from lit_async_rl.engines.base import Completion, GenerationRequest, RolloutEngine
from lit_async_rl.engines.request_ledger import RequestLedger
from lit_async_rl.engines.wrapper import EngineWrapper
from lit_async_rl.environments.base import Environment
from lit_async_rl.environments.conversation import Conversation
from lit_async_rl.environments.environment_loop import EnvironmentLoop, EnvironmentTasks
from lit_async_rl.errors import SetupError
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.rewards.score import reward_identity
from lit_async_rl.types import FinishReason
from lit_async_rl.utils.checks import as_reward, check_range
from lit_async_rl.utils.spans import ENVIRONMENT, Overlap, Spans

WAKE_S = 0.01


class EnvironmentGrader:
    """Reward of the first turn of a new episode, in the event loop of the environment.

    Args:
        environment: of the run.
        loop: that its episodes share.
        timeout_s: limit of a start and a response together.

    Attributes:
        references: the environment's, which may be None.
        name: of its class.
    """

    def __init__(self, environment: Environment, loop: EnvironmentLoop, timeout_s: float) -> None:
        self._environment, self._loop, self._timeout_s = environment, loop, timeout_s
        self.references, self.name = environment.references, type(environment).__name__

    def __call__(self, prompt: Prompt, completion: str) -> float:
        """Reward of the completion as the only turn.

        Raises:
            TimeoutError: the environment did not answer in time.
        """
        loop = self._loop.enter()
        try:
            answer = asyncio.run_coroutine_threadsafe(self._first_turn(prompt, completion), loop)
            try:
                return answer.result(self._timeout_s)
            finally:
                answer.cancel()
        finally:
            self._loop.leave()

    async def _first_turn(self, prompt: Prompt, completion: str) -> float:
        episode = await self._environment.start(prompt)
        return (await episode.step(completion)).reward


class EpisodeEngine(EngineWrapper):
    """Alternates turns of `engine` and `environment`, whose rewards replace `data.reward`.

    A turn ends with the end-of-sequence token, a stop token or a stop string; all stay in the context, but the
    environment gets the text before the stop string. `sampling.max_tokens` bounds one turn. Otherwise an episode ends,
    with finish reason `length`, after a turn that reached `max_tokens`, after `max_turns`, or when another turn might
    not fit into the context.

    Running episodes always continue under new weights, so later turns may be of newer versions than earlier ones; every
    token is tagged with its own, and the bound holds for all of them. Incompatible with `FixedLag`.

    Args:
        engine: generates the turns.
        environment: responds to them.
        max_turns: maximum turns of the policy in one episode.
        step_timeout_s: timeout of an environment's start or response.

    Raises:
        ValueError: a setting is out of range, or the engine does not update weights in flight.
    """

    scores = True
    in_flight_weight_updates = True

    def __init__(
        self, engine: RolloutEngine, environment: Environment, max_turns: int = 8, step_timeout_s: float = 60.0
    ) -> None:
        check_range("EpisodeEngine", ">= 1", max_turns=max_turns)
        check_range("EpisodeEngine", "positive", step_timeout_s=step_timeout_s)
        if not engine.in_flight_weight_updates:
            raise ValueError("EpisodeEngine needs engine.in_flight_weight_updates=true: an episode is many requests")
        super().__init__(engine)
        self.environment, self.max_turns, self.step_timeout_s = environment, max_turns, step_timeout_s
        self._codec: TextCodec | None = None
        self._ids = itertools.count()
        self._lock = threading.RLock()
        self._live: dict[int, list[Conversation]] = {}  # request -> conversations that have not ended
        self._talking: dict[int, dict[int, Conversation]] = {}  # inner request -> conversations whose turn it samples
        self._ledger: RequestLedger | None = None  # of turns; guarded by the lock
        self._waiting: set[Conversation] = set()  # conversations whose environment works
        self._answering = Overlap("answer")
        self._finished: list[Completion] = []
        self._error: BaseException | None = None
        self._tasks = EnvironmentTasks(EnvironmentLoop())

    def around(self, engine: RolloutEngine, codec: TextCodec) -> EpisodeEngine:
        """The same environment, in its event loop, with another engine."""
        other = EpisodeEngine(engine, self.environment, self.max_turns, self.step_timeout_s)
        other._codec = codec
        other._ledger = RequestLedger(engine, codec.vocab_size)
        other._tasks = EnvironmentTasks(self._tasks.shared)
        return other

    def fresh(self, out_of_memory: bool = False) -> RolloutEngine:
        """See `RolloutEngine`; the environment is the same object and stays in its event loop."""
        other: Any = super().fresh(out_of_memory)
        other._tasks = EnvironmentTasks(self._tasks.shared)
        return other

    def grader(self) -> EnvironmentGrader:
        """The environment as a reward of single turns, to check it against reference answers."""
        return EnvironmentGrader(self.environment, self._tasks.shared, self.step_timeout_s)

    @property
    def scoring_identity(self) -> str:
        """See `RolloutEngine`: of the environment, and how many turns it may answer."""
        return f"{reward_identity(self.environment)}, max_turns={self.max_turns}"  # type: ignore[arg-type]

    def setup(self, model: str) -> None:
        self._codec = TextCodec(model)
        super().setup(model)
        self._ledger = RequestLedger(self.engine, self._codec.vocab_size)

    def observe(self, spans: Spans) -> bool:
        self._answering.lane = spans.lane(0, ENVIRONMENT, "environment", "environments")
        return super().observe(spans)

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads weights; running episodes continue under them."""
        with self._lock:
            self._asked.newest = version
        super().load_weights(version, weights)
        with self._lock:
            self._asked.loaded = version

    @property
    def _asked(self) -> RequestLedger:
        if self._ledger is None:
            raise SetupError("EpisodeEngine is used before it was set up")
        return self._ledger

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Starts episodes; the first turns of a group share their prompt."""
        inner = []
        with self._lock:
            for request in requests:
                self._live[request.id] = Conversation.of(request)
                inner.append(replace(request, id=next(self._ids)))
                self._talking[inner[-1].id] = dict(enumerate(self._live[request.id]))
            self._asked.open(inner)
        self.engine.submit(inner)

    def poll(self, timeout_s: float) -> list[Completion]:
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if self._error is not None:
                    raise self._error
                finished, self._finished = self._finished, []
                waiting = bool(self._waiting)
            remaining = deadline - time.monotonic()
            if finished or remaining <= 0:
                return finished
            turns = self.engine.poll(min(remaining, WAKE_S) if waiting else remaining)
            for completion in self._asked.listed(turns, "poll"):
                self._end_turn(completion)

    def abort(self, request_ids: Sequence[int]) -> None:
        """Aborts episodes; the pending response of an environment is cancelled, and any error of it ignored."""
        with self._lock:
            gone = {talk for number in request_ids for talk in self._live.pop(number, [])}
            self._tasks.cancel(gone & self._waiting)
            self._waiting -= gone
            inner = [number for number, talks in self._talking.items() if not gone.isdisjoint(talks.values())]
            for number in inner:
                del self._talking[number]
            self._asked.abort(inner)
            self._finished = [c for c in self._finished if c.request_id not in set(request_ids)]
        self.engine.abort(inner)

    def close(self) -> None:
        super().close()
        self._tasks.close()

    def _end_turn(self, completion: Completion) -> None:
        """Files a finished turn; unless the episode is over, passes it to the environment."""
        with self._lock:
            talk = self._take_talk(completion) if self._asked.receive(completion) else None
            if talk is None:
                return  # aborted
            talk.add_turn(completion)
            if completion.finish_reason != "stop":
                self._finish(talk, completion.finish_reason)
                return
            self._waiting.add(talk)
            text = self._tokenizer.decode(completion.token_ids, talk.request.sampling.stop)
            self._tasks.begin(talk, self._answer(talk, text))

    def _take_talk(self, turn: Completion) -> Conversation | None:
        talks = self._talking.get(turn.request_id)
        if talks is None:
            return None
        talk = talks.pop(turn.sample_index)
        if not talks:
            del self._talking[turn.request_id]
        return talk

    async def _answer(self, talk: Conversation, text: str) -> None:
        """Continues an episode with the environment's response. `poll` raises any error, unless it was aborted."""
        try:
            ids = await self._respond(talk, text)
            with self._lock:
                if talk in self._waiting:
                    self._waiting.remove(talk)
                    self._continue(talk, ids)
        except Exception as error:
            with self._lock:
                if talk in self._live.get(talk.request.id, ()):
                    self._error = self._error or error

    async def _respond(self, talk: Conversation, text: str) -> tuple[int, ...] | None:
        """Tokens of the environment's response; None if it ends the episode. All errors are `EnvironmentFailure`."""
        try:
            with self._answering.one(turns=1):
                return await asyncio.wait_for(self._ask(talk, text), self.step_timeout_s)
        except asyncio.TimeoutError:  # another class than TimeoutError before Python 3.11
            limit = f"step_timeout_s={self.step_timeout_s:g}"
            raise talk.failure(self.environment, text, f"did not answer within {limit}") from None
        except asyncio.CancelledError:  # by itself; nobody looks where the episode was aborted
            raise talk.failure(self.environment, text, "was cancelled") from None

    async def _ask(self, talk: Conversation, text: str) -> tuple[int, ...] | None:
        try:
            if talk.episode is None:
                talk.episode = await self.environment.start(talk.prompt)
            observation = await talk.episode.step(text)
            as_reward(observation.reward)
            talk.add_answer(observation)
            return None if observation.done else self._tokenizer.encode_continuation(observation.text)
        except Exception as error:  # also its own TimeoutError, which is none of `step_timeout_s`
            raise talk.failure(self.environment, text, f"raised {type(error).__name__}: {error}") from error

    def _continue(self, talk: Conversation, ids: tuple[int, ...] | None) -> None:
        """Ends the episode, or submits the policy's next turn, which reads `ids`. Errors are the engine's."""
        if ids is None:
            self._finish(talk, "stop")
            return
        request = talk.request
        length = len(request.prompt_ids) + len(talk.token_ids) + len(ids) + request.sampling.max_tokens
        if len(talk.turns) == self.max_turns or length > self.max_model_len:
            self._finish(talk, "length")
            return
        following = talk.next_request(next(self._ids), ids)
        self._talking[following.id] = {0: talk}
        self._asked.open([following])
        self.engine.submit([following])

    @property
    def _tokenizer(self) -> TextCodec:
        if self._codec is None:
            raise SetupError("EpisodeEngine is used before it was set up")
        return self._codec

    def _finish(self, talk: Conversation, reason: FinishReason) -> None:
        live = self._live[talk.request.id]
        live.remove(talk)
        if not live:
            del self._live[talk.request.id]
        self._finished.append(talk.completion(reason))
