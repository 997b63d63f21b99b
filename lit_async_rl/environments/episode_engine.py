"""Multi-turn rollouts: wraps an engine and lets an environment respond after each turn.

Each turn is a request to the inner engine whose prompt is the conversation so far; a finished episode is returned as
one completion in which the environment's tokens are masked.

| who | waits for | woken by |
|---|---|---|
| `poll` (producer's thread) | a finished episode | the inner engine, and every `WAKE_S` |
| event loop's thread | environments | themselves, bounded by `step_timeout_s` |

Every conversation ends in exactly one of `_finish`, `_drop` and `close`, which mark it as over. Its episode is closed
then, or, where its environment is still at work, when that has ended (`_after_work`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import inspect
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from lit_async_rl.engines.base import EngineWrapper, RolloutEngine
from lit_async_rl.engines.completion_check import RequestLedger
from lit_async_rl.environments.base import Environment, Episode, Observation
from lit_async_rl.errors import EnvironmentFailure, InvariantError, SetupError
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.rewards.scorer import reward_identity
from lit_async_rl.types import (
    Completion,
    ExpertChoices,
    FinishReason,
    GenerationRequest,
    Prompt,
    SamplerHead,
    Turn,
    blank_head,
    join_heads,
)
from lit_async_rl.utils.checks import as_reward, check_range
from lit_async_rl.utils.files import LimitedLog
from lit_async_rl.utils.spans import ENVIRONMENT, Overlap, recorder
from lit_async_rl.utils.tries import Retries, TryPolicy, Work

# -- State of a multi-turn rollout while it is sampled ----------------------------------------------------------------


NO_PROMPT = "an environment needs the prompt, not only its tokens"


@dataclass(eq=False)
class Conversation:
    """A multi-turn rollout so far; lists have one entry per token after the prompt."""

    request: GenerationRequest
    sample_index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    heads: list[SamplerHead] = field(default_factory=list)  # one for each stretch of tokens
    experts: ExpertChoices | None = None  # of the prompt, too
    reward: float = 0.0
    turns: list[Turn] = field(default_factory=list)
    state: int = 0  # what the environment showed last
    episode: Episode | None = None
    num_failed: int = 0  # tries
    is_over: bool = False  # ended, given up or dropped: its episode is to be closed

    @classmethod
    def of(cls, request: GenerationRequest) -> list[Conversation]:
        """Conversations of a request, one for each sample.

        Raises:
            InvariantError: the request has no prompt.
        """
        if request.prompt is None:
            raise InvariantError(NO_PROMPT)
        return [cls(request, n) for n in range(request.num_samples)]

    @property
    def prompt(self) -> Prompt:
        """The prompt as the environment gets it."""
        if self.request.prompt is None:
            raise InvariantError(NO_PROMPT)
        return self.request.prompt

    def add_turn(self, turn: Completion) -> None:
        """Appends a turn of the policy, without reward so far."""
        self.token_ids += turn.token_ids
        self.logprobs += turn.logprobs
        self.versions += turn.versions
        self.loss_mask += [True] * len(turn.token_ids)
        if turn.head is not None:
            self.heads.append(turn.head)
        if turn.experts is not None:  # its prompt is the whole conversation
            self.experts = turn.experts if self.experts is None else self.experts.continued(turn.experts)
        self.turns.append(Turn(end=len(self.token_ids), reward=0.0, state=self.state))

    def add_answer(self, observation: Observation) -> None:
        """Sets the reward of the last turn and the state of the next."""
        self.reward += observation.reward
        self.turns[-1] = replace(self.turns[-1], reward=observation.reward)
        self.state = _number(observation.text if observation.state is None else observation.state)

    def add_observation(self, token_ids: tuple[int, ...]) -> None:
        """Appends tokens of the environment."""
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.versions += [self.versions[-1]] * len(token_ids)
        self.loss_mask += [False] * len(token_ids)
        if self.heads:
            self.heads.append(blank_head(len(token_ids), self.heads[0].width))

    def next_request(self, number: int, observation: tuple[int, ...]) -> GenerationRequest:
        """Appends tokens of the environment and asks for the next turn, as request `number`."""
        self.add_observation(observation)
        return self._request(number)

    def begin_again(self, number: int) -> GenerationRequest:
        """Forgets all turns, and asks for the first one again, as request `number`."""
        blank = Conversation(self.request, self.sample_index)
        for name in ("token_ids", "logprobs", "versions", "loss_mask", "heads", "experts", "reward", "turns", "state"):
            setattr(self, name, getattr(blank, name))
        return self._request(number)

    def _request(self, number: int) -> GenerationRequest:
        so_far = self.request.prompt_ids + tuple(self.token_ids)
        seed = None if self.request.seed is None else self.request.seed + self.sample_index
        return replace(self.request, id=number, prompt_ids=so_far, num_samples=1, seed=seed)

    def failure(self, environment: Environment, text: str, what: str) -> EnvironmentFailure:
        """The error of an environment that failed at the turn `text`; `what` it did."""
        where = f"on prompt {self.prompt.text[:200]!r}, turn {text[:200]!r}"
        return EnvironmentFailure(f"environment {type(environment).__name__} {where} {what}")

    def completion(self, finish_reason: FinishReason) -> Completion:
        """The rollout as a completion."""
        num_read = len(self.request.prompt_ids) + len(self.token_ids) - 1  # a last observation was not read
        return Completion(
            request_id=self.request.id,
            sample_index=self.sample_index,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            finish_reason=finish_reason,
            loss_mask=tuple(self.loss_mask),
            reward=self.reward,
            turns=tuple(self.turns),
            head=join_heads(self.heads) if self.heads else None,
            experts=None if self.experts is None else self.experts.padded(num_read),
        )


def _number(state: str) -> int:
    """Hash of a text: 63 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(state.encode(), digest_size=8).digest(), "big") >> 1


# -- The event loop of an environment, and the tasks that engines run in it -------------------------------------------
# Environments hold what is bound to an event loop: semaphores, HTTP sessions. All engines around one environment (in
# training, in each validation, after a restart) therefore share a loop. Its thread runs only while one of them is open.


END_S = 6.0  # for cancelled tasks to clean up; with `STOP_S` less than the time a failed engine has to close
STOP_S = 3.0
log = logging.getLogger(__name__)


class EnvironmentLoop:
    """Event loop for all engines around one environment. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_ended = False

    def enter(self) -> asyncio.AbstractEventLoop:
        """The loop, running until each `enter` has been followed by a `leave`."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                weakref.finalize(self, _end_rest, self._loop)  # at the end of the process at the latest
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop.run_forever, name="environments", daemon=True)
                self._thread.start()
            self._num_users += 1
            self._is_ended = False
            return self._loop

    def end(self, close: Callable[[], Coroutine[Any, Any, None]], timeout_s: float = END_S) -> None:
        """Runs `close()` of the environment in the loop; the second of two calls without an `enter` between does not.

        Waits at most `timeout_s`.
        """
        with self._lock:
            if self._is_ended:
                return
        loop = self.enter()
        try:
            ended = asyncio.run_coroutine_threadsafe(close(), loop)
            if concurrent.futures.wait([ended], timeout_s).not_done:
                ended.cancel()
                log.warning("an environment's close did not return within %g s", timeout_s)
        finally:
            self.leave()
            self._is_ended = True

    def leave(self) -> None:
        """Ends the thread after the last user; the loop is kept for the next one, unless something blocks it."""
        with self._lock:
            self._num_users -= 1
            if self._num_users or self._loop is None or self._thread is None:
                return
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_S)
            if self._thread.is_alive():
                self._loop = None
            self._thread = None


def _end_rest(loop: asyncio.AbstractEventLoop) -> None:
    """Cancels what an environment itself still runs in a loop that no engine can enter any more."""
    if loop.is_running():  # an engine was never closed
        return
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks and asyncio._get_running_loop() is None:  # else they end without cleaning up
        loop.run_until_complete(asyncio.wait(tasks, timeout=END_S))


class EnvironmentTasks:
    """Tasks of one engine in the loop of its environment. Thread-safe.

    Args:
        shared: the loop, entered by the first task and left by `close`.
    """

    def __init__(self, shared: EnvironmentLoop) -> None:
        self.shared = shared
        self._lock = threading.Lock()
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: concurrent.futures.Future[None] | None = None
        self._owners: dict[asyncio.Task[Any], Hashable] = {}  # only for the loop's thread
        self._last: set[asyncio.Task[Any]] = set()  # of `finish`; only for the loop's thread
        self._num_last = 0

    def begin(
        self, owner: Hashable, coroutine: Coroutine[Any, Any, Any], after: Callable[[], None] = lambda: None
    ) -> None:
        """Starts a task; ignored after `close`. The loop calls `after` when it has ended, also if it never began."""
        with self._lock:
            if self._is_closed:
                coroutine.close()
                return
            self._loop = self._loop or self.shared.enter()
            self._loop.call_soon_threadsafe(self._start, owner, coroutine, after)

    def _start(self, owner: Hashable, coroutine: Coroutine[Any, Any, Any], after: Callable[[], None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._owners[task] = owner
        task.add_done_callback(self._owners.pop)
        task.add_done_callback(lambda _: after())

    def finish(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Starts a task that `cancel` and `close` leave alone: `close` waits for it. Needs an earlier `begin`."""
        with self._lock:
            if self._loop is None:  # closed, and left
                coroutine.close()
                return
            self._num_last += 1
            self._loop.call_soon_threadsafe(self._finish, coroutine)

    def _finish(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._last.add(task)
        task.add_done_callback(self._has_finished)

    def _has_finished(self, task: asyncio.Task[Any]) -> None:
        self._last.discard(task)
        with self._lock:
            self._num_last -= 1

    def cancel(self, owners: Iterable[Hashable]) -> None:
        """Cancels the tasks of these owners, without waiting for them."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._cancel, set(owners))

    def _cancel(self, owners: set[Hashable]) -> None:
        for task, owner in self._owners.items():
            if owner in owners:
                task.cancel()

    def begin_close(self) -> None:
        """Cancels all tasks, without waiting for them; none can be begun any more."""
        with self._lock:
            self._is_closed = True
            if self._loop is not None and self._ending is None:
                self._ending = asyncio.run_coroutine_threadsafe(self._end_all(), self._loop)

    def close(self) -> None:
        """Cancels all tasks and waits until they and those of `finish` have ended, at most `END_S`.

        Safe to call twice.
        """
        self.begin_close()
        if self._ending is not None:
            concurrent.futures.wait([self._ending], END_S)
        with self._lock:
            loop = self._loop
            self._loop = None
        if loop is None:
            return
        if self._num_last:
            log.warning("%d episodes of an environment were not closed within %g s", self._num_last, END_S)
        self.shared.leave()

    async def _end_all(self) -> None:
        tasks = list(self._owners)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._num_last:
            await asyncio.sleep(0.01)


WAKE_S = 0.01
LOCK_S = 1.0  # longest wait of `close` for a thread that submits


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
        self._environment = environment
        self._loop = loop
        self._timeout_s = timeout_s
        self.references = environment.references
        self.name = type(environment).__name__

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
        try:
            return (await episode.step(completion)).reward
        finally:
            close = getattr(episode, "close", None)
            if close is not None and episode is not self._environment:
                ended = close()
                if inspect.isawaitable(ended):
                    await ended


class EpisodeEngine(EngineWrapper):
    """Alternates turns of `engine` and `environment`, whose rewards replace `data.reward`.

    A turn ends with the end-of-sequence token, a stop token or a stop string; all stay in the context, but the
    environment gets the text before the stop string. `sampling.max_tokens` bounds one turn. Otherwise an episode ends,
    with finish reason `length`, after a turn that reached `max_tokens`, after `max_turns`, or when another turn might
    not fit into the context.

    Running episodes always continue under new weights, so later turns may be of newer versions than earlier ones; every
    token is tagged with its own, and the bound holds for all of them. Incompatible with `FixedLag`.

    An episode whose environment fails is played again from its first turn, with a new episode; nothing of the failed
    one is trained on.

    Args:
        engine: generates the turns.
        environment: responds to them.
        max_turns: maximum turns of the policy in one episode.
        step_timeout_s: timeout of an environment's start or response, and of the end of an episode.
        tries: an episode whose environment fails (it raises or times out) that many times is given up with a warning,
            and another prompt takes the place of its own; ten such prompts in a row, without an episode that ends in
            between, end the run. None ends it at the first failure.
        backoff_s: seconds before the second try; each further pause is twice as long.
        step_cut_turns: the environment also rewards a turn that reached `max_tokens` (`Episode.step_cut`). False: such
            an episode ends with the rewards of its earlier turns.

    Raises:
        ValueError: a setting is out of range, or the engine does not update weights in flight.
    """

    scores = True
    in_flight_weight_updates = True

    def __init__(
        self,
        engine: RolloutEngine,
        environment: Environment,
        max_turns: int = 8,
        step_timeout_s: float = 60.0,
        tries: int | None = None,
        backoff_s: float = 0.0,
        step_cut_turns: bool = True,
    ) -> None:
        check_range("EpisodeEngine", "integer >= 1", max_turns=max_turns)
        self.policy = TryPolicy(
            owner="data.engine",
            timeout_s=step_timeout_s,
            tries=tries,
            backoff_s=backoff_s,
            timeout_name="step_timeout_s",
            done="played",
        )
        if not engine.in_flight_weight_updates:
            raise ValueError("EpisodeEngine needs engine.in_flight_weight_updates=true: an episode is many requests")
        super().__init__(engine)
        self.environment = environment
        self.max_turns = max_turns
        self.step_timeout_s = step_timeout_s
        self.step_cut_turns = step_cut_turns
        self._codec: TextCodec | None = None
        self._ids = itertools.count()
        self._lock = threading.RLock()
        self._live: dict[int, list[Conversation]] = {}  # request -> conversations that have not ended
        self._talking: dict[int, dict[int, Conversation]] = {}  # inner request -> conversations whose turn it samples
        self._ledger: RequestLedger | None = None  # of turns; guarded by the lock
        self._waiting: dict[Conversation, float] = {}  # conversations whose environment works, and since when
        self._answering = Overlap("answer")
        self._finished: list[Completion] = []
        self._given_up: list[int] = []  # requests
        self._error: BaseException | None = None
        self._retries = Retries(self.policy)
        self._warnings = LimitedLog(log)
        self._tasks = EnvironmentTasks(EnvironmentLoop())
        self._is_successor = False  # of an engine that has said what it has to say

    def around(self, engine: RolloutEngine, codec: TextCodec) -> EpisodeEngine:
        """The same environment, in its event loop, with another engine."""
        policy = self.policy
        other = EpisodeEngine(
            engine,
            self.environment,
            max_turns=self.max_turns,
            step_timeout_s=policy.timeout_s,
            tries=policy.tries,
            backoff_s=policy.backoff_s,
            step_cut_turns=self.step_cut_turns,
        )
        other._codec = codec
        other._ledger = RequestLedger(engine, codec.vocab_size)
        other._tasks = EnvironmentTasks(self._tasks.shared)
        return other

    def fresh(self, out_of_memory: bool = False) -> RolloutEngine:
        """See `RolloutEngine`; the environment is the same object and stays in its event loop."""
        other: Any = super().fresh(out_of_memory)
        other._is_successor = True
        other._tasks = EnvironmentTasks(self._tasks.shared)
        return other

    def grader(self) -> EnvironmentGrader:
        """The environment as a reward of single turns, to check it against reference answers."""
        return EnvironmentGrader(self.environment, self._tasks.shared, self.policy.timeout_s)

    @property
    def scoring_identity(self) -> str:
        """See `RolloutEngine`: of the environment, and how many turns it may answer."""
        return f"{reward_identity(self.environment)}, max_turns={self.max_turns}"

    def setup(self, model: str) -> None:
        self._codec = TextCodec(model, self.special_tokens)
        super().setup(model)
        if self.step_cut_turns and not self._is_successor:  # another default than in earlier versions
            log.warning(
                "a turn that is cut at data.sampling.max_tokens is shown to the environment, which may reward it "
                "(data.engine.step_cut_turns=false: its episode ends unseen, without a reward of that turn)"
            )
        self._ledger = RequestLedger(self.engine, self._codec.vocab_size)
        self._answering.lane = recorder().lane(ENVIRONMENT)  # not in validation, which sets no engine up

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
                finished = self._finished
                self._finished = []
                waiting = bool(self._waiting)
            remaining = deadline - time.monotonic()
            if finished or remaining <= 0:
                return finished
            turns = self.engine.poll(min(remaining, WAKE_S) if waiting else remaining)
            for completion in self._asked.listed(turns, "poll"):
                self._end_turn(completion)

    def take_given_up(self) -> list[int]:
        with self._lock:
            given_up = self._given_up
            self._given_up = []
        return given_up

    def outside_work(self) -> Work | None:
        began = list(self._waiting.values())  # without the lock, which a thread that hangs in the engine may hold
        if not began:
            return None
        name = f"environment {type(self.environment).__name__}"
        oldest_s = max(0.0, time.monotonic() - min(began))
        return Work(name=name, num_calls=len(began), oldest_s=oldest_s, policy=self.policy)

    def abort(self, request_ids: Sequence[int]) -> None:
        """Aborts episodes; the pending response of an environment is cancelled, and any error of it ignored."""
        with self._lock:
            inner = self._drop(request_ids)
        self.engine.abort(inner)

    def _drop(self, request_ids: Iterable[int]) -> list[int]:
        """Forgets requests and ends their episodes; returns the inner requests to abort."""
        dropped = set(request_ids)
        gone = {talk for number in dropped for talk in self._live.pop(number, [])}
        self._tasks.cancel(gone & self._waiting.keys())
        self._end(gone)
        inner = [number for number, talks in self._talking.items() if not gone.isdisjoint(talks.values())]
        for number in inner:
            del self._talking[number]
        self._asked.abort(inner)
        self._finished = [c for c in self._finished if c.request_id not in dropped]
        return inner

    def _end(self, talks: Iterable[Conversation]) -> None:
        """Marks conversations as over; closes their episodes, unless the environment works: then `_after_work` does."""
        for talk in talks:
            talk.is_over = True
            if self._waiting.pop(talk, None) is None:
                self._release(talk)

    def _release(self, talk: Conversation) -> None:
        """Has the episode of a conversation closed, if there is one."""
        episode = talk.episode
        talk.episode = None
        if episode is None or episode is self.environment:  # one that is its own episode is closed at the end
            return
        if (close := getattr(episode, "close", None)) is not None:
            self._tasks.finish(self._close(close))

    async def _close(self, close: Callable[[], Any]) -> None:
        """Calls `close` of an episode or environment, which may be a plain function; its errors end nothing."""
        try:
            ended = close()
            if inspect.isawaitable(ended):
                await asyncio.wait_for(ended, self.step_timeout_s)
        except asyncio.TimeoutError:
            self._warn_of_close(f"did not return within {self.policy.limit}")
        except (Exception, asyncio.CancelledError) as error:
            self._warn_of_close(f"raised {type(error).__name__}: {error}")

    def _warn_of_close(self, what: str) -> None:
        self._warnings.warning("environment %s: close %s", type(self.environment).__name__, what)

    def close(self) -> None:
        self._end_talks()
        self._tasks.begin_close()
        try:
            super().close()
        finally:
            self._end_talks()
            self._tasks.close()

    def _end_talks(self) -> None:
        """Ends all conversations, unless another thread hangs in the inner engine; that is closed first then."""
        if not self._lock.acquire(timeout=LOCK_S):
            return
        try:
            talks = [talk for talks in self._live.values() for talk in talks]
            self._live.clear()
            self._talking.clear()
            self._end(talks)
        finally:
            self._lock.release()

    def end(self) -> None:
        """Closes the environment, once after each time that it was used; its event loop is that of all episodes."""
        super().end()
        close: Any = getattr(self.environment, "close", None)
        if close is not None and getattr(close, "__func__", None) is not Environment.close:
            self._tasks.shared.end(lambda: self._close(close))

    def _end_turn(self, completion: Completion) -> None:
        """Files a finished turn; unless the episode is over, passes it to the environment."""
        with self._lock:
            talk = self._take_talk(completion) if self._asked.receive(completion) else None
            if talk is None:
                return  # aborted
            talk.add_turn(completion)
            is_cut = completion.finish_reason != "stop"
            if is_cut and not self.step_cut_turns:
                self._finish(talk, completion.finish_reason)
                return
            self._waiting[talk] = time.monotonic()
            sampling = talk.request.sampling
            text = self._tokenizer.decode(completion.token_ids, sampling.stop, sampling.stop_token_ids)
            self._tasks.begin(talk, self._answer(talk, text, is_cut), after=lambda: self._after_work(talk))

    def _take_talk(self, turn: Completion) -> Conversation | None:
        talks = self._talking.get(turn.request_id)
        if talks is None:
            return None
        talk = talks.pop(turn.sample_index)
        if not talks:
            del self._talking[turn.request_id]
        return talk

    def _after_work(self, talk: Conversation) -> None:
        """Closes the episode of a conversation that was ended while its environment worked."""
        with self._lock:
            if talk.is_over:
                self._release(talk)

    async def _answer(self, talk: Conversation, text: str, is_cut: bool) -> None:
        """Continues an episode with the environment's response. `poll` raises any error, unless it was aborted."""
        try:
            try:
                ids = await self._respond(talk, text, is_cut)
            except EnvironmentFailure as failure:
                await self._fail(talk, failure)
                return
            with self._lock:
                if self._waiting.pop(talk, None) is not None:
                    self._continue(talk, ids, is_cut)
        except Exception as error:
            with self._lock:
                self._waiting.pop(talk, None)
                if talk in self._live.get(talk.request.id, ()):
                    self._error = self._error or error

    async def _fail(self, talk: Conversation, failure: EnvironmentFailure) -> None:
        """Plays an episode again, or gives up its request.

        Raises:
            EnvironmentFailure: the run is to end.
        """
        inner: list[int] = []
        with self._lock:
            if talk not in self._waiting:  # nobody looks where the episode was aborted
                return
            talk.num_failed += 1
            is_played_again = self._retries.may_try_again(talk.prompt, talk.num_failed, failure)
            pause_s = self.policy.pause_s(talk.num_failed)
            if is_played_again:
                self._release(talk)
                self._waiting[talk] = time.monotonic() + pause_s
            else:
                self._given_up.append(talk.request.id)
                inner = self._drop([talk.request.id])
        if not is_played_again:
            self.engine.abort(inner)
            return
        if pause_s:
            await asyncio.sleep(pause_s)
        with self._lock:
            if self._waiting.pop(talk, None) is not None:
                self._ask_for(talk, talk.begin_again(next(self._ids)))

    async def _respond(self, talk: Conversation, text: str, is_cut: bool) -> tuple[int, ...] | None:
        """Tokens of the environment's response; None if it ends the episode. All errors are `EnvironmentFailure`."""
        try:
            with self._answering.one(turns=1):
                return await asyncio.wait_for(self._ask(talk, text, is_cut), self.step_timeout_s)
        except asyncio.TimeoutError:  # another class than TimeoutError before Python 3.11
            limit = f"step_timeout_s={self.step_timeout_s:g}"
            raise talk.failure(self.environment, text, f"did not answer within {limit}") from None
        except asyncio.CancelledError:  # by itself; nobody looks where the episode was aborted
            raise talk.failure(self.environment, text, "was cancelled") from None

    async def _ask(self, talk: Conversation, text: str, is_cut: bool) -> tuple[int, ...] | None:
        try:
            if talk.episode is None:
                talk.episode = await self.environment.start(talk.prompt)
            step_cut = getattr(talk.episode, "step_cut", talk.episode.step)
            observation: Observation = await (step_cut if is_cut else talk.episode.step)(text)
            as_reward(observation.reward)
            talk.add_answer(observation)
            return None if observation.done else self._tokenizer.encode_continuation(observation.text)
        except Exception as error:  # also its own TimeoutError, which is none of `step_timeout_s`
            raise talk.failure(self.environment, text, f"raised {type(error).__name__}: {error}") from error

    def _continue(self, talk: Conversation, ids: tuple[int, ...] | None, is_cut: bool) -> None:
        """Ends the episode, or submits the policy's next turn, which reads `ids`. Errors are the engine's."""
        if ids is None or is_cut:
            self._finish(talk, "length" if is_cut else "stop")
            return
        request = talk.request
        length = len(request.prompt_ids) + len(talk.token_ids) + len(ids) + request.sampling.max_tokens
        if len(talk.turns) == self.max_turns or length > self.max_model_len:
            self._finish(talk, "length")
            return
        self._ask_for(talk, talk.next_request(next(self._ids), ids))

    def _ask_for(self, talk: Conversation, turn: GenerationRequest) -> None:
        """Submits the next turn of a conversation."""
        self._talking[turn.id] = {0: talk}
        self._asked.open([turn])
        self.engine.submit([turn])

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
        self._retries.succeed()
        self._end([talk])
