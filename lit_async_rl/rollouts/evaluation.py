"""Held-out prompts sampled by the engine of a running training, beside its rollouts.

| who | waits for | woken by |
|---|---|---|
| producer's thread, in `collect` | nothing: files a completion, submits the next request | the engine |
| reward worker, in `_file_reward` | nothing | `Scorer` |
| trainer's thread | nothing; `wait` at most as long as it is told | `_file_reward` |

Neither side starves: evaluation has at most `max_concurrent` samples in the engine, which has the rest for training;
and it has those always, because an engine takes requests in order, or by their priority, which is higher here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from lit_async_rl.engines.base import Completion, GenerationRequest, SamplingParams
from lit_async_rl.errors import InvariantError
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.prompts.sources import PromptSource
from lit_async_rl.prompts.usable import UsableSubset
from lit_async_rl.rewards.metrics import pass_at_k
from lit_async_rl.rewards.scorer import Scorer
from lit_async_rl.rollouts.engine_listener import EngineListener
from lit_async_rl.types import Prompt

FIRST_ID = 2**40  # ids of groups count from 0, those of their continued samples down from -1
PRIORITY = 1


@dataclass(frozen=True, kw_only=True)
class Question:
    """A held-out prompt, ready to be sampled."""

    dataset: str
    prompt: Prompt
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """What one evaluation samples.

    Args:
        questions: not empty.
        num_samples: completions of each.
        sampling: how they are sampled.
        version: of the policy, whose weights the engine has.
        max_concurrent: most samples in the engine at a time. An engine without in-flight updates is given everything
            at once, so that all of it is sampled by one version.
        first_id: of the requests; at least `FIRST_ID`, and not used by an earlier evaluation.
    """

    questions: Sequence[Question]
    num_samples: int
    sampling: SamplingParams
    version: int
    max_concurrent: int
    first_id: int = FIRST_ID

    def requests(self) -> list[GenerationRequest]:
        """One for each question, in order."""
        return [
            GenerationRequest(
                id=self.first_id + n,
                prompt_ids=question.prompt_ids,
                num_samples=self.num_samples,
                sampling=self.sampling,
                prompt=question.prompt,
                priority=PRIORITY,
            )
            for n, question in enumerate(self.questions)
        ]


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """What was measured, and of which policy.

    Attributes:
        version: the policy's when the evaluation began.
        oldest_version: of any token; `newest_version` likewise. All three are the same unless the engine went on under
            newer weights meanwhile.
        mean_version: of all tokens.
        metrics: `pass@1`, `pass@k` and `reward`, averages over all prompts, and `<data set>/pass@1` and so on.
        num_unscored: prompts with completions that could not be scored, which count nowhere.
        seconds: from the first request to the last reward.
    """

    version: int
    oldest_version: int
    newest_version: int
    mean_version: float
    metrics: dict[str, float]
    num_unscored: int
    seconds: float


@dataclass
class _Open:
    question: Question
    versions: list[int] = field(default_factory=list)  # of all tokens
    num_sampled: int = 0
    rewards: list[float | None] = field(default_factory=list)  # None: could not be scored


def make_questions(datasets: dict[str, PromptSource], codec: TextCodec) -> list[Question]:
    """All prompts of all data sets that can be used."""
    usable = [(name, UsableSubset(source, codec.encode)) for name, source in datasets.items()]
    prompts = [(name, source[n]) for name, source in usable for n in range(len(source))]
    return [Question(dataset=name, prompt=prompt, prompt_ids=codec.encode(prompt)) for name, prompt in prompts]


class EvaluationRun:
    """One evaluation under way. Nothing of it is trained on, or counted by the staleness bound.

    Args:
        listener: of the engine, which has the weights of `plan.version`; nothing happens without its `changed`.
        scorer: the rewards of training.
        codec: ids to text.
        plan: what is sampled.
    """

    def __init__(self, listener: EngineListener, scorer: Scorer, codec: TextCodec, plan: EvaluationPlan) -> None:
        if not plan.questions:
            raise InvariantError("an evaluation without questions")
        if plan.first_id < FIRST_ID:
            raise InvariantError(f"ids of an evaluation begin at {FIRST_ID}, got {plan.first_id}")
        self.version, self.num_samples, self._stop = plan.version, plan.num_samples, plan.sampling.stop
        self._listener, self._engine, self._scorer, self._codec = listener, listener.engine, scorer, codec
        at_once = len(plan.questions) * plan.num_samples
        self._limit = plan.max_concurrent if self._engine.in_flight_weight_updates else at_once
        self._waiting = deque(plan.requests())
        self._open = {r.id: _Open(question) for r, question in zip(self._waiting, plan.questions, strict=True)}
        self._in_engine: set[int] = set()
        self._num_left = at_once  # samples
        self._is_abandoned = False
        self._began, self.seconds = time.monotonic(), 0.0
        self._changed = listener.changed

    def submit(self) -> None:
        """Gives the engine as much as it may have."""
        with self._changed:
            requests = []
            while self._waiting and not self._is_abandoned and not self.is_lost:
                if self._in_engine and (len(self._in_engine) + 1) * self.num_samples > self._limit:
                    break
                requests.append(self._waiting.popleft())
                self._in_engine.add(requests[-1].id)
            self._listener.submit(requests)

    def collect(self, completion: Completion) -> bool:
        """Files a completion; False if it belongs to training. One of an abandoned evaluation is dropped."""
        if completion.request_id < FIRST_ID:
            return False
        with self._changed:
            if completion.request_id not in self._in_engine:
                return True
            item = self._open[completion.request_id]
            item.versions += completion.versions
            item.num_sampled += 1
            if item.num_sampled == self.num_samples:
                self._in_engine.remove(completion.request_id)
        self.submit()
        self._score(item, completion)
        return True

    def _score(self, item: _Open, completion: Completion) -> None:
        if completion.reward is not None:
            self._file_reward(item, completion.reward)
            return
        self._scorer.submit(
            item.question.prompt,
            self._codec.decode(completion.token_ids, self._stop),
            done=partial(self._file_reward, item),
            give_up=partial(self._file_reward, item, None),
            is_wanted=lambda: not self._is_abandoned,
        )

    def _file_reward(self, item: _Open, reward: float | None) -> None:
        with self._changed:
            item.rewards.append(reward)
            self._num_left -= 1
            self.seconds = time.monotonic() - self._began
            self._changed.notify_all()

    @property
    def is_done(self) -> bool:
        """Whether all is sampled and scored."""
        return self._num_left == 0

    @property
    def is_lost(self) -> bool:
        """Whether another engine has taken the place of the one that samples it."""
        return self._listener.engine is not self._engine

    @property
    def age_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    def wait(self, timeout_s: float) -> bool:
        """Waits at most `timeout_s` for its end; returns whether it is done."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_done or self.is_lost, timeout_s)
            return self.is_done

    def abandon(self) -> None:
        """Frees the engine of it."""
        with self._changed:
            self._is_abandoned = True
            requests, self._in_engine = list(self._in_engine), set()
            if not self.is_lost:
                self._listener.abort(requests)

    def result(self, success_reward: float, ks: Sequence[int]) -> EvaluationResult:
        """What was measured; call it when done.

        Args:
            success_reward: a completion whose reward reaches it is correct.
            ks: pass@k of each, unbiased (Chen et al. 2021, arXiv:2107.03374).
        """
        if not self.is_done:
            raise InvariantError("an evaluation was read before it was done")
        sums: dict[str, list[float]] = {}
        num_unscored = 0
        for item in self._open.values():
            rewards = [reward for reward in item.rewards if reward is not None]
            if len(rewards) < self.num_samples:
                num_unscored += 1
                continue
            correct = sum(reward >= success_reward for reward in rewards)
            values = {"reward": sum(rewards) / self.num_samples}
            values |= {f"pass@{k}": pass_at_k(self.num_samples, correct, k) for k in ks}
            for name, value in values.items():
                sums.setdefault(name, []).append(value)
                sums.setdefault(f"{item.question.dataset}/{name}", []).append(value)
        versions = [version for item in self._open.values() for version in item.versions]
        return EvaluationResult(
            version=self.version,
            oldest_version=min(versions),
            newest_version=max(versions),
            mean_version=sum(versions) / len(versions),
            metrics={name: sum(values) / len(values) for name, values in sums.items()},
            num_unscored=num_unscored,
            seconds=self.seconds,
        )
