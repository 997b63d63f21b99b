"""A reward that asks a language model: `JudgeReward`, with cache and budget.

| who | waits for | woken by |
|---|---|---|
| judge's event loop | the endpoint, a permit for a request, a pause, the local model | the operating system, a timer |
| caller of the reward (the scorer's event loop) | a verdict | the judge's event loop |
| thread of a local model | questions | `ask`, `close` |

The judge has its own event loop because several others call it, and share its permits, connections and budget:
training, validation and direct callers.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import logging
import os
import statistics
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lit_async_rl.engines.base import RolloutEngine
from lit_async_rl.errors import FinalRewardError, RewardError, RewardSetupError
from lit_async_rl.judges.judge_models import Answer, ConcurrencyLimiter, Endpoint, JudgeLimits, LocalModel, Permit
from lit_async_rl.judges.judge_policy import POLICY, NoPolicyError, PolicyModel, questions_of
from lit_async_rl.judges.judge_questions import PAIRWISE, REFERENCE, RUBRIC, Question
from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.calls import Reward, check_reward
from lit_async_rl.rewards.forms import as_reward_function
from lit_async_rl.rollouts.producer import Producer
from lit_async_rl.runtime.files import absolute, append, tolerate_full_disk
from lit_async_rl.runtime.guarded_calls import in_thread
from lit_async_rl.runtime.limited_log import LimitedLog
from lit_async_rl.runtime.loop import LoopThread
from lit_async_rl.types import SamplingParams
from lit_async_rl.utils.checks import as_reward, check_choice, check_range
from lit_async_rl.utils.elsewhere import Rebuildable

Substitute = Literal["error", "none", "fallback"] | float
CHOICES = ("error", "none", "fallback")
IN_RUN = "run"
RECENT = 1000  # requests in the latency statistics
CLOSE_S = 5.0
log = logging.getLogger(__name__)


class BudgetError(RewardSetupError):
    """The budget of a judge is spent."""


# -- Budget and counts ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class JudgeBudget:
    """Limits on the spending of a judge in a run, and its prices. None is no limit.

    A resumed run continues from the spending in its checkpoint. Requests in flight when a limit is reached still
    complete, and may exceed it.

    Args:
        calls: requests, failed ones included.
        tokens: read and written by the judge together.
        cost: in the currency of the prices.
        input_price: per million tokens that the judge reads.
        output_price: per million tokens that it writes.

    Raises:
        ValueError: a number is out of range, or `cost` is set without a price.
    """

    calls: int | None = None
    tokens: int | None = None
    cost: float | None = None
    input_price: float = 0.0
    output_price: float = 0.0

    def __post_init__(self) -> None:
        check_range("JudgeBudget", "integer positive", calls=self.calls, tokens=self.tokens)
        check_range("JudgeBudget", "positive", cost=self.cost)
        check_range("JudgeBudget", ">= 0 and finite", input_price=self.input_price, output_price=self.output_price)
        if self.cost is not None and not (self.input_price or self.output_price):
            raise ValueError(f"JudgeBudget.cost={self.cost:g} needs input_price and output_price (per million tokens)")


class Account:
    """Counts a judge's requests, tokens and verdicts, and enforces its budget.

    Args:
        budget: limits and prices.
    """

    def __init__(self, budget: JudgeBudget) -> None:
        self._budget = budget
        self.spent = {"calls": 0, "input_tokens": 0, "output_tokens": 0}
        self.counts = {"verdicts": 0, "cached": 0, "retries": 0, "unreadable": 0, "failed": 0, "substituted": 0}
        self._latencies: deque[float] = deque(maxlen=RECENT)

    @property
    def cost(self) -> float:
        """Spent so far."""
        budget = self._budget
        tokens = self.spent["input_tokens"] * budget.input_price + self.spent["output_tokens"] * budget.output_price
        return tokens / 1e6

    def note_request(self, is_first: bool) -> None:
        """Counts a request.

        Raises:
            BudgetError: the budget is spent.
        """
        budget = self._budget
        num_tokens = self.spent["input_tokens"] + self.spent["output_tokens"]
        limits = {"calls": self.spent["calls"], "tokens": num_tokens, "cost": self.cost}
        for name, spent in limits.items():
            limit = getattr(budget, name)
            if limit is not None and spent >= limit:
                raise BudgetError(f"JudgeBudget.{name}={limit:g} is spent: {spent:g}")
        self.spent["calls"] += 1
        self.counts["retries"] += not is_first

    def note_answer(self, answer: Answer) -> None:
        """Counts an answer.

        Raises:
            RewardSetupError: the budget limits tokens or cost, and the answer does not report its tokens.
        """
        self._latencies.append(answer.latency_s)
        if answer.prompt_tokens is None or answer.completion_tokens is None:
            for name in ("tokens", "cost"):
                if (limit := getattr(self._budget, name)) is not None:
                    raise RewardSetupError(
                        f"JudgeBudget.{name}={limit:g} cannot be enforced: the endpoint does not report the tokens of "
                        "a request (`usage`). Use JudgeBudget.calls"
                    )
        self.spent["input_tokens"] += answer.prompt_tokens or 0
        self.spent["output_tokens"] += answer.completion_tokens or 0

    def metrics(self) -> dict[str, float]:
        """Totals so far, and latency statistics of recent requests."""
        found: dict[str, float] = {f"num_{name}": float(count) for name, count in self.counts.items()}
        found |= {f"num_{name}": float(count) for name, count in self.spent.items()}
        found["cost"] = self.cost
        if latencies := sorted(self._latencies):
            found["latency_s"] = statistics.fmean(latencies)
            found["latency_p95_s"] = latencies[int(0.95 * (len(latencies) - 1))]
        return found


# -- Cache of verdicts ------------------------------------------------------------------------------------------------


class VerdictCache:
    """Verdicts by a digest of all that they depend on, optionally backed by a file of JSON lines.

    The file holds digests and verdicts, but no text. Several processes may append to the same file.
    """

    def __init__(self) -> None:
        self._known: dict[str, float] = {}
        self._path: Path | None = None

    def use(self, path: Path) -> None:
        """Loads a file and appends later verdicts to it; damaged lines are skipped."""
        if path == self._path:
            return
        self._path = path
        if not path.is_file():
            return
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    row = json.loads(line)
                    self._known[str(row["key"])] = as_reward(row["verdict"])
                except (ValueError, LookupError, TypeError):
                    continue

    def get(self, key: str) -> float | None:
        """Looks up a verdict; None if it is not cached."""
        return self._known.get(key)

    def put(self, key: str, verdict: float) -> None:
        """Adds a verdict."""
        self._known[key] = verdict
        if self._path is not None:
            with tolerate_full_disk(str(self._path)):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                append(self._path, json.dumps({"key": key, "verdict": verdict}) + "\n")


# -- The reward -------------------------------------------------------------------------------------------------------


class JudgeReward(Rebuildable):
    """Asks a language model how good a completion is; the reward lies between 0 and 1.

    The judge must end its answer with a line `VERDICT <mark>: <value>`, with a new random mark in each call: see
    `judge_questions` for what completions that address the judge can do. An answer without such a line, such as a
    refusal, is a 0 only if `on_unreadable` says so.

    Example:
        ```python
        import lit_async_rl as rl

        judge = rl.JudgeReward(model="Qwen/Qwen3-8B", base_url="http://localhost:8000/v1", mode="reference")
        ```

    | `mode` | the judge sees | verdict |
    |---|---|---|
    | `rubric` | prompt, completion | a number in `scale`, mapped to [0, 1] |
    | `reference` | prompt, completion, `prompt.answer` | the same |
    | `pairwise` | prompt, two completions of its group | the mean over the pairs of 1 (better), 0.5 (tie) and 0 |

    Each pair is asked in both orders, since judges prefer the first (or second) response. Held-out completions have no
    group: `pairwise` compares them with `prompt.answer`.

    Args:
        model: name that the endpoint knows; with an `engine` a Hugging Face name or folder; None for the policy.
        base_url: of an OpenAI-compatible endpoint, such as `https://api.openai.com/v1`.
        engine: in place of `base_url`: an engine for the model, beside the policy's, such as `EmbeddedEngine()`; its
            weights stay fixed, even if `model` is the base model of the training. Or `policy`: the policy in training
            judges with its newest weights, on the engine that samples its rollouts, which must update weights in
            flight. Its answers take no slot of the staleness bound, and are neither trained on nor kept, because the
            next version may judge otherwise.
        api_key_env: environment variable with the endpoint's key, which is written nowhere; None sends none.
        mode: see above.
        criteria: question about the completion, in place of the mode's own.
        scale: lowest and highest grade.
        num_samples: answers for each verdict.
        aggregate: `mean` or `median` of the readable ones.
        temperature: of the judge; None leaves it to the endpoint.
        max_tokens: of an answer, reasoning included.
        max_opponents: with `pairwise`, number of completions to compare each one with, its neighbours in a ring; even.
            None is all of the group of G, which takes G (G - 1) requests for each of the `num_samples`.
        on_unreadable: result without a readable answer: `error` (a failed try, see `data.scoring.tries`), `none` (the
            reward does not apply), `fallback`, or a number.
        on_failure: result when all tries have failed.
        on_budget: result when the budget is spent; `error` ends the run.
        fallback: reward that replaces a verdict, `fallback(prompt, completion)`.
        limits: of calls and time.
        budget: prices and spending limits.
        cache: store of readable verdicts by content: `run` (a file in the run's folder, if it has one), the path of a
            file, or None, which keeps them in memory.
        request: further fields of each request to an endpoint, such as `reasoning_effort`.
        name: prefix of its metrics and of its cache file.

    Raises:
        ValueError: a setting is out of range, contradicts another one, or the variable is not set.
        ModuleNotFoundError: `base_url` is given and the extra `judge` is not installed.
    """

    def __init__(
        self,
        model: str | None = None,
        base_url: str | None = None,
        engine: RolloutEngine | Literal["policy"] | None = None,
        api_key_env: str | None = None,
        mode: Literal["rubric", "reference", "pairwise"] = "rubric",
        criteria: str | None = None,
        scale: tuple[float, float] = (0.0, 10.0),
        num_samples: int = 1,
        aggregate: Literal["mean", "median"] = "mean",
        temperature: float | None = 0.0,
        max_tokens: int = 1024,
        max_opponents: int | None = None,
        on_unreadable: Substitute = "error",
        on_failure: Substitute = "error",
        on_budget: Substitute = "error",
        fallback: Reward | None = None,
        limits: JudgeLimits = JudgeLimits(),  # noqa: B008  frozen
        budget: JudgeBudget = JudgeBudget(),
        cache: str | None = IN_RUN,
        request: Mapping[str, Any] | None = None,
        name: str = "judge",
    ) -> None:
        # Arguments that verdicts depend on are public under their own name, for `reward_identity`; all else is private.
        self.model = model if model is not None else POLICY
        self.mode = mode
        self.criteria = criteria or {"rubric": RUBRIC, "reference": REFERENCE, "pairwise": PAIRWISE}.get(mode, "")
        self.scale = (float(scale[0]), float(scale[1]))
        self.num_samples = num_samples
        self.aggregate = aggregate
        self.temperature = temperature
        self.max_tokens = max_tokens
        self.max_opponents = max_opponents
        self.on_unreadable = on_unreadable
        self.on_failure = on_failure
        self.on_budget = on_budget
        if fallback is not None:
            check_reward(fallback, "JudgeReward.fallback")
            fallback = as_reward_function(fallback)
        self.fallback = fallback
        self.request = dict(request or {})
        self._name = name
        self._limits = limits
        self._account = Account(budget)
        self._check(base_url, engine, model, cache=cache)
        self._asked: Endpoint | LocalModel | PolicyModel
        on_request = self._account.note_request
        sampling = SamplingParams(temperature=1.0 if temperature is None else temperature, max_tokens=max_tokens)
        if base_url is not None:
            length = {} if "max_completion_tokens" in self.request else {"max_tokens": max_tokens}
            warmth = {} if temperature is None else {"temperature": temperature}
            fields = length | warmth | self.request
            self._asked = Endpoint(
                base_url, self.model, api_key_env, fields=fields, limits=limits, on_request=on_request
            )
        elif isinstance(engine, RolloutEngine):
            self._asked = LocalModel(self.model, engine, sampling=sampling, on_request=on_request)
        else:
            self._asked = PolicyModel(sampling=sampling, on_request=on_request)
        self._cache_setting = cache
        self._cache = VerdictCache()
        if cache not in (None, IN_RUN):
            self._cache.use(absolute(os.path.expanduser(str(cache))))
        self._limiter = ConcurrencyLimiter(limits.max_concurrent)
        self._orders = itertools.count()
        self._pending: dict[str, asyncio.Task[float | None]] = {}  # samples in flight, by key
        self._opening: asyncio.Task[None] | None = None
        self._lock = threading.Lock()  # guards the next one
        self._loop: LoopThread | None = None
        self._log = LimitedLog(log)

    def _check(
        self, base_url: str | None, engine: RolloutEngine | str | None, model: str | None, cache: str | None
    ) -> None:
        if (base_url is None) == (engine is None):
            which = "neither" if base_url is None else "both"
            raise ValueError(f"JudgeReward needs either base_url or engine, got {which}")
        if not isinstance(engine, RolloutEngine | None) and engine != POLICY:
            raise ValueError(f"JudgeReward.engine must be an engine or {POLICY}, got {engine!r}")
        if (model is None) != (engine == POLICY):
            raise ValueError(
                f"JudgeReward.model={model!r} with engine={engine!r}: leave `model` out if `engine` is {POLICY!r}, and "
                "set `model` in all other cases"
            )
        check_choice("JudgeReward", ("rubric", "reference", "pairwise"), mode=self.mode)
        check_choice("JudgeReward", ("mean", "median"), aggregate=self.aggregate)
        check_range("JudgeReward", "finite", low=self.scale[0], high=self.scale[1])
        if self.scale[0] >= self.scale[1]:
            raise ValueError(f"JudgeReward.scale must be two numbers, the lower one first, got {list(self.scale)}")
        check_range("JudgeReward", "integer positive", num_samples=self.num_samples, max_tokens=self.max_tokens)
        check_range("JudgeReward", "integer >= 2", max_opponents=self.max_opponents)
        check_range("JudgeReward", ">= 0 and finite", temperature=self.temperature)
        if self.max_opponents is not None and self.max_opponents % 2:
            raise ValueError(f"JudgeReward.max_opponents must be even, got {self.max_opponents}")
        if self.num_samples > 1 and self.temperature == 0:
            raise ValueError(
                f"JudgeReward.num_samples={self.num_samples} with temperature=0: the samples would be identical. Use a "
                "temperature > 0"
            )
        for name in ("on_unreadable", "on_failure", "on_budget"):
            choice = getattr(self, name)
            check_choice("JudgeReward", CHOICES, or_number=True, **{name: choice})
            if choice == "fallback" and self.fallback is None:
                raise ValueError(f"JudgeReward.{name}=fallback needs JudgeReward.fallback, a reward")
        if not self._name.isidentifier():
            raise ValueError(f"JudgeReward.name must be a Python identifier, got {self._name!r}")
        if engine == POLICY and cache not in (None, IN_RUN):
            raise ValueError(
                f"JudgeReward.cache={cache!r} with engine={POLICY}: the policy's verdicts change with its weights and "
                "are not cached; leave cache out"
            )

    # -- called by scorer, data module and monitors, from any thread --------------------------------------------------

    @property
    def max_concurrent(self) -> int:
        """Concurrent requests; see `Scorer`."""
        return self._limits.max_concurrent

    @property
    def call_timeout_s(self) -> float:
        """Time limit of one question; see `JudgeLimits`."""
        return self._limits.timeout_s

    async def __call__(self, prompt: Prompt, completion: str, begun: Callable[[], None] = lambda: None) -> float | None:
        """Reward of one completion; None where `on_unreadable`, `on_failure` or `on_budget` is `none`.

        Args:
            prompt: with `answer` in the modes `reference` and `pairwise`.
            completion: text to judge.
            begun: called from another thread when a question gets its permit, and when it is answered.

        Raises:
            FinalRewardError: no answer was obtained.
            RewardError: the answer holds no verdict.
        """
        return await self._in_loop(self._one(prompt, completion, begun))

    @property
    def score_group(self) -> Callable[..., Awaitable[list[float | None]]] | None:
        """Rewards of all completions of a prompt with `pairwise`, else None; see `Scorer`."""
        return self._score_group if self.mode == "pairwise" else None

    async def _score_group(
        self, prompt: Prompt, completions: Sequence[str], begun: Callable[[], None] = lambda: None
    ) -> list[float | None]:
        return await self._in_loop(self._group(prompt, completions, begun))

    async def _in_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        with self._lock:
            if self._loop is None:
                self._loop = LoopThread(self._name, runs=f"JudgeReward {self._name}")
            future = self._loop.begin(coroutine)
        if future is None:
            raise FinalRewardError(f"{self._name} was closed")
        return await asyncio.wrap_future(future)

    @property
    def wants_policy(self) -> bool:
        """Whether the judge is the policy in training."""
        return isinstance(self._asked, PolicyModel)

    @property
    def concurrency_setting(self) -> tuple[str, int]:
        """Name and value of the argument that limits concurrent questions."""
        return "limits.max_concurrent", self.max_concurrent

    def use_policy(self, producer: Producer | None) -> None:
        """Asks the policy on this producer's engine from now on; None, at the end of a fit, ends that."""
        if not isinstance(self._asked, PolicyModel):
            return
        before = self._asked.policy
        self._asked.policy = None if producer is None else questions_of(producer)
        if before is not None:
            before.close()

    def metrics(self) -> dict[str, float]:
        """Totals so far and recent latencies, for loggers."""
        return {f"{self._name}/{name}": value for name, value in self._account.metrics().items()}

    def use_folder(self, folder: Path) -> None:
        """Keeps verdicts in the folder of the run, if `cache` says so."""
        if self._cache_setting == IN_RUN and not self.wants_policy:
            self._cache.use(absolute(folder) / f"{self._name}_verdicts.jsonl")

    def save_state(self) -> dict[str, int]:
        """Spending so far, for a checkpoint."""
        return dict(self._account.spent)

    def restore_state(self, state: Mapping[str, int]) -> None:
        """Continues from the spending of an earlier run."""
        for name in self._account.spent:
            self._account.spent[name] = int(state.get(name, 0))

    def close(self) -> None:
        """Cancels questions, closes connections or model, and ends all threads; a later call reopens them."""
        with self._lock:
            loop = self._loop
            self._loop = None
            self._opening = None
            self._pending = {}
            self._limiter = ConcurrencyLimiter(self._limits.max_concurrent)
        if loop is not None and loop.answers(CLOSE_S):
            loop.close(self._asked.close())

    # -- the judge's event loop ---------------------------------------------------------------------------------------

    async def _one(self, prompt: Prompt, completion: str, begun: Callable[[], None]) -> float | None:
        self._account.counts["verdicts"] += 1
        order = next(self._orders)
        if self.mode == "pairwise":
            grade = partial(self._compare, prompt, completion, _answer(prompt, self.mode), order=order, begun=begun)
        else:
            reference = _answer(prompt, self.mode) if self.mode == "reference" else None
            question = Question(self.criteria, prompt.text, (completion,), reference=reference, scale=self.scale)
            grade = partial(self._grade, question, order, begun)
        try:
            verdict = await grade()
        except FinalRewardError as error:
            return await self._substitute(error, prompt, completion)
        return verdict if verdict is not None else await self._substitute(None, prompt, completion)

    async def _group(self, prompt: Prompt, completions: Sequence[str], begun: Callable[[], None]) -> list[float | None]:
        number = len(completions)
        if number < 2:
            raise ValueError("JudgeReward.mode=pairwise compares completions of a group: data.group_size must be >= 2")
        self._account.counts["verdicts"] += number
        order = next(self._orders)
        reach = number // 2 if self.max_opponents is None else min(self.max_opponents // 2, number // 2)
        pairs = sorted({tuple(sorted((n, (n + step) % number))) for n in range(number) for step in range(1, reach + 1)})
        asked = [self._compare(prompt, completions[a], completions[b], order=order, begun=begun) for a, b in pairs]
        verdicts = await asyncio.gather(*asked, return_exceptions=True)
        points: list[list[float]] = [[] for _ in completions]
        problems: list[FinalRewardError | None] = [None for _ in completions]
        for (a, b), verdict in zip(pairs, verdicts, strict=True):
            if isinstance(verdict, FinalRewardError):
                problems[a] = problems[b] = verdict
            elif isinstance(verdict, BaseException):
                raise verdict
            elif verdict is not None:
                points[a].append(verdict)
                points[b].append(1.0 - verdict)
        return [
            statistics.fmean(found) if found else await self._substitute(problem, prompt, completion)
            for found, problem, completion in zip(points, problems, completions, strict=True)
        ]

    async def _compare(
        self, prompt: Prompt, one: str, other: str, *, order: int, begun: Callable[[], None]
    ) -> float | None:
        """1 if `one` is better, 0 if `other` is, 0.5 for a tie; averaged over both orders."""
        if one == other:
            return 0.5
        there = Question(self.criteria, prompt.text, (one, other))
        back = Question(self.criteria, prompt.text, (other, one))
        first, second = await asyncio.gather(self._grade(there, order, begun), self._grade(back, order, begun))
        readable = ([] if first is None else [first]) + ([] if second is None else [1.0 - second])
        return statistics.fmean(readable) if readable else None

    async def _grade(self, question: Question, order: int, begun: Callable[[], None]) -> float | None:
        samples = await asyncio.gather(
            *(self._sample(question, n, order, begun=begun) for n in range(self.num_samples))
        )
        readable = [sample for sample in samples if sample is not None]
        if not readable:
            return None
        return statistics.median(readable) if self.aggregate == "median" else statistics.fmean(readable)

    async def _sample(self, question: Question, number: int, order: int, *, begun: Callable[[], None]) -> float | None:
        """One verdict: from the cache, from a request in flight, or from a new one."""
        settings = {"model": self.model, "temperature": self.temperature, "max_tokens": self.max_tokens}
        key = question.key(settings | self.request, number)
        if (known := self._cache.get(key)) is not None:
            self._account.counts["cached"] += 1
            return known
        task = self._pending.get(key)
        if task is None:
            # A separate task, so that one caller's timeout does not lose the answer for other callers and the cache.
            task = asyncio.ensure_future(self._ask(question, key, order, begun=begun))
            self._pending[key] = task
            task.add_done_callback(partial(self._forget, key))
        else:
            self._account.counts["cached"] += 1
            begun()
        task.add_done_callback(lambda _: begun())  # the time of the next question begins
        return await asyncio.shield(task)

    def _forget(self, key: str, task: asyncio.Task[float | None]) -> None:
        if self._pending.get(key) is task:
            del self._pending[key]
        if not task.cancelled():
            task.exception()  # marks it as retrieved: its callers may be gone

    async def _ask(self, question: Question, key: str, order: int, *, begun: Callable[[], None]) -> float | None:
        await self._open()
        permit = Permit(self._limiter, order)
        try:
            await permit.acquire()
            begun()
            deadline = asyncio.get_running_loop().time() + self._limits.timeout_s
            mark = question.draw_mark()
            answer = await self._asked.ask(question.messages(mark, self._asked.special_tokens), permit, deadline)
            self._account.note_answer(answer)
        except NoPolicyError:  # the fit has ended; not a failure of the judge
            raise
        except FinalRewardError:
            self._account.counts["failed"] += 1
            raise
        finally:
            permit.release()
        verdict = question.read(answer.text, mark, answer.is_cut)
        if verdict is None:
            self._account.counts["unreadable"] += 1
            self._log.warning("%s: no verdict in the answer %.200r", self._name, answer.text)
        elif not self.wants_policy:
            self._cache.put(key, verdict)
        return verdict

    async def _open(self) -> None:
        """Opens connections, or loads the model, once."""
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._asked.open())
        await asyncio.shield(self._opening)

    async def _substitute(self, error: FinalRewardError | None, prompt: Prompt, completion: str) -> float | None:
        """Fallback score without a verdict; `error` is None if no answer could be read."""
        if error is None:
            name = "on_unreadable"
        elif isinstance(error, BudgetError):
            name = "on_budget"
        elif isinstance(error, RewardSetupError):
            raise error
        else:
            name = "on_failure"
        choice = getattr(self, name)
        if choice == "error":
            if error is not None:
                raise error
            raise RewardError(
                f"the judge {self.model!r} gave no verdict in the required format within "
                f"JudgeReward.max_tokens={self.max_tokens}; to choose a reward for completions without "
                "a verdict, set JudgeReward.on_unreadable"
            )
        self._account.counts["substituted"] += 1
        self._log.warning("JudgeReward.%s=%s: %s", name, choice, error or "the judge's answer holds no verdict")
        if choice == "none":
            return None
        if choice != "fallback":
            return float(choice)
        if self.fallback is None:
            raise RewardSetupError("JudgeReward.fallback is not set")
        # In a thread: a slow synchronous function would block all other questions.
        value: Any = await in_thread(None, partial(self.fallback, prompt, completion))
        return await value if inspect.isawaitable(value) else value


def _answer(prompt: Prompt, mode: str) -> str:
    if prompt.answer is None:
        raise ValueError(f"JudgeReward.mode={mode} needs a reference answer: set answer_field of the prompt source")
    return prompt.answer
