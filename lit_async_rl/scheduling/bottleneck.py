"""Bottleneck of an asynchronous run: the limiting side, the time it costs, and the setting to change.

The wall time W of a window consists of T_gen (the engine generated), T_train (the trainer neither waited for rollouts
nor published weights), T_sync (it published) and T_wait (it waited); W = T_train + T_sync + T_wait.

* Overlap efficiency: (T_gen + T_train + T_sync - W) / min(T_gen, T_train + T_sync). 0: sequential; 1: the shorter side
  is hidden behind the longer one. It equals T_gen - T_wait over the shorter side.
* With perfect overlap the longest side alone would remain: W* = max(T_gen, T_train + T_sync, T_score / workers). If
  W - W* is significant, it is lost to waiting for each other, which only the bound or the scheduling can reduce;
  otherwise the longest side is the bottleneck.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

Side = Literal["engine", "trainer", "reward", "weight sync", "staleness bound", "both sides"]
MATTERS = 0.05  # share of the wall time below which nothing is worth turning


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """Seconds within one window of a run; windows are differences of totals.

    Attributes:
        wall_s: length of the window, without validation.
        wait_s: the trainer waited for rollouts; `sync_s`: it published weights.
        engine_busy_s: the engine generated.
        scoring_s: a reward worker scored, the mean over workers.
        cpu_s: processor seconds of this process, all threads; not known from a trace.
    """

    wall_s: float
    wait_s: float
    sync_s: float
    engine_busy_s: float
    scoring_s: float = 0.0
    cpu_s: float = 0.0

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
        """W*, the wall time with perfect overlap; clipped to the window (clocks are read in sequence)."""
        return min(self.wall_s, max(self.engine_busy_s, self.trainer_s, self.scoring_s))

    @property
    def overlap_efficiency(self) -> float:
        """Share of the shorter side hidden behind the longer one; negative if rewards or tools limit."""
        shorter = min(self.engine_busy_s, self.trainer_s)
        return (self.engine_busy_s - self.wait_s) / shorter if shorter > 0 else 1.0


NOTHING = Intervals(wall_s=0.0, wait_s=0.0, sync_s=0.0, engine_busy_s=0.0)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting, its value and a suggested one.

    Attributes:
        needs: arguments of the command line without which it would refuse the name.
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
        won_s: seconds of the window saved if this side were free (or, for the bound, never caused waiting): an upper
            bound, as the next side may limit first.
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

    def __str__(self) -> str:
        i = self.intervals
        shares = (
            f"the trainer waits {i.wait_s / i.wall_s:.0%} of the time, the engine is busy "
            f"{min(1.0, i.engine_busy_s / i.wall_s):.0%}, publishing takes {i.sync_s / i.wall_s:.0%}"
        )
        free = "" if self.fresher is None else f". Fresher data would cost no time: {self.fresher}"
        if self.side == "both sides":
            return f"{shares}: neither waits for the other; only faster hardware or less work would help{free}"
        what = "they wait for each other" if self.side == "staleness bound" else f"the {self.side} is the bottleneck"
        advice = _NO_SETTING[self.side] if self.setting is None else str(self.setting)
        won = f"up to {self.won_s:.3g} s of {i.wall_s:.3g} s ({self.share_won:.0%}) to gain"
        return f"{shares}: {what}, {won}; {advice}{free}"


_NO_SETTING: dict[Side, str] = {
    "engine": "give it a faster device, more servers or shorter completions",
    "trainer": "give it a faster device or fewer tokens a step",
    "reward": "make the reward function cheaper: more workers would only share its cores",
    "weight sync": "publish less often",
    "staleness bound": "shorten the longest completions: they hold up a whole step",
}


def diagnose(intervals: Intervals, settings: Settings) -> Verdict:
    """The bottleneck of a window.

    Cheap remedies come first: removing waiting (a bound, a barrier) costs only staleness, so it is named as soon as it
    costs `MATTERS`; then publication, then the longest side.
    """
    i = intervals
    lost = i.wall_s - i.longest_s
    threshold = MATTERS * i.wall_s

    def verdict(side: Side, won_s: float, setting: Setting | None) -> Verdict:
        fresher = settings.fresher if i.wait_s <= threshold else None
        return Verdict(side=side, intervals=i, won_s=won_s, setting=setting, fresher=fresher)

    if i.scoring_s >= max(i.engine_busy_s, i.trainer_s) and i.wait_s > threshold:
        return verdict("reward", i.wait_s, settings.reward)
    if i.wait_s > threshold and lost > threshold:
        return verdict("staleness bound", lost, settings.staleness)
    if i.wait_s > threshold:
        return verdict("engine", i.wait_s, settings.engine)
    idle_s = i.wall_s - max(i.engine_busy_s, i.scoring_s)
    if idle_s <= threshold:
        return verdict("both sides", 0.0, None)
    if i.sync_s > 2 * threshold:
        return verdict("weight sync", min(i.sync_s, idle_s), settings.weight_sync)
    return verdict("trainer", idle_s, settings.trainer)


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
