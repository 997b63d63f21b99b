"""Training from a tape instead of an engine: repeats a recorded run, or trains on its data with other settings."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from lit_async_rl.engines.base import Completion, GenerationRequest, RolloutEngine
from lit_async_rl.errors import InvariantError
from lit_async_rl.replay.tape import Tape
from lit_async_rl.rollouts.stats import ProducerStats
from lit_async_rl.rollouts.wait_timer import WaitTimer
from lit_async_rl.scheduling.admission import Admission
from lit_async_rl.types import RolloutGroup
from lit_async_rl.utils.spans import Spans

log = logging.getLogger(__name__)


class NoEngine(RolloutEngine):
    """Engine that accepts weights and generates nothing."""

    in_flight_weight_updates = True
    records_heads = records_entropy = records_experts = True  # those of the tape
    max_model_len = 0
    busy_s = 0.0
    num_tokens = 0

    def __init__(self, scores: bool) -> None:
        self.scores = scores

    def setup(self, model: str) -> None:
        """Nothing to set up."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        raise InvariantError("a replay asks for no completions")

    def poll(self, timeout_s: float) -> list[Completion]:
        return []

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Iterates over the weights, which is a collective if they are sharded."""
        deque(weights, maxlen=0)

    def abort(self, request_ids: Sequence[int]) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing is open."""


class Replay:
    """Hands out the groups of a tape in order; takes the place of a `Producer`.

    Token versions are shifted so that staleness equals that of the recorded run, also if updates are skipped or the run
    does not start at version 0.

    Args:
        tape: to read.
        first_step: of the tape.
        admission: bound of the settings; groups keep their recorded bounds.
    """

    def __init__(self, tape: Tape, first_step: int, admission: Admission) -> None:
        self.version = 0
        self._admission = admission
        self._steps = tape.steps(first_step)
        self._groups: deque[tuple[int, RolloutGroup]] = deque()
        self._num_handed_out = self._num_tokens = 0
        self._timer = WaitTimer()

    def start(self, version: int) -> None:
        """Sets the policy's version."""
        self.version = version
        self._timer.start()

    def advance(self, version: int) -> None:
        """Sets the policy's version."""
        self.version = version

    def set_max_staleness(self, max_staleness: int) -> None:
        """Sets the bound; it does not change the recorded staleness."""
        self._admission.max_staleness = max_staleness

    def begin_step(self) -> None:
        """Nothing to give back."""

    def take(self, should_stop: Callable[[], bool] = lambda: False) -> RolloutGroup | None:
        """The next group; None at the end of the tape."""
        if not self._groups:
            with self._timer.waiting():
                step = next(self._steps, None)
            if step is None:
                log.warning("the tape has ended after %d groups: training stops", self._num_handed_out)
                return None
            self._groups.extend((step.version, group) for group in step.groups)
        recorded, group = self._groups.popleft()
        self._num_handed_out += 1
        self._num_tokens += group.num_tokens
        moved = [
            replace(rollout, versions=tuple(v + self.version - recorded for v in rollout.versions))
            for rollout in group.rollouts
        ]
        oldest = min((v for rollout in moved for v in rollout.versions), default=self.version)
        return replace(group, rollouts=tuple(moved), max_staleness=self.version - oldest)

    def observe(self, spans: Spans) -> None:
        """Records in a timeline when the tape is read."""
        self._timer.observe(spans)

    def stats(self) -> ProducerStats:
        """Totals; the trainer waits while the tape is read."""
        return replace(
            ProducerStats.zero(),
            wait_s=self._timer.wait_s,
            run_s=self._timer.run_s,
            num_finished=self._num_handed_out,
            num_tokens=self._num_tokens,
        )

    def stop(self) -> bool:
        """There is no thread."""
        return True
