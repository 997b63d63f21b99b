"""Bottleneck of an asynchronous run: the limiting side, the time it costs, and the setting to change.

The wall time W of a window consists of T_gen (the engine generated), T_train (the trainer neither waited for rollouts
nor published weights), T_sync (it published) and T_wait (it waited); W = T_train + T_sync + T_wait.

* Overlap efficiency: (T_gen + T_train + T_sync - W) / min(T_gen, T_train + T_sync). 0: sequential; 1: the shorter side
  is hidden behind the longer one. It equals T_gen - T_wait over the shorter side.
* With perfect overlap the longest side alone would remain: W* = max(T_gen, T_train + T_sync, T_score / workers). A
  significant W - W* is lost to mutual waiting, which only the bound or the scheduling can reduce; otherwise the longest
  side is the bottleneck.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

Side = Literal["engine", "slowest replica", "trainer", "reward", "weight sync", "staleness bound", "both sides"]
MIN_SHARE = 0.1  # share of the wall time below which a gain is not worth a change of settings
SPARE_SHARE = 0.05  # share of it that a trainer with rollouts to spare waits at most
CHANGED = 1.5  # times by which a share of the time changes before earlier advice is forgotten


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """Seconds within one window of a run; windows are differences of totals.

    Attributes:
        wall_s: length of the window, without validation.
        wait_s: the trainer waited for rollouts; `sync_s`: it published weights.
        engine_busy_s: the engine generated.
        scoring_s: a reward worker scored, the mean over workers.
        cpu_s: processor seconds of this process, all threads; not known from a trace.
        held_s: part of `wait_s` until the slowest of several replicas took weights; not known from a trace.
    """

    wall_s: float
    wait_s: float
    sync_s: float
    engine_busy_s: float
    scoring_s: float = 0.0
    cpu_s: float = 0.0
    held_s: float = 0.0

    def __sub__(self, before: Intervals) -> Intervals:
        return Intervals(**{f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self)})

    def __add__(self, other: Intervals) -> Intervals:
        return Intervals(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    @property
    def trainer_s(self) -> float:
        """Seconds of training and publication: T_train + T_sync."""
        return max(0.0, self.wall_s - self.wait_s)

    @property
    def longest_s(self) -> float:
        """W*, clipped to the window (clocks are read in sequence)."""
        return min(self.wall_s, max(self.engine_busy_s, self.trainer_s, self.scoring_s))

    @property
    def overlap_efficiency(self) -> float:
        """Share of the shorter side hidden behind the longer one; negative if rewards or tools limit."""
        shorter = min(self.engine_busy_s, self.trainer_s)
        return (self.engine_busy_s - self.wait_s) / shorter if shorter > 0 else 1.0


NO_TIME = Intervals(wall_s=0.0, wait_s=0.0, sync_s=0.0, engine_busy_s=0.0)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting, its value and a suggested one.

    Attributes:
        needs: arguments that the command line needs to accept the name.
    """

    name: str
    present: object
    suggested: object
    needs: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """Arguments of the command line that change it."""
        return [*self.needs, f"--{self.name}", _shown(self.suggested)]

    def __str__(self) -> str:
        change = f"change {self.name} from {_shown(self.present)} to {_shown(self.suggested)}"
        return f"{change} ({' '.join(self.arguments)})" if self.needs else change


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Suggested changes for each side; None if nothing is left to change.

    Attributes:
        fresher: lower staleness bound at no cost, while finished rollouts queue up.
    """

    engine: Setting | None = None
    trainer: Setting | None = None
    reward: Setting | None = None
    weight_sync: Setting | None = None
    staleness: Setting | None = None
    fresher: Setting | None = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The bottleneck and an upper bound on the gain from removing it.

    Attributes:
        won_s: seconds of the window saved if this side were free (or the bound never caused waiting): an upper bound,
            as the next side may limit first.
        fresher: see `Settings`.
    """

    side: Side
    intervals: Intervals
    won_s: float
    setting: Setting | None
    fresher: Setting | None = None

    @property
    def share_won(self) -> float:
        """`won_s` as a share of the window."""
        return self.won_s / self.intervals.wall_s

    @property
    def shares(self) -> str:
        """Time shares of trainer and engine, in words."""
        i = self.intervals
        return (
            f"the trainer waits {i.wait_s / i.wall_s:.0%} of the time, the engine is busy "
            f"{min(1.0, i.engine_busy_s / i.wall_s):.0%}, publishing takes {i.sync_s / i.wall_s:.0%}"
        )

    @property
    def is_worth_it(self) -> bool:
        """Whether there is `MIN_SHARE` to gain."""
        return self.side != "both sides"

    @property
    def key(self) -> tuple[str, ...]:
        """Identity of the advice, without the numbers of its window."""
        setting = self.setting
        return (self.side,) if setting is None else (self.side, setting.name, str(setting.suggested))

    def __str__(self) -> str:
        i = self.intervals
        shares = self.shares
        free = "" if self.fresher is None else f". Fresher data would cost no time: {self.fresher}"
        if not self.is_worth_it:
            return f"{shares}: less than {MIN_SHARE:.0%} to gain without faster hardware or less work{free}"
        what = "they wait for each other" if self.side == "staleness bound" else f"the {self.side} is the bottleneck"
        advice = _NO_SETTING[self.side] if self.setting is None else str(self.setting)
        won = f"up to {self.won_s:.3g} s of {i.wall_s:.3g} s ({self.share_won:.0%}) to gain"
        return f"{shares}: {what}, {won}; {advice}{free}"


_NO_SETTING: dict[Side, str] = {
    "engine": "give it a faster device, more replicas or shorter completions",
    "slowest replica": "the log names one that did not answer; otherwise its machine is slower than the others",
    "trainer": "give it a faster device or fewer tokens a step",
    "reward": "make the reward function cheaper: more workers would only share its cores",
    "weight sync": "publish less often",
    "staleness bound": "shorten the longest completions: they hold up a whole step",
}


def diagnose(intervals: Intervals, settings: Settings) -> Verdict:
    """The bottleneck of a window.

    Cheap remedies come first: removing waiting costs only staleness, so it is named as soon as waiting costs
    `MIN_SHARE`; then publication, then the longest side.
    """
    i = intervals
    lost = i.wall_s - i.longest_s
    threshold = MIN_SHARE * i.wall_s

    def verdict(side: Side, won_s: float, setting: Setting | None) -> Verdict:
        fresher = settings.fresher if i.wait_s <= SPARE_SHARE * i.wall_s else None
        return Verdict(side=side, intervals=i, won_s=won_s, setting=setting, fresher=fresher)

    if i.held_s > threshold:
        return verdict("slowest replica", i.held_s, None)
    if i.scoring_s >= max(i.engine_busy_s, i.trainer_s) and i.wait_s > threshold:
        return verdict("reward", i.wait_s, settings.reward)
    if i.wait_s > threshold and lost > threshold:
        return verdict("staleness bound", lost, settings.staleness)
    if i.wait_s > threshold:
        return verdict("engine", i.wait_s, settings.engine)
    idle_s = i.wall_s - max(i.engine_busy_s, i.scoring_s)
    if idle_s <= threshold:
        return verdict("both sides", 0.0, None)
    if i.sync_s > threshold:
        return verdict("weight sync", min(i.sync_s, idle_s), settings.weight_sync)
    return verdict("trainer", idle_s, settings.trainer)


class SteadyAdvice:
    """Which verdicts may advise, so that no window contradicts one before it.

    Advice needs two windows in a row that agree, with `MIN_SHARE` to gain. Other advice is then withheld until the
    share of the time that trainer, engine or reward work has changed by a factor of `CHANGED`. A fresher bound is
    advised for whole runs only, if no window asked for an older one.
    """

    def __init__(self) -> None:
        self._given: Verdict | None = None
        self._before: tuple[str, ...] | None = None

    def admits(self, verdict: Verdict) -> bool:
        """Whether this verdict on the next window may advise."""
        if self._given is not None and _has_changed(self._given.intervals, verdict.intervals):
            self._given = None
        before = self._before
        self._before = verdict.key if verdict.is_worth_it else None
        if self._before is None:
            return False
        if self._given is None and before == verdict.key:
            self._given = verdict
        return self._given is not None and self._given.key == verdict.key

    def for_window(self, verdict: Verdict) -> str:
        """Words on the next window."""
        verdict = replace(verdict, fresher=None)
        return str(verdict) if self.admits(verdict) or not verdict.is_worth_it else verdict.shares

    def for_run(self, verdict: Verdict, is_over: bool) -> Verdict | None:
        """Advice for the run so far; None if only time shares are worth printing.

        Args:
            verdict: on the run from its beginning.
            is_over: whether it is the last, which may advise what no window could yet.
        """
        if not is_over or self._given is not None:
            if verdict.is_worth_it and (self._given is None or self._given.key != verdict.key):
                return None
            asked = None if self._given is None else self._given.setting
            is_opposite = asked is not None and verdict.fresher is not None and asked.name == verdict.fresher.name
            verdict = replace(verdict, fresher=None) if is_opposite or not is_over else verdict
        return verdict

    def has_named(self, setting: str, last: Verdict | None) -> bool:
        """Whether a window, or the last verdict, has advised on a setting."""
        asked = [one.setting for one in (self._given, last) if one is not None and one.is_worth_it]
        fresher = None if last is None else last.fresher
        return any(one is not None and one.name == setting for one in (*asked, fresher))


def _has_changed(before: Intervals, now: Intervals) -> bool:
    for name in ("trainer_s", "engine_busy_s", "scoring_s"):
        shares = [max(SPARE_SHARE, getattr(one, name) / one.wall_s) for one in (before, now)]
        if max(shares) > CHANGED * min(shares):
            return True
    return False


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# -- Worth of asynchrony: how much faster steps get at a staleness bound, and which bound, slots and rate are enough
# A step trains for T seconds and keeps the engine busy for G. A group also waits: for tools, for the environment, for
# its longest completion. Let M_n be the expected maximum of these waits over n groups, and R the groups of a step. With
# max_staleness S at most (S + 1) R groups are open, and each must be trained on within S + 1 steps:
#
#     step(S) = max(T, G, C, (T + G + M_{(S + 1) R}) / (S + 1)),   worth(S) = step(0) / step(S)
#
# where C is the processor time of a step divided by the cores, below which no overlap gets. With the same M for all S
# this is worth(S) = min(S + 1, (T + G + M) / max(T, G, C)): asynchrony pays as far as training (or generation) is the
# smaller part of a synchronous step, and no bound beyond that ratio is needed. Nothing is won where step(0) is already
# max(T, G, C): without waits, where one side has all the work or all the cores.
#
# With the mean wait m in place of the longest, K = (T + G + m) / max(T, G, C) - 1 is the steady staleness: the versions
# that pass while a group is under way, if no step waits. By Little's law a trainer at full speed needs open groups for
# K + 1 steps, so that it waits for rollouts at any bound below K, in whatever order it takes them; how much more a long
# tail needs is in M. (Latency of a rollout over time of a step, L. Huang, "Is Frontier Asynchronous RL Solved?",
# 2026; G and C are ours.)
#
# Staleness costs progress per step. The bias of a stale gradient is of order lag x rate (arXiv:2607.01083); so is the
# standard deviation s of the sequence log-ratios, and ESS / B = exp(-s^2) if they are normal. A lag that would bring
# the effective sample size below `MIN_ESS` is counted as if the rate were lowered until it stays there. The rate that
# is named is another one: in the runs of `benchmarks/staleness/rate_by_bound.py` this estimate kept most of the gain no
# more often than the whole rate, and a rule by what the loss does about stale data did.


BOUNDS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
MIN_ESS = 0.5  # share of the completions of a step
MIN_SHARE_OF_BEST = 0.95  # share of the best progress that a smaller bound has to reach
MAX_FIRST_BOUND = 8  # largest bound to start with
MIN_SPEEDUP = 1.1  # below which no setting is recommended


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Work of one optimizer step, as measured.

    Attributes:
        train_s: T, training and publication.
        engine_s: G, the engine was busy.
        waits: seconds from admission to the last token of single groups.
        busy_share: of the engine: the share of a group's seconds that it computed, for any group.
        groups_per_step: R.
        core_s: C, processor time divided by the number of cores; 0 if other devices compute.
    """

    train_s: float
    engine_s: float
    waits: Sequence[float]
    busy_share: float
    groups_per_step: int
    core_s: float = 0.0

    @property
    def longest_s(self) -> float:
        """Seconds of a step that waits for nothing."""
        return max(self.train_s, self.engine_s, self.core_s)

    def step_s(self, max_staleness: int) -> float:
        """Expected seconds of a step at this bound."""
        groups = (max_staleness + 1) * self.groups_per_step
        in_turn = self._in_turn_s(expected_maximum(self.waits, groups)) / (max_staleness + 1)
        return max(self.longest_s, in_turn)

    def steady_staleness(self) -> float | None:
        """K, in versions; None if no part of a step took any time."""
        if self.longest_s <= 0:
            return None
        mean = sum(self.waits) / max(1, len(self.waits))
        return max(0.0, self._in_turn_s(mean) / self.longest_s - 1)

    def _in_turn_s(self, group_s: float) -> float:
        """Seconds of all parts one after the other, where a group takes this long."""
        return self.train_s + self.engine_s + (1 - min(1.0, self.busy_share)) * group_s

    def worth(self, max_staleness: int) -> float:
        """How many times as fast as synchronously."""
        return self.step_s(0) / max(1e-9, self.step_s(max_staleness))


def expected_maximum(values: Sequence[float], n: int) -> float:
    """Mean of the largest of n draws, with replacement; 0 without values."""
    ordered = sorted(values)
    count = len(values)
    below = 0.0
    total = 0.0
    for rank, value in enumerate(ordered, 1):
        share = (rank / count) ** n
        total += value * (share - below)
        below = share
    return total


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Recommended settings.

    Attributes:
        max_staleness: smallest bound with `MIN_SHARE_OF_BEST` of the best progress per second.
        worth: speed relative to synchronous training.
        rate_scale: multiple of a synchronous run's learning rate that fits the bound.
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
        if self.worth < MIN_SPEEDUP:
            return f"asynchrony is worth at most {self.worth:.2f}x here: data.max_staleness 0 loses little"
        slots = "" if self.num_slots is None else f", with num_slots {self.num_slots}"
        scaled = self.rate_scale < 1 / MIN_SPEEDUP
        rate = f", at {self.rate_scale:.2g} times the model.learning_rate of a synchronous run" if scaled else ""
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
    rate_factor: Callable[[int], float] = lambda _: 1.0,
) -> Advice:
    """The bound with the best progress per second.

    Args:
        work: of a step.
        ess_ratio: effective sample size, as a share of the completions; None if unknown.
        present: bound of the run, at which the effective sample size was measured.
        bounds: candidates, without those above both twice the present bound and `MAX_FIRST_BOUND`: how stale data would
            be there is unknown.
        num_slots: of the engine; None if it has none.
        waiting_rollouts: mean number of rollouts being sampled or waiting for it.
        rate_factor: multiple of a synchronous run's learning rate that fits a bound.
    """

    def progress(bound: int) -> float:
        return work.worth(bound) * _progress_share(bound, ess_ratio, present)

    known = sorted(bound for bound in bounds if bound <= max(MAX_FIRST_BOUND, 2 * present))
    best = max(progress(bound) for bound in known)
    chosen = next(bound for bound in known if progress(bound) >= MIN_SHARE_OF_BEST * best)
    return Advice(
        max_staleness=chosen,
        worth=progress(chosen),
        rate_scale=rate_factor(chosen),
        num_slots=_slots(work, num_slots, waiting_rollouts),
    )


def _progress_share(bound: int, ess_ratio: float | None, present: int) -> float:
    """Share of a step's progress left at the rate that keeps the effective sample size above `MIN_ESS`."""
    if ess_ratio is None or present <= 0 or ess_ratio >= 1:
        return 1.0  # nothing was stale: no measurement
    deviation = math.sqrt(-math.log(max(1e-6, ess_ratio))) * bound / present
    allowed = math.sqrt(-math.log(MIN_ESS))
    return min(1.0, allowed / deviation) if deviation > 0 else 1.0


def _slots(work: StepWork, num_slots: int | None, waiting_rollouts: float) -> int | None:
    """More slots, if the engine limits the run while rollouts wait for one: enough to bring it below T."""
    if num_slots is None or waiting_rollouts <= num_slots or work.engine_s <= max(work.train_s, work.core_s):
        return None
    wanted = num_slots * work.engine_s / max(1e-9, work.train_s, work.core_s)
    return min(2 ** math.ceil(math.log2(wanted)), 2 ** math.ceil(math.log2(waiting_rollouts)))
