"""Which side of an asynchronous run is the limit, how much time that costs, and which setting to turn.

The wall time W of a window holds, per step or in sum, T_gen (the engine generated), T_train (the trainer neither waited
for rollouts nor published weights), T_sync (it published) and T_wait (it waited); W = T_train + T_sync + T_wait.

* Overlap efficiency: (T_gen + T_train + T_sync - W) / min(T_gen, T_train + T_sync). 0: one after the other; 1: the
  shorter side is hidden behind the longer one. It is T_gen - T_wait over the shorter side.
* With perfect overlap the longest side alone would be left: W* = max(T_gen, T_train + T_sync, T_score / workers). What
  W - W* is large enough to matter is lost to waiting for each other, and only the bound or the scheduling can win it;
  otherwise the longest side is the limit.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

Side = Literal["engine", "trainer", "reward", "weight sync", "staleness bound", "both sides"]
MATTERS = 0.05  # share of the wall time below which nothing is worth turning


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """Seconds within one window of a run; totals subtract to windows.

    Attributes:
        wall_s: length of the window, without validation.
        wait_s: the trainer waited for rollouts; `sync_s`: it published weights.
        engine_busy_s: the engine generated.
        scoring_s: a reward worker scored, the mean over workers.
    """

    wall_s: float
    wait_s: float
    sync_s: float
    engine_busy_s: float
    scoring_s: float = 0.0

    def __sub__(self, before: Intervals) -> Intervals:
        return Intervals(**{f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self)})

    def __add__(self, other: Intervals) -> Intervals:
        return Intervals(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    @property
    def trainer_s(self) -> float:
        """The trainer worked: T_train + T_sync."""
        return max(0.0, self.wall_s - self.wait_s)

    @property
    def longest_s(self) -> float:
        """W*, the wall time with perfect overlap; never more than the window (clocks are read one after the other)."""
        return min(self.wall_s, max(self.engine_busy_s, self.trainer_s, self.scoring_s))

    @property
    def overlap_efficiency(self) -> float:
        """Share of the shorter side that is hidden behind the longer one; below 0 where rewards or tools hold up."""
        shorter = min(self.engine_busy_s, self.trainer_s)
        return (self.engine_busy_s - self.wait_s) / shorter if shorter > 0 else 1.0


NOTHING = Intervals(wall_s=0.0, wait_s=0.0, sync_s=0.0, engine_busy_s=0.0)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting, the value it has and one worth trying."""

    name: str
    present: object
    suggested: object

    def __str__(self) -> str:
        return f"change {self.name} from {_shown(self.present)} to {_shown(self.suggested)}"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to turn for each side; None where there is nothing left to turn.

    Attributes:
        fresher: a lower staleness bound that would cost no time, while finished rollouts pile up.
    """

    engine: Setting | None = None
    trainer: Setting | None = None
    reward: Setting | None = None
    weight_sync: Setting | None = None
    staleness: Setting | None = None
    fresher: Setting | None = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The limit, and what removing it would win at most.

    Attributes:
        won_s: seconds of the window that would be won if this side cost nothing (or, for the bound, never made
            anybody wait): an upper bound, which the next side may cut short.
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
        won = f"up to {self.won_s:.3g} s of {i.wall_s:.3g} s ({self.share_won:.0%}) to win"
        return f"{shares}: {what}, {won}; {advice}{free}"


_NO_SETTING: dict[Side, str] = {
    "engine": "give it a faster device, more servers or shorter completions",
    "trainer": "give it a faster device or fewer tokens a step",
    "reward": "make the reward function cheaper",
    "weight sync": "publish less often",
    "staleness bound": "shorten the longest completions: they hold up a whole step",
}


def diagnose(intervals: Intervals, settings: Settings) -> Verdict:
    """The verdict on a window.

    Cheap cures come first: waiting for each other (a bound, a barrier) costs nothing to remove but staleness, so it is
    named as soon as it costs `MATTERS`; then publishing, then whichever side takes longest.
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
