"""Rollout source on the leading rank: engine, producer (or tape) and replay buffer; weights in, groups out.

All methods are called from the trainer's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from lit_async_rl.data.compatibility import check_ends
from lit_async_rl.data.replaceable_engine import ReplaceableEngine
from lit_async_rl.data.settings import Limits
from lit_async_rl.engines.base import RolloutEngine
from lit_async_rl.errors import EngineDown, InvariantError, ProducerError, SetupError, StalledError
from lit_async_rl.prompts.usable import UsablePrompts
from lit_async_rl.replay.buffer import ReplayBuffer, Snapshot
from lit_async_rl.replay.tape_source import TAPE, Replay
from lit_async_rl.rollouts.checkpoint import restore_producer, save_producer
from lit_async_rl.rollouts.evaluation import EvaluationPlan, EvaluationRun
from lit_async_rl.rollouts.producer import Producer
from lit_async_rl.rollouts.stats import ProducerStats
from lit_async_rl.scheduling.admission import Admission, check_bound
from lit_async_rl.types import RolloutGroup
from lit_async_rl.utils.spans import Spans

log = logging.getLogger(__name__)


class RolloutSource:
    """Takes the weights of each publication and returns the groups of each step.

    Args:
        engine: set up with the first weights, closed by `stop`.
        model: argument of the engine's `setup`.
        admission: of the producer.
        make_producer: called with the number of the first step when the engine has its weights.
        groups_per_step: returned for one step.
        fresh_per_step: how many of them come from the producer.
        replay: supplies the others; None if all are fresh.
        limits: restarts of the engine, and timeout of its calls.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        model: str | None,
        admission: Admission,
        make_producer: Callable[[int], Producer | Replay],
        groups_per_step: int,
        fresh_per_step: int,
        replay: ReplayBuffer | None,
        limits: Limits,
    ) -> None:
        self.admission, self.replay = admission, replay
        self.groups_per_step, self.fresh_per_step, self._make_producer = groups_per_step, fresh_per_step, make_producer
        self._holder = ReplaceableEngine(engine, model, limits)
        self._producer: Producer | Replay | None = None
        self._saved: dict[str, Any] = {}  # by the run that this one resumes
        self._step_began = -1  # the step whose groups were handed out last
        self._replay_before: Snapshot | None = None  # the step's groups were mixed
        self._taken: list[RolloutGroup] = []  # by a call of `take` that has not returned yet
        self._spans: Spans | None = None
        self._first_bound: int | None = None  # set before the start

    @property
    def engine(self) -> RolloutEngine:
        """The engine in use; another one after a restart."""
        return self._holder.engine

    def use_model(self, model: str) -> None:
        """Sets the model that the engine loads."""
        self._holder.model = model

    def observe(self, spans: Spans) -> None:
        """Records in a timeline what producer, engine and rewards do."""
        self._spans = spans
        if self._producer is None:
            self.engine.observe(spans)
        else:
            self._producer.observe(spans)

    def publish(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads new weights into the engine; the first call also sets it up."""
        self._holder.set_up()
        if isinstance(self._producer, Producer):
            self._producer.listener.load_weights(version, weights)
        else:
            self._holder.calls.load_weights(version, weights)

    def start(self, version: int, step: int, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Starts the background thread, from the restored state if there is one; the engine has its weights.

        No more prompts are admitted when `should_stop()` becomes true.
        """
        producer = self._producer = self._make_producer(step)
        if self._spans is not None:
            producer.observe(self._spans)
        if isinstance(producer, Replay):
            producer.load_state_dict(self._saved)
            producer.start(version)
            return
        self._check_prompts(producer)
        with producer.changed:  # a restored completion that is scored admits prompts
            if self._saved and TAPE not in self._saved:  # a replay's checkpoint says nothing of prompts
                producer.listener.has_loaded(version)
                if restore_producer(producer, self._saved) and self.replay is not None:
                    self.replay.clear()
            if self._first_bound is not None:
                self.admission.max_staleness = self._first_bound
            producer.start(version, should_stop)

    def _check_prompts(self, producer: Producer) -> None:
        """Refuses unusable prompts, or excludes them from the stream."""
        stream, codec, max_tokens = producer.stream, producer.book.codec, producer.book.sampling.max_tokens
        length = self.engine.max_model_len
        why = f"the engine's max_model_len={length} leaves besides sampling.max_tokens={max_tokens}"
        usable = UsablePrompts(stream.source, codec.encode, length - max_tokens, why)
        usable.check()
        stream.usable = usable
        check_ends(codec, producer.book.sampling, stream.source)
        if codec.special_tokens == "tags" and (tags := codec.tags):
            log.info("rewards read the special tokens %s; data.scoring.special_tokens: none leaves them out", tags)
        if codec.ends.are_disputed and producer.book.sampling.end_token_ids is None:
            log.warning("model.model=%r: %s", codec.model, codec.ends.describe(codec.tokenizer))

    def advance(self, version: int) -> None:
        self._started().advance(version)

    def set_max_staleness(self, max_staleness: int) -> None:
        """Changes the bound of groups admitted from now on; those of a checkpoint are kept, whatever their bound."""
        if self._producer is None:
            self._first_bound = max_staleness
        else:
            self._producer.set_max_staleness(max_staleness)

    def evaluate(self, plan: EvaluationPlan) -> EvaluationRun:
        """Starts sampling held-out prompts concurrently with the rollouts."""
        producer = self._started()
        if not isinstance(producer, Producer):
            raise SetupError("Evaluation needs an engine, and data.admission=FromTape has none")
        producer.evaluation = EvaluationRun(producer.listener, producer.scorer, producer.book.codec, plan)
        producer.evaluation.submit()
        return producer.evaluation

    def take_step(self, step: int, should_stop: Callable[[], bool]) -> list[RolloutGroup] | None:
        """The groups of `step`, each token within its bound; None when the run is asked to stop."""
        if not self._taken:
            self.begin_step(step)
            self._replay_before = None
        groups = self.take(self.fresh_per_step, should_stop)
        if groups is None or self.replay is None:
            return groups
        self._replay_before = self.replay.snapshot()
        return self.replay.mix(groups, self.groups_per_step, self._started().version)

    def begin_step(self, step: int) -> None:
        """Marks all groups taken before as trained on; the next ones are for `step`."""
        self._started().begin_step()
        self._step_began = step

    def take(self, num_groups: int, should_stop: Callable[[], bool]) -> list[RolloutGroup] | None:
        """The next groups to finish; None when the run is asked to stop.

        Raises:
            EngineDown: call `restart_engine`, then this again; groups already taken are kept.
            ProducerError, StalledError: the failure is not the engine's, or it was restarted too often.
        """
        producer = self._started()
        while len(self._taken) < num_groups:
            try:
                group = producer.take(should_stop=should_stop)
            except (ProducerError, StalledError) as error:
                self._check_restarts(producer, error)
                raise EngineDown from error
            if group is None:
                self._taken = []
                return None
            self._taken.append(group)
        groups, self._taken = self._taken, []
        self._holder.note_step()
        check_bound(groups, producer.version)
        if isinstance(producer, Producer):
            producer.rest()
        return groups

    def _check_restarts(self, producer: Producer | Replay, error: Exception) -> None:
        """Raises errors that another engine would not fix."""
        if not isinstance(producer, Producer) or producer.listener.engine_error is None:
            raise error
        if not self._holder.may_restart:
            raise error

    def restart_engine(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces an engine that hangs or failed; groups that lack completions are sampled again.

        Everything received from the old engine is kept. If the new one fails to start, the next `take` raises its
        error.
        """
        producer = self._started()
        error = producer.listener.engine_error if isinstance(producer, Producer) else None
        if not isinstance(producer, Producer) or error is None:
            raise InvariantError("an engine that works is to be restarted")
        self._holder.restart(producer, error, weights)

    @property
    def engine_restarts(self) -> str:
        """Number of engines that were replaced, and why the last one was; empty if none was."""
        return f"{self._holder.num_restarts}; last: {self._holder.last_error}" if self._holder.num_restarts else ""

    @property
    def has_begun(self) -> bool:
        """Whether its engine was set up, also for another source, or its producer started; one serves a single fit."""
        return self._holder.engine.is_used or self._producer is not None

    def stats(self) -> ProducerStats | None:
        """Totals of sampling and scoring since the start; None before it."""
        return self._producer.stats() if self._producer else None

    def state_dict(self, step: int) -> dict[str, Any]:
        """Every group admitted and not trained on before `step`, see `lit_async_rl.rollouts.checkpoint`."""
        if self._producer is None:
            return self._saved
        is_done = step > self._step_began
        if isinstance(self._producer, Replay):
            state = self._producer.state_dict(step_is_done=is_done)
        else:
            state = save_producer(self._producer, step_is_done=is_done)
        if self.replay is None:
            return state
        return state | {"replay": self.replay.state_dict(None if is_done else self._replay_before)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stores the state; `start` restores it."""
        self._saved = state
        if self.replay is not None and "replay" in state:
            self.replay.load_state_dict(state["replay"])

    def stop(self) -> None:
        """Stops the background thread and closes the engine. Safe to call twice."""
        if self._producer is not None:
            self._producer.stop()
        self._holder.close()

    def end(self) -> None:
        """Closes what the engines of all fits and validations share, such as an environment. Safe to call twice."""
        self._holder.end()

    def _started(self) -> Producer | Replay:
        if self._producer is None:
            raise SetupError("add the WeightSync callback: it starts the producer")
        return self._producer
