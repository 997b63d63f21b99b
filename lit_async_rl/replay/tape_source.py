"""Training from a tape instead of an engine: the recorded run again, or its data under other choices."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from lit_async_rl.engines.base import Completion, GenerationRequest, RolloutEngine
from lit_async_rl.replay.tape import Tape
from lit_async_rl.rollouts.stats import ProducerStats
from lit_async_rl.scheduling.admission import Admission
from lit_async_rl.types import RolloutGroup

log = logging.getLogger(__name__)


class NoEngine(RolloutEngine):
    """Takes weights, and generates nothing."""

    in_flight_weight_updates = True
    max_model_len = 0
    busy_s = 0.0
    num_tokens = 0

    def __init__(self, scores: bool) -> None:
        self.scores = scores

    def setup(self, model: str) -> None:
        """Nothing to set up."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Never called."""
        raise AssertionError("a replay asks for no completions")

    def poll(self, timeout_s: float) -> list[Completion]:
        """Nothing."""
        return []

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Reads them to the end, which gathering them over ranks needs."""
        deque(weights, maxlen=0)

    def abort(self, request_ids: Sequence[int]) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing is open."""


class Replay:
    """Hands out the groups of a tape in their order; takes the place of a `Producer`.

    Versions of tokens are moved so that staleness is what it was when the tape was written, also where the replay skips
    updates or does not begin at version 0.

    Args:
        tape: what to read.
        first_step: of the tape.
        admission: says the bound that settings ask for; the groups keep what they had.
    """

    def __init__(self, tape: Tape, first_step: int, admission: Admission) -> None:
        self.version = 0
        self._admission = admission
        self._steps = tape.steps(first_step)
        self._groups: deque[tuple[int, RolloutGroup]] = deque()
        self._num_handed_out = self._num_tokens = 0

    def start(self, version: int) -> None:
        """The policy's version."""
        self.version = version

    def advance(self, version: int) -> None:
        """The policy's version."""
        self.version = version

    def set_max_staleness(self, max_staleness: int) -> None:
        """Notes the bound; a tape is as stale as it is."""
        self._admission.max_staleness = max_staleness

    def begin_step(self) -> None:
        """Nothing to give back."""

    def take(self, should_stop: Callable[[], bool] = lambda: False) -> RolloutGroup | None:
        """The next group; None when the tape has ended."""
        if not self._groups:
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

    def stats(self) -> ProducerStats:
        """What was handed out."""
        return replace(ProducerStats.zero(), run_s=1e-9, num_finished=self._num_handed_out, num_tokens=self._num_tokens)

    def stop(self) -> bool:
        """There is no thread."""
        return True
