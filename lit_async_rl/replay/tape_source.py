"""Training from a tape instead of an engine: repeats a recorded run, or trains on it with other settings."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lit_async_rl.engines.base import Completion, GenerationRequest, RolloutEngine
from lit_async_rl.errors import InvariantError
from lit_async_rl.replay.tape import Tape, TapeStep
from lit_async_rl.rollouts.totals import ProducerStats, WaitTimer
from lit_async_rl.scheduling.admission import Admission
from lit_async_rl.types import RolloutGroup

if TYPE_CHECKING:
    from lit_async_rl.models.tokenizer import TextCodec

TAPE = "tape"  # key of a replay's state
log = logging.getLogger(__name__)


class NoEngine(RolloutEngine):
    """Engine that accepts weights and generates nothing.

    Args:
        scores: whether the recorded run had an environment instead of a reward.
        configured: engine of the settings, not set up: validation uses its number of slots and its environment.
    """

    in_flight_weight_updates = True
    records_heads = True  # the tape may contain heads, entropy and experts
    records_entropy = True
    records_experts = True
    max_model_len = 0
    busy_s = 0.0
    num_tokens = 0

    def __init__(self, scores: bool, configured: RolloutEngine | None = None) -> None:
        self.scores = scores
        self._configured = configured
        if configured is not None:
            self.num_slots = configured.num_slots

    def around(self, engine: RolloutEngine, codec: TextCodec) -> RolloutEngine:
        return engine if self._configured is None else self._configured.around(engine, codec)

    def setup(self, model: str) -> None:
        """Does nothing."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        raise InvariantError("a replay samples no completions")

    def poll(self, timeout_s: float) -> list[Completion]:
        return []

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Iterates over the weights, which is a collective if they are sharded."""
        deque(weights, maxlen=0)

    def abort(self, request_ids: Sequence[int]) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class Replay:
    """Hands out the groups of a tape in order, in place of a `Producer`.

    Token versions are shifted to the staleness of the recorded run, also if updates are skipped or the run does not
    start at version 0. A group keeps its index unless another one of the step has it: a step may be larger than the
    recorded ones, to which `ReplayBuffer` can have given the same prompt again.

    Args:
        tape: to read.
        first_step: step of the tape to begin with.
        admission: of the settings; groups keep their recorded staleness.

    Attributes:
        num_used: groups handed out.
        num_before_step: groups handed out before the present step.
    """

    def __init__(self, tape: Tape, first_step: int, admission: Admission) -> None:
        self.version = 0
        self._admission = admission
        self._tape = tape
        self._first_step = first_step
        self._steps = tape.steps(first_step)
        self._groups: deque[tuple[int, RolloutGroup]] = deque()
        self.num_used = 0
        self.num_before_step = 0
        self._step_indices: set[int] = set()
        self._num_restored = 0
        self._num_tokens = 0
        self._arrived: list[float] = []  # in the steps that were read, until `take_rewards`
        self._timer = WaitTimer()

    def start(self, version: int) -> None:
        """Sets the policy's version."""
        self.version = version
        self._timer.start()

    def advance(self, version: int) -> None:
        """Sets the policy's version."""
        self.version = version

    def take_rewards(self) -> list[float]:
        """Rewards that had arrived in the recorded run; those of its steps where it did not ask for them."""
        arrived = self._arrived
        self._arrived = []
        return arrived

    def discard_after(self, version: int) -> None:
        """Does nothing: the tape has the groups that replaced the discarded ones."""

    def set_max_staleness(self, max_staleness: int) -> None:
        """Sets the bound; it does not change the recorded staleness."""
        self._admission.max_staleness = max_staleness

    def begin_step(self) -> None:
        """Marks all groups handed out before as trained on."""
        self.num_before_step = self.num_used
        self._step_indices = set()

    def state_dict(self, step_is_done: bool) -> dict[str, Any]:
        """Position in the tape: first step, and groups trained on since, the present step's if `step_is_done`."""
        num_groups = self.num_used if step_is_done else self.num_before_step
        return {TAPE: {"first_step": self._first_step, "num_groups": num_groups}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at a saved position, counted in groups: steps of tape and trainer may differ in size."""
        if position := state.get(TAPE):
            self._first_step = position["first_step"]
            self._steps = self._tape.steps(self._first_step)
            while self.num_used < position["num_groups"] and self._next() is not None:
                pass
            self.num_before_step = self.num_used
            self._num_restored = self.num_used
            self._arrived = []

    def take(self, should_stop: Callable[[], bool] = lambda: False) -> RolloutGroup | None:
        """The next group; None at the end of the tape."""
        entry = self._next()
        if entry is None:
            log.warning("the tape has ended after %d groups: training stops", self.num_used - self._num_restored)
            return None
        recorded_version, group = entry
        self._num_tokens += group.num_tokens
        shift = self.version - recorded_version
        shifted = [
            replace(
                rollout,
                versions=_shifted(rollout.versions, shift),
                branches=tuple(replace(row, versions=_shifted(row.versions, shift)) for row in rollout.branches),
            )
            for rollout in group.rollouts
        ]
        oldest = min((v for rollout in shifted for v in rollout.all_versions), default=self.version)
        index = group.index if group.index not in self._step_indices else max(self._step_indices) + 1
        self._step_indices.add(index)
        return replace(group, index=index, rollouts=tuple(shifted), max_staleness=self.version - oldest)

    def _next(self) -> tuple[int, RolloutGroup] | None:
        """(version in training, group) of the next group; None at the end."""
        if not self._groups:
            with self._timer.waiting():
                step = next(self._steps, None)
            if step is None:
                return None
            self._groups.extend((step.version, group) for group in step.groups)
            self._arrived += _own_reward(step) if step.arrived is None else step.arrived
        self.num_used += 1
        return self._groups.popleft()

    def stats(self) -> ProducerStats:
        """Totals; reading the tape counts as waiting."""
        return ProducerStats(
            wait_s=self._timer.wait_s,
            run_s=self._timer.run_s,
            num_finished=self.num_used - self._num_restored,
            num_tokens=self._num_tokens,
        )

    def stop(self) -> bool:
        """Returns True: there is no thread to stop."""
        return True


def _own_reward(step: TapeStep) -> list[float]:
    return [fmean(rollout.reward for group in step.groups for rollout in group.rollouts)]


def _shifted(versions: Sequence[int], by: int) -> tuple[int, ...]:
    return tuple(version + by for version in versions)
