"""Evaluation on held-out prompts with the training engine, concurrently with the rollouts.

| who | waits for | woken by |
|---|---|---|
| producer's thread, in `collect` | nothing: files a completion, submits the next request | the engine |
| reward worker, in `_file_reward` | nothing | `Scorer` |
| trainer's thread | nothing; `wait` at most `timeout_s` | `_file_reward` |

Neither side starves: evaluation has at most `max_concurrent` samples in the engine, and always gets those, because
engines serve requests in order or by priority, which is higher here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lit_async_rl.errors import InvariantError
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.problem import Prompt
from lit_async_rl.prompts.sources import PromptSource
from lit_async_rl.prompts.stream import UsableSubset
from lit_async_rl.rewards import hooks
from lit_async_rl.rewards.functions import pass_at_k
from lit_async_rl.rewards.scorer import Scorer
from lit_async_rl.rewards.success import Success
from lit_async_rl.rollouts.engine_listener import EngineListener
from lit_async_rl.types import Completion, GenerationRequest, SamplingParams

FIRST_ID = 2**40  # ids of groups count from 0, those of their continued samples down from -1
PRIORITY = 1


@dataclass(frozen=True, kw_only=True)
class Question:
    """A held-out prompt with its token ids."""

    dataset: str
    prompt: Prompt
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """Prompts and settings of one evaluation.

    Args:
        questions: not empty.
        num_samples: completions of each question.
        sampling: sampling parameters.
        version: of the policy whose weights the engine has.
        max_concurrent: most samples in the engine; without in-flight updates it gets all at once.
        first_id: of the requests; at least `FIRST_ID`, and new.
    """

    questions: Sequence[Question]
    num_samples: int
    sampling: SamplingParams
    version: int
    max_concurrent: int
    first_id: int = FIRST_ID

    def requests(self) -> list[GenerationRequest]:
        """One request per question, in order."""
        return [
            GenerationRequest(
                id=self.first_id + n,
                prompt_ids=question.prompt_ids,
                num_samples=self.num_samples,
                sampling=self.sampling,
                prompt=question.prompt,
                priority=PRIORITY,
                session=self.first_id + n,
            )
            for n, question in enumerate(self.questions)
        ]


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Metrics of one evaluation.

    Attributes:
        version: of the policy when the evaluation started.
        oldest_version: of any token; likewise `newest_version`. Both are `version` unless weights changed meanwhile.
        mean_version: over all tokens.
        metrics: `pass@1`, `pass@k`, `reward` and `cut_share`, means over all prompts; `<data set>/pass@1` and so on.
        num_unscored: prompts excluded because a completion could not be scored.
        seconds: from the first request to the last reward.
        rewards: of all scored completions.
    """

    version: int
    oldest_version: int
    newest_version: int
    mean_version: float
    metrics: dict[str, float]
    num_unscored: int
    seconds: float
    rewards: tuple[float, ...] = ()


@dataclass
class _Open:
    question: Question
    versions: list[int] = field(default_factory=list)  # of all tokens
    num_sampled: int = 0
    num_cut: int = 0
    rewards: list[float | None] = field(default_factory=list)  # None: could not be scored


def make_questions(
    datasets: dict[str, PromptSource],
    codec: TextCodec,
    max_tokens: int | None = None,
    why: str = "",
    reward: Any = None,
) -> list[Question]:
    """All usable prompts of all data sets; `max_tokens` and `why` are those of `UsablePrompts`, which may raise."""
    encode = hooks.checking(codec.encode, reward)
    usable = [(name, UsableSubset(source, encode, max_tokens, why=why)) for name, source in datasets.items()]
    prompts = [(name, source[n]) for name, source in usable for n in range(len(source))]
    return [Question(dataset=name, prompt=prompt, prompt_ids=codec.encode(prompt)) for name, prompt in prompts]


class EvaluationRun:
    """A running evaluation; its samples are neither trained on nor counted by the staleness bound.

    Args:
        listener: of the engine, which has the weights of `plan.version`; its `changed` guards all state.
        scorer: of the training reward.
        codec: decodes token ids.
        plan: prompts and settings.
    """

    def __init__(self, listener: EngineListener, scorer: Scorer, codec: TextCodec, plan: EvaluationPlan) -> None:
        if not plan.questions:
            raise InvariantError("an evaluation without questions")
        if plan.first_id < FIRST_ID:
            raise InvariantError(
                f"the ids of an evaluation's requests must be at least {FIRST_ID}, got {plan.first_id}"
            )
        self.version = plan.version
        self.num_samples = plan.num_samples
        self._sampling = plan.sampling
        self._listener = listener
        self._engine = listener.engine
        self._scorer = scorer
        self._codec = codec
        at_once = len(plan.questions) * plan.num_samples
        self._limit = plan.max_concurrent if self._engine.in_flight_weight_updates else at_once
        self._waiting = deque(plan.requests())
        self._open = {r.id: _Open(question) for r, question in zip(self._waiting, plan.questions, strict=True)}
        self._in_engine: set[int] = set()
        self._num_left = at_once  # samples
        self._is_abandoned = False
        self._began = time.monotonic()
        self.seconds = 0.0
        # The producer's lock: completions of both kinds come through one thread, and their requests go to one ledger.
        self._changed = listener.changed

    def submit(self) -> None:
        """Submits requests up to the limit of concurrent samples."""
        with self._changed:
            requests = []
            while self._waiting and not self._is_abandoned and not self.is_lost:
                if self._in_engine and (len(self._in_engine) + 1) * self.num_samples > self._limit:
                    break
                requests.append(self._waiting.popleft())
                self._in_engine.add(requests[-1].id)
            self._listener.submit(requests)

    def collect(self, completion: Completion) -> None:
        """Files a completion, unless the evaluation was abandoned."""
        with self._changed:
            if completion.request_id not in self._in_engine:
                return
            item = self._open[completion.request_id]
            item.versions += completion.all_versions
            item.num_sampled += 1
            item.num_cut += completion.finish_reason == "length"
            if item.num_sampled == self.num_samples:
                self._in_engine.remove(completion.request_id)
        self.submit()
        self._score(item, completion)

    def lose(self, request_id: int, number: int | None = None) -> None:
        """Files that the engine gave up samples of a question, by default all left; it is then excluded."""
        with self._changed:
            if request_id not in self._in_engine:
                return
            item = self._open[request_id]
            for _ in range(self.num_samples - item.num_sampled if number is None else number):
                item.num_sampled += 1
                self._file_reward(item, None)
            if item.num_sampled == self.num_samples:
                self._in_engine.remove(request_id)
        self.submit()

    def again(self) -> list[GenerationRequest]:
        """Nothing: an evaluation ends with its engine."""
        return []

    @property
    def is_waiting(self) -> bool:
        """Whether the engine has requests of it."""
        return bool(self._in_engine) and not self.is_lost

    def _score(self, item: _Open, completion: Completion) -> None:
        if completion.reward is not None:
            self._file_reward(item, completion.reward)
            return
        self._scorer.submit(
            item.question.prompt,
            self._codec.decode(completion.token_ids, self._sampling.stop, self._sampling.stop_token_ids),
            done=partial(self._file_reward, item),
            give_up=partial(self._file_reward, item, None),
            is_wanted=lambda: not self._is_abandoned,
            token_ids=completion.token_ids,
        )

    def _file_reward(self, item: _Open, reward: float | None) -> None:
        with self._changed:
            item.rewards.append(reward)
            self._num_left -= 1
            self.seconds = time.monotonic() - self._began
            self._changed.notify_all()

    @property
    def is_done(self) -> bool:
        """Whether all samples are scored."""
        return self._num_left == 0

    @property
    def is_lost(self) -> bool:
        """Whether the engine that samples it was replaced."""
        return self._listener.engine is not self._engine

    @property
    def age_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def wait(self, timeout_s: float) -> bool:
        """Waits at most `timeout_s` for the end; returns whether it is done."""
        with self._changed:
            # An engine is replaced by the thread that waits here, so `is_lost` does not change meanwhile.
            self._changed.wait_for(lambda: self.is_done or self.is_lost, timeout_s)
            return self.is_done

    def abandon(self) -> None:
        """Aborts its requests."""
        with self._changed:
            self._is_abandoned = True
            requests = list(self._in_engine)
            self._in_engine = set()
            if not self.is_lost:
                self._listener.abort(requests)

    def result(self, success: Success, ks: Sequence[int]) -> EvaluationResult:
        """Metrics of a finished evaluation.

        Args:
            success: tells correct completions from others.
            ks: k of each pass@k, estimated without bias (Chen et al. 2021, arXiv:2107.03374).
        """
        if not self.is_done:
            raise InvariantError("an evaluation was read before it had finished")
        sums: dict[str, list[float]] = {}
        scored = [item for item in self._open.values() if None not in item.rewards]
        for item in scored:
            rewards = [reward for reward in item.rewards if reward is not None]
            correct = success.number(rewards)
            values = {f"pass@{k}": pass_at_k(self.num_samples, correct, k) for k in ks}
            values["reward"] = sum(rewards) / self.num_samples
            values["cut_share"] = item.num_cut / self.num_samples
            for name, value in values.items():
                sums.setdefault(name, []).append(value)
                sums.setdefault(f"{item.question.dataset}/{name}", []).append(value)
        versions = [version for item in self._open.values() for version in item.versions] or [self.version]
        return EvaluationResult(
            version=self.version,
            oldest_version=min(versions),
            newest_version=max(versions),
            mean_version=sum(versions) / len(versions),
            metrics={name: sum(values) / len(values) for name, values in sums.items()},
            num_unscored=len(self._open) - len(scored),
            seconds=self.seconds,
            rewards=tuple(reward for item in scored for reward in item.rewards if reward is not None),
        )
