"""The background thread that keeps the engine busy within the staleness bound.

| who | waits for | woken by |
|---|---|---|
| trainer, in `take` | a finished group that may be trained on | `_finish`, an error, `stop` |
| producer thread, in `engine.poll` | a finished completion | the engine |
| reward worker, in `Scorer` | a group to score | `_collect` |

Slots come back in `advance`, which the trainer calls after it has published weights; new prompts are submitted there,
in one call, so that what the engine decodes together does not depend on timing. Whatever goes wrong in a thread is
kept and raised by `take` with its cause.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lit_async_rl.admission import Admission
from lit_async_rl.engine import Completion, GenerationRequest, RolloutEngine, SamplingParams
from lit_async_rl.errors import ProducerError, StalledError
from lit_async_rl.prompts import PromptStream
from lit_async_rl.scoring import Scorer
from lit_async_rl.stats import ProducerStats
from lit_async_rl.text import TextCodec
from lit_async_rl.types import Prompt, Rollout, RolloutGroup

POLL_S = 0.2  # how soon a stop, a dead thread or a hung reward is noticed


@dataclass
class _Unfinished:
    """A group between admission and its last reward."""

    prompt: Prompt
    prompt_ids: tuple[int, ...]
    version: int
    began: float
    completions: dict[int, Completion] = field(default_factory=dict)


class Producer:
    """Admits prompts, collects completions, has them scored, and hands out finished groups.

    Args:
        engine: set up and loaded with the first weights.
        stream: endless prompts; `codec`: text to ids and back; `admission`: the bound.
        group_size: completions of each prompt.
        sampling: how they are sampled.
        timeout_s: longest time in which nothing at all may happen while the trainer waits.
    """

    def __init__(
        self,
        *,
        engine: RolloutEngine,
        stream: PromptStream,
        codec: TextCodec,
        scorer: Scorer,
        admission: Admission,
        group_size: int,
        sampling: SamplingParams,
        timeout_s: float,
    ) -> None:
        self.engine, self.stream, self.scorer, self.admission = engine, stream, scorer, admission
        self.codec, self.group_size, self.sampling, self.timeout_s = codec, group_size, sampling, timeout_s
        self.version = 0
        self._unfinished: dict[int, _Unfinished] = {}
        self._finished: dict[int, RolloutGroup] = {}
        self._finished_at: dict[int, float] = {}
        self._num_finished = 0
        self._changed = threading.Condition(threading.RLock())
        self._error: BaseException | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="producer", daemon=True)
        self._began = time.monotonic()
        self._wait_s = 0.0

    # -- trainer's thread ---------------------------------------------------------------------------------------------

    def start(self, version: int) -> None:
        """Starts sampling; `version` is already loaded in the engine."""
        self.version = version
        self._began = time.monotonic()
        self._admit()
        self._thread.start()

    def advance(self, version: int) -> None:
        """Ends a round: the engine has the weights of `version`; the slots of the groups trained on come back."""
        with self._changed:
            self.version = version
            self.admission.advance()
            self._admit()
            self._changed.notify_all()

    def set_max_staleness(self, max_staleness: int) -> None:
        """Changes the bound for groups admitted from now on."""
        with self._changed:
            self.admission.max_staleness = max_staleness
            self._admit()

    def take(self, should_stop: Callable[[], bool] = lambda: False) -> RolloutGroup | None:
        """The next group to train on; None when `should_stop()` turned true while waiting.

        Raises:
            ProducerError: a background thread died (its error is the cause).
            StalledError: nothing happened for `timeout_s`.
        """
        began = last_change = time.monotonic()
        progress = self._progress()
        try:
            with self._changed:
                while True:
                    if self._error is not None:
                        raise ProducerError(f"rollout generation failed: {self._error}") from self._error
                    index = self.admission.choose(self._finished)
                    if index is not None:
                        return self._hand_out(index)
                    if should_stop():
                        return None
                    if not self._thread.is_alive():
                        raise ProducerError("the producer thread is not running: it was stopped, or never started")
                    if progress != (progress := self._progress()):
                        last_change = time.monotonic()
                    if time.monotonic() - last_change > self.timeout_s:
                        raise StalledError(self._stall_message())
                    self._changed.wait(POLL_S)
        finally:
            self._wait_s += time.monotonic() - began

    def _hand_out(self, index: int) -> RolloutGroup:
        self.admission.take(index)
        waited = time.monotonic() - self._finished_at.pop(index)
        return dataclasses.replace(self._finished.pop(index), queue_s=waited)

    def _progress(self) -> tuple[int, int]:
        return self.engine.num_tokens, self._num_finished

    def _stall_message(self) -> str:
        return (
            f"the trainer waited rollout_timeout_s={self.timeout_s:g} for a rollout group and nothing happened: "
            f"{len(self._unfinished)} groups unfinished, {len(self._finished)} finished but not allowed yet, "
            f"{self.engine.num_tokens} tokens generated so far by {type(self.engine).__name__}. Look at the engine "
            "first; raise data.rollout_timeout_s if a completion can really take this long."
        )

    def stats(self) -> ProducerStats:
        """Totals since the start."""
        with self._changed:
            return ProducerStats(
                wait_s=self._wait_s,
                run_s=time.monotonic() - self._began,
                engine_busy_s=self.engine.busy_s,
                scoring_s=self.scorer.busy_s,
                num_tokens=self.engine.num_tokens,
                num_finished=self._num_finished,
                num_queued=len(self._finished),
                num_unfinished=len(self._unfinished),
            )

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Ends the thread; False if it did not end in time (it is a daemon, so the process can still exit)."""
        self._stopped.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        self.scorer.close()
        return not self._thread.is_alive()

    # -- producer's thread (and the reward workers, in `_finish`) ------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                for completion in self.engine.poll(POLL_S):
                    self._collect(completion)
                self.scorer.check()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _admit(self) -> None:
        """Submits as many prompts as there are slots, in one call."""
        with self._changed:
            requests = []
            for _ in range(self.admission.num_admissible):
                prompt = self.stream.next()
                prompt_ids = self.codec.encode(prompt)
                index = self.admission.admit()
                self._unfinished[index] = _Unfinished(prompt, prompt_ids, self.version, time.monotonic())
                sampled: dict[str, Any] = dict(num_samples=self.group_size, sampling=self.sampling)
                requests.append(GenerationRequest(id=index, prompt_ids=prompt_ids, prompt=prompt, **sampled))
            if requests:
                self.engine.submit(requests)

    def _collect(self, completion: Completion) -> None:
        with self._changed:
            group = self._unfinished[completion.request_id]
            group.completions[completion.sample_index] = completion
            if len(group.completions) < self.group_size:
                return
        index, now = completion.request_id, time.monotonic()
        completions = [group.completions[n] for n in range(self.group_size)]
        texts = [self.codec.decode(c.token_ids) for c in completions]
        finish = partial(self._finish, index, group, completions, texts, now)
        if self.engine.scores:
            finish([c.reward for c in completions if c.reward is not None])
        else:
            self.scorer.submit(group.prompt, texts, finish)

    def _finish(
        self,
        index: int,
        group: _Unfinished,
        completions: list[Completion],
        texts: list[str],
        generated_at: float,
        rewards: list[float],
    ) -> None:
        rollouts = tuple(
            Rollout(
                completion_ids=c.token_ids,
                behavior_logprobs=c.logprobs,
                versions=c.versions,
                finish_reason=c.finish_reason,
                text=text,
                reward=reward,
                loss_mask=c.loss_mask,
            )
            for c, text, reward in zip(completions, texts, rewards, strict=True)
        )
        with self._changed:
            del self._unfinished[index]
            self._finished[index] = RolloutGroup(
                index=index,
                prompt=group.prompt,
                prompt_ids=group.prompt_ids,
                rollouts=rollouts,
                admitted_version=group.version,
                generation_s=generated_at - group.began,
            )
            self._finished_at[index] = time.monotonic()
            self._num_finished += 1
            self._changed.notify_all()
