"""Scoring of completions, with a timeout: in worker threads, or for an `async` reward in one event loop.

Workers wait for jobs (`submit` and `close` wake them); no thread waits for a worker. The producer thread calls `check`
in each iteration, which raises their errors. Workers are daemon threads, so that a hanging reward cannot keep the
process alive. For an `async` reward, which has none, see `async_calls`.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from lit_async_rl.errors import ProducerError, RewardError, SetupError, StalledError, describe
from lit_async_rl.problem import Prompt, Score
from lit_async_rl.rewards.async_calls import THREAD_NAME, AsyncCalls, CallUnderWay
from lit_async_rl.rewards.calls import NotANumber, Reward, checked, is_async, naming, reward_name, scores_groups
from lit_async_rl.rewards.forms import BatchedReward, wanted, wants
from lit_async_rl.runtime.loop import ReplaceableLoop
from lit_async_rl.runtime.retries import Retries, TryPolicy, Work
from lit_async_rl.runtime.spans import recorder, reward_lane
from lit_async_rl.runtime.threads import new_thread
from lit_async_rl.runtime.waiting import clock
from lit_async_rl.utils.checks import check_range

# -- Execution of `async` reward functions for the worker threads that score completions ------------------------------


T = TypeVar("T")


class Awaiter(ReplaceableLoop):
    """Runs awaitables of a reward in one event loop, so that all waiting threads can share a client (an HTTP session).

    Args:
        timeout_s: time limit of each awaitable, in seconds.
        reward: for messages.
    """

    def __init__(self, timeout_s: float, reward: Any) -> None:
        super().__init__(THREAD_NAME, runs=f"reward {reward_name(reward)}")
        self._timeout_s = timeout_s

    def wait(self, awaitable: Awaitable[T]) -> T:
        """Returns the result of an awaitable, or raises its exception.

        Raises:
            StalledError: it timed out and was cancelled.
        """
        return self.call(_result(awaitable), self._timeout_s, "an async reward")


async def _result(awaitable: Awaitable[T]) -> T:
    return await awaitable


MAX_LANES = 8  # a timeline shows the first workers only
CLOSE_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 0.2
MAX_ABANDONED = 32  # threads of hanging calls; each keeps its memory, and may occupy a core
ALMOST = 0.9  # of its time limit: a call begins a moment before its batch
MAX_QUEUED = 1024  # concurrent calls of a reward with its own queue
log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Job:
    prompt: Prompt
    completions: tuple[str, ...]  # one, or a group scored together
    done: Callable[[Any], None]
    give_up: Callable[[], None]
    is_wanted: Callable[[], bool]
    group: int | None = None
    token_ids: Sequence[int] = ()
    is_group: bool = False
    num_tries: int = 0
    is_reported_slow: bool = False
    rest: Any = None  # a combined reward after the calls of its plain parts


@dataclass(eq=False)
class _Try:
    since: float  # when it began, or its reward last said that it got on
    job: _Job


Outcome = float | list[float] | RewardError  # of a job


def _called(reward: Any, job: _Job, **begun: Callable[[], None]) -> Any:
    """Return value of a reward for the completions of a job; perhaps an awaitable."""
    if job.is_group:
        return reward.score_group(job.prompt, job.completions, **begun)
    return reward(job.prompt, job.completions[0], **wanted(reward, token_ids=tuple(job.token_ids)), **begun)


def _checked_value(value: Any, job: _Job) -> Outcome:
    """Reward of a job, or those of its group."""
    if not job.is_group:
        return checked(value)
    found = list(value)
    if len(found) != len(job.completions):
        raise NotANumber(f"{len(found)} rewards for {len(job.completions)} completions")
    return [checked(one) for one in found]


class Scorer:
    """Scores completions in worker threads, or in the event loop of an `async` reward.

    Optional features of a reward, besides a function `reward(prompt, completion)`:

    | | |
    |---|---|
    | `async def` | awaited in one event loop, concurrently with the others |
    | attribute `max_concurrent` of an `async` reward | concurrent calls, in place of `num_calls` |
    | parameter `token_ids` | the token ids of the completion |
    | parameter `begun` of an `async` reward | it has its own queue: it gets up to `MAX_QUEUED` concurrent calls, and |
    | | calls `begun` when it starts to work on a completion, which starts the clock; each further call restarts it |
    | method `score_group(prompt, completions)` | rewards of all completions of a prompt, in `submit_group` |

    Args:
        reward: `reward(prompt, completion) -> float`; None if nothing is submitted.
        num_workers: completions scored concurrently.
        timeout_s: time limit per completion, in seconds. A call that times out is abandoned, and its worker replaced.
        max_tries: attempts before a completion is given up, with a log line, see `Retries`.
        backoff_s: seconds before the second attempt, see `TryPolicy`.
        records_spans: whether the workers appear in the timeline.
        policy: in place of the three limits, of a function that is not `data.reward`.
        num_calls: concurrent calls of an `async` reward; None is `num_workers`.

    Attributes:
        keeps_rewards: whether a resumed run keeps rewards of another reward function, environment or answers.
    """

    def __init__(
        self,
        reward: Reward | None,
        num_workers: int = 1,
        timeout_s: float = 60.0,
        max_tries: int | None = None,
        backoff_s: float = 0.0,
        records_spans: bool = True,
        policy: TryPolicy | None = None,
        num_calls: int | None = None,
    ) -> None:
        check_range("data.scoring", "integer >= 1", workers=num_workers)
        self.policy = policy or TryPolicy(
            owner="data.scoring", timeout_s=timeout_s, tries=max_tries, backoff_s=backoff_s
        )
        self.reward = reward
        self.keeps_rewards = False
        self.timeout_s = self.policy.timeout_s
        self.num_workers = num_workers
        num_calls = num_calls or num_workers
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()  # of the workers
        # Shared without a lock: a single operation on a dictionary or list is atomic. The thread that pops an entry of
        # `_running` handles its job: the worker (or loop) itself, or `check` after a timeout.
        self._running: dict[Any, _Try] = {}  # by worker or call in the loop
        self._error: BaseException | None = None
        self._retries = Retries(self.policy)
        self._pausing: list[tuple[float, _Job]] = []  # earliest time of the next attempt, and job; see `check`
        self._awaiter = Awaiter(self.timeout_s, reward)
        self._numbers = itertools.count()
        self._workers: dict[int, threading.Thread] = {}  # without abandoned ones
        self._abandoned: list[threading.Thread] = []  # that have not ended since
        self._busy_s = 0.0
        self._cpu_s = 0.0
        self._is_closed = False
        self._lanes = {n: recorder().lane(reward_lane(n)) for n in range(MAX_LANES)} if records_spans else {}
        self._is_async = False  # whether the event loop scores all, without workers
        self._has_own_queue = False
        limit: int | None = None  # of concurrent calls in the event loop; None without one
        if reward is not None and is_async(reward):
            self._is_async = True
            self.num_workers = getattr(reward, "max_concurrent", None) or num_calls
            self._has_own_queue = wants(reward, "begun")
            limit = max(MAX_QUEUED, self.num_workers) if self._has_own_queue else self.num_workers
        elif (limit_calls := getattr(reward, "limit_calls", None)) is not None:  # of a combined reward
            limit = limit_calls(num_calls)
        self._calls: AsyncCalls[_Job, Outcome] | None = None  # of an `async` reward, or `async` parts of a combined one
        if limit is not None:
            self._calls = AsyncCalls(
                limit,
                call=self._await,
                is_wanted=lambda job: job.is_wanted() and not self._is_closed,
                on_begin=self._began,
                on_progress=self._got_on,
                on_end=self._ended,
                runs=self._awaiter.runs,
            )
        for _ in range(0 if self._is_async else num_workers):
            self._add_worker()

    def _add_worker(self) -> None:
        number = next(self._numbers)
        self._workers[number] = new_thread(self._work, number, name=f"reward-{number}")
        self._workers[number].start()  # which looks for itself there

    def submit(
        self,
        prompt: Prompt,
        completion: str,
        done: Callable[[float], None],
        give_up: Callable[[], None] = lambda: None,
        is_wanted: Callable[[], bool] = lambda: True,
        group: int | None = None,
        token_ids: Sequence[int] = (),
    ) -> None:
        """Scores in the background: calls `done(reward)`, or `give_up()` after the last failed attempt.

        The worker calls them, for an `async` reward the filing thread, and after a timeout `check`. `is_wanted` is
        called before each attempt; False drops the job. `group` is the group's number, for the timeline. `token_ids` of
        the completion are for rewards with a parameter of that name.
        """
        self._put(
            _Job(prompt, (completion,), done, give_up=give_up, is_wanted=is_wanted, group=group, token_ids=token_ids)
        )

    @property
    def scores_groups(self) -> bool:
        """Whether the completions of a group must be scored together, with `submit_group`."""
        return scores_groups(self.reward)

    def submit_group(
        self,
        prompt: Prompt,
        completions: Sequence[str],
        done: Callable[[list[float]], None],
        give_up: Callable[[], None] = lambda: None,
        is_wanted: Callable[[], bool] = lambda: True,
        group: int | None = None,
    ) -> None:
        """As `submit`, for a reward that `scores_groups`: all completions of a prompt, in one call."""
        self._put(
            _Job(prompt, tuple(completions), done, give_up=give_up, is_wanted=is_wanted, group=group, is_group=True)
        )

    def _put(self, job: _Job) -> None:
        """Queues an attempt from its beginning."""
        if self._is_async and self._calls is not None:
            self._calls.put(job)
        else:
            self._jobs.put(job)

    # -- worker threads -----------------------------------------------------------------------------------------------

    def _score(self, job: _Job, reward: Any) -> Any:
        with naming(reward, job.prompt, job.completions):
            if self._calls is not None and not job.is_group:
                found = reward.begin(job.prompt, job.completions[0], token_ids=job.token_ids)
                return checked(found) if isinstance(found, Score) else found  # the event loop continues it
            value = _called(reward, job)
            return _checked_value(self._awaiter.wait(value) if inspect.isawaitable(value) else value, job)

    def _work(self, number: int) -> None:
        while (job := self._jobs.get()) is not None:
            if self._is_closed:
                return
            if not job.is_wanted():
                continue
            if self.reward is None:
                self._error = SetupError("completions cannot be scored: data.reward is null")
                return
            began = time.monotonic()
            began_cpu = time.thread_time()
            self._running[number] = _Try(clock.now(), job)
            outcome: Any
            try:
                outcome = self._score(job, self.reward)
            except RewardError as error:
                outcome = error
            except StalledError:
                outcome = self._too_late(job)
            except BaseException as error:
                self._error = error
                return
            self._cpu_s += time.thread_time() - began_cpu
            seconds = time.monotonic() - began
            if self._calls is not None and callable(outcome):
                if self._running.pop(number, None) is None or self._is_closed:  # it timed out meanwhile
                    return
                self._busy_s += seconds
                job.rest = outcome
                self._calls.put(job)
                continue
            if not self._end(number, job, outcome, began=began, seconds=seconds, lane=number):
                return

    def _end(self, number: Any, job: _Job, outcome: Outcome, *, began: float, seconds: float, lane: int) -> bool:
        """Files an outcome; False if the worker must end, because it was replaced or this failed."""
        if self._running.pop(number, None) is None or self._is_closed:  # it timed out meanwhile
            return False
        self._busy_s += seconds
        if (recorded := self._lanes.get(lane)) is not None:
            is_ok = not isinstance(outcome, RewardError)
            recorded.add("score", began, seconds, group=job.group, ok=is_ok, completions=1)
        try:
            if isinstance(outcome, RewardError):
                self._fail(job, outcome)
            else:
                self._retries.succeed()
                job.done(outcome)
        except BaseException as error:
            self._error = error
            return False
        return True

    # -- event loop of `async` rewards, and the thread that files its outcomes ----------------------------------------

    async def _await(self, job: _Job, begin: Callable[[], None]) -> Outcome:
        reward: Any = self.reward
        try:
            with naming(reward, job.prompt, job.completions):
                if job.rest is not None:
                    return checked(await job.rest(begin))
                begun = {"begun": begin} if self._has_own_queue else {}
                if not self._has_own_queue:
                    begin()
                value = _called(reward, job, **begun)
                return _checked_value(await value if inspect.isawaitable(value) else value, job)
        except RewardError as error:
            return error
        except StalledError:
            return self._too_late(job)

    def _began(self, call: CallUnderWay[_Job, Outcome]) -> None:
        self._running[call] = _Try(clock.now(), call.job)

    def _got_on(self, call: CallUnderWay[_Job, Outcome]) -> None:
        """Restarts the clock: a judge of a group asks many questions, one after the other, each with a limit."""
        if (running := self._running.get(call)) is not None:  # else it timed out
            running.since = clock.now()

    def _ended(self, call: CallUnderWay[_Job, Outcome]) -> None:
        # counted from the end beside workers, to which the first ones belong
        lane = call.lane if self._is_async else MAX_LANES - 1 - call.lane
        self._end(call, call.job, call.outcome[0], began=call.began, seconds=call.seconds, lane=lane)

    # -- any thread ---------------------------------------------------------------------------------------------------

    def _fail(self, job: _Job, error: RewardError) -> None:
        """Queues another attempt, gives up the prompt, or raises."""
        if not job.is_wanted():
            return
        job.num_tries += 1
        if self._retries.may_try_again(job.prompt, job.num_tries, error, is_final=error.is_final):
            job.is_reported_slow = False
            if pause_s := self.policy.pause_s(job.num_tries):
                self._pausing.append((clock.now() + pause_s, job))
            else:
                self._put(job)
        else:
            job.give_up()

    @property
    def busy_s(self) -> float:
        """Seconds spent scoring so far, averaged over workers."""
        return self._busy_s / self.num_workers

    @property
    def cpu_share(self) -> float:
        """Processor time of the workers as a share of the time spent scoring."""
        cpu_s = self._cpu_s + (0.0 if self._calls is None else self._calls.cpu_s)
        return min(1.0, cpu_s / self._busy_s) if self._busy_s else 0.0

    def check(self) -> None:
        """Raises errors of workers, replaces those that timed out, and queues jobs whose pause is over.

        Raises:
            RewardError: a call timed out in its last attempt, or too many calls hang.
        """
        if isinstance(self._error, StopIteration) or not isinstance(self._error, Exception | None):
            # from a filter, say: it would end the run as if complete
            raise ProducerError(f"rollout generation failed: {describe(self._error)}") from self._error
        if self._error is not None:
            raise self._error
        for entry in list(self._pausing):
            if entry[0] <= clock.now():
                self._pausing.remove(entry)
                self._put(entry[1])
        for number, running in list(self._running.items()):
            job = running.job
            seconds = clock.now() - running.since
            if seconds > self.timeout_s / 2 and not job.is_reported_slow:
                job.is_reported_slow = True
                took = f"{seconds:.1f} s of {self.policy.limit}"
                log.warning("reward %s is slow: %s, %r", self._name, took, job.prompt.text[:200])
            if seconds <= self.timeout_s or self._running.pop(number, None) is None:
                continue
            if self._calls is not None and isinstance(number, CallUnderWay):
                self._calls.abandon(number)
            else:
                self._abandoned.append(self._workers.pop(number))
                self._add_worker()
                self._abandon_batches()
            self._fail(job, self._too_late(job))
            self._check_abandoned()

    def _abandon_batches(self) -> None:
        """Lets others be scored beside the batch of an abandoned call."""
        for part in (self.reward, *getattr(self.reward, "rewards", {}).values()):
            if isinstance(part, BatchedReward):
                part.abandon_batch(ALMOST * self.timeout_s)

    def _check_abandoned(self) -> None:
        """Ends a run that leaks a thread with each hanging call.

        Raises:
            RewardError: too many calls hang.
        """
        self._abandoned = [worker for worker in self._abandoned if worker.is_alive()]
        number = len(self._abandoned) + self._awaiter.num_blocked
        number += 0 if self._calls is None else self._calls.num_blocked
        if number >= MAX_ABANDONED:
            raise RewardError(
                f"{number} calls of reward {self._name} have not returned within {self.policy.limit} and are still "
                "running in threads that cannot be stopped. Use IsolatedReward, whose process is killed at its time "
                "limit"
            )

    def work(self) -> Work | None:
        """Running calls and those waiting for another attempt; None without any."""
        now = clock.now()
        ages = [now - running.since for running in list(self._running.values())]
        # the producer's thread ends a pause: one that goes on beyond its end is no reason to wait for that thread
        ages += [max(0.0, now - due) for due, _ in list(self._pausing)]
        if not ages:
            return None
        return Work(name=f"reward {self._name}", num_calls=len(ages), oldest_s=max(ages), policy=self.policy)

    @property
    def _name(self) -> str | None:
        return reward_name(self.reward) if self.reward is not None else None

    def _too_late(self, job: _Job) -> RewardError:
        late = f"reward {self._name} did not return within {self.policy.limit}"
        return RewardError(f"{late} on prompt {job.prompt.text[:200]!r}")

    def close(self) -> None:
        """Stops the workers; queued completions are not scored.

        Joins them with a timeout: a thread that returns from C++ during interpreter shutdown aborts the process, and a
        hanging reward cannot be stopped.
        """
        self._is_closed = True
        self._awaiter.close()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        if self._calls is not None:
            self._calls.close(CLOSE_TIMEOUT_S)
        for _ in range(self.num_workers):
            self._jobs.put(None)
        for worker in list(self._workers.values()):
            if worker is not threading.current_thread():
                worker.join(max(0.0, deadline - time.monotonic()))


def score_all(
    scorer: Scorer,
    completions: Sequence[tuple[Prompt, str]],
    on_progress: Callable[[], None],
    token_ids: Sequence[Sequence[int]] | None = None,
) -> list[float | None]:
    """Scores pairs of prompt and completion; returns rewards in their order, None for one that was given up. Blocks.

    `on_progress` is called after each reward, and while calls run within their limits. The `token_ids` of each
    completion are for rewards with a parameter of that name.

    Raises:
        RewardError: see `Scorer`.
    """
    results: queue.SimpleQueue[tuple[int, float | None]] = queue.SimpleQueue()

    def put(n: int, reward: float | None) -> None:
        results.put((n, reward))

    for n, (prompt, completion) in enumerate(completions):
        ids = () if token_ids is None else token_ids[n]
        scorer.submit(prompt, completion, done=partial(put, n), give_up=partial(put, n, None), token_ids=ids)
    rewards: dict[int, float | None] = {}
    while len(rewards) < len(completions):
        scorer.check()
        try:
            n, reward = results.get(timeout=POLL_INTERVAL_S)
        except queue.Empty:
            if (work := scorer.work()) is not None and work.is_within_limits:
                on_progress()  # other ranks must not take a slow reward for a hanging rank
            continue
        rewards[n] = reward
        on_progress()
    return [rewards[n] for n in range(len(completions))]
