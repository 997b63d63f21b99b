"""Worth of asynchrony: how much faster steps get at a staleness bound, and which bound, slots and rate are enough.

A step trains for T seconds and keeps the engine busy for G. A group also waits: for tools, for the environment, for its
longest completion. Let M_n be the expected maximum of these waits over n groups, and R the groups of a step. With
max_staleness S at most (S + 1) R groups are open, and each must be trained on within S + 1 steps:

    step(S) = max(T, G, C, (T + G + M_{(S + 1) R}) / (S + 1)),   worth(S) = step(0) / step(S)

where C is the processor time of a step divided by the cores, below which no overlap gets. With the same M for all S
this is worth(S) = min(S + 1, (T + G + M) / max(T, G, C)): asynchrony pays as far as training (or generation) is the
smaller part of a synchronous step, and no bound beyond that ratio is needed. Nothing is won where step(0) is already
max(T, G, C): without waits, where one side has all the work or all the cores.

Staleness costs progress per step. The bias of a stale gradient is of order lag x rate (arXiv:2607.01083); so is the
standard deviation s of the sequence log-ratios, and ESS / B = exp(-s^2) if they are normal. A lag that would bring the
effective sample size below `MIN_ESS` is paid for with a rate that keeps it there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

BOUNDS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
MIN_ESS = 0.5  # share of the completions of a step
ENOUGH = 0.95  # share of the best progress that a smaller bound has to reach
FIRST = 8  # largest bound to start with
WORTH_SAYING = 1.1


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Work of one optimizer step, as measured.

    Attributes:
        train_s: T, training and publication.
        engine_s: G, the engine was busy.
        waits: seconds from admission to the last token of single groups.
        busy_share: of the engine. Of a group's seconds, this share was computing, for itself or for others.
        groups_per_step: R.
        core_s: C, processor time divided by the number of cores; 0 if other devices compute.
    """

    train_s: float
    engine_s: float
    waits: Sequence[float]
    busy_share: float
    groups_per_step: int
    core_s: float = 0.0

    def step_s(self, max_staleness: int) -> float:
        """Expected seconds of a step at this bound."""
        groups = (max_staleness + 1) * self.groups_per_step
        wait_s = (1 - min(1.0, self.busy_share)) * expected_maximum(self.waits, groups)
        in_turn = (self.train_s + self.engine_s + wait_s) / (max_staleness + 1)
        return max(self.train_s, self.engine_s, self.core_s, in_turn)

    def worth(self, max_staleness: int) -> float:
        """How many times as fast as synchronously."""
        return self.step_s(0) / max(1e-9, self.step_s(max_staleness))


def expected_maximum(values: Sequence[float], n: int) -> float:
    """Mean of the largest of n draws, with replacement; 0 without values."""
    ordered, count = sorted(values), len(values)
    below, total = 0.0, 0.0
    for rank, value in enumerate(ordered, 1):
        share = (rank / count) ** n
        total += value * (share - below)
        below = share
    return total


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Recommended settings.

    Attributes:
        max_staleness: the smallest bound with `ENOUGH` of the best progress per second.
        worth: how many times as fast as synchronous training it is, at that rate.
        rate_scale: multiple of the present learning rate; 1 if it can stay.
        num_slots: of the engine; None leaves them.
    """

    max_staleness: int
    worth: float
    rate_scale: float = 1.0
    num_slots: int | None = None

    def text(self, names_bound: bool = True) -> str:
        """One sentence; without `names_bound` it recommends no setting."""
        if not names_bound:
            return f"asynchrony is worth about {max(1.0, self.worth):.1f}x here"
        if self.worth < WORTH_SAYING:
            return f"asynchrony is worth at most {self.worth:.2f}x here: data.max_staleness 0 loses little"
        slots = "" if self.num_slots is None else f", with num_slots {self.num_slots}"
        scaled = self.rate_scale < 1 / WORTH_SAYING
        rate = f", at {self.rate_scale:.2g} times the present model.learning_rate" if scaled else ""
        enough = f"data.max_staleness {self.max_staleness} is enough"
        return f"asynchrony is worth about {self.worth:.1f}x here: {enough}{slots}{rate}"


def advise(
    work: StepWork,
    *,
    ess_ratio: float | None,
    present: int,
    bounds: Sequence[int] = BOUNDS,
    num_slots: int | None = None,
    waiting_rollouts: float = 0.0,
) -> Advice:
    """The bound with the best progress per second.

    Args:
        work: of a step.
        ess_ratio: effective sample size of the run, as a share of the completions; None if unknown.
        present: bound of the run, at which the effective sample size was measured.
        bounds: those to choose from, as far as they do not exceed twice the present one (or `FIRST`): how stale data
            may be beyond is not known.
        num_slots: of the engine; None if it has none.
        waiting_rollouts: mean number of rollouts that are being sampled or wait for it.
    """

    def progress(bound: int) -> float:
        return work.worth(bound) * _rate_scale(bound, ess_ratio, present)

    known = sorted(bound for bound in bounds if bound <= max(FIRST, 2 * present))
    best = max(progress(bound) for bound in known)
    chosen = next(bound for bound in known if progress(bound) >= ENOUGH * best)
    scale = _rate_scale(chosen, ess_ratio, present)
    return Advice(
        max_staleness=chosen,
        worth=progress(chosen),
        rate_scale=scale,
        num_slots=_slots(work, num_slots, waiting_rollouts),
    )


def _rate_scale(bound: int, ess_ratio: float | None, present: int) -> float:
    """Largest share of the present rate at which the effective sample size stays above `MIN_ESS`."""
    if ess_ratio is None or present <= 0 or ess_ratio >= 1:
        return 1.0  # nothing was stale: no measurement
    deviation = math.sqrt(-math.log(max(1e-6, ess_ratio))) * bound / present
    allowed = math.sqrt(-math.log(MIN_ESS))
    return min(1.0, allowed / deviation) if deviation > 0 else 1.0


def _slots(work: StepWork, num_slots: int | None, waiting_rollouts: float) -> int | None:
    """More slots, if the engine limits the run while rollouts wait for a slot: as many as would bring it below T."""
    if num_slots is None or waiting_rollouts <= num_slots or work.engine_s <= max(work.train_s, work.core_s):
        return None
    wanted = num_slots * work.engine_s / max(1e-9, work.train_s, work.core_s)
    return min(2 ** math.ceil(math.log2(wanted)), 2 ** math.ceil(math.log2(waiting_rollouts)))
