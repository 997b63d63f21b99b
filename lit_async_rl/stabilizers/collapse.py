"""Detection of a collapse from the signals of each step."""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


@dataclass(frozen=True, kw_only=True)
class StepHealth:
    """Signals of one step; None where nothing was measured."""

    ess_ratio: float | None = None
    kl: float | None = None
    grad_norm: float | None = None
    cosine: float | None = None
    entropy: float | None = None
    reward: float | None = None


@dataclass(kw_only=True, eq=False)
class CollapseWatch:
    """Counts the consecutive steps that violate each limit.

    No published limits are known; the order of events is: ESS falls, KL grows, the gradient norm jumps and then
    vanishes, the reward drops (VCPO, arXiv:2602.17616). The arguments are those of `CollapseAlarm`; a limit of None is
    off.
    """

    min_ess_ratio: float | None
    max_kl: float | None
    max_grad_norm_factor: float | None
    max_cosine: float | None
    min_entropy: float | None
    max_reward_drop: float | None
    patience: int
    window: int

    def __post_init__(self) -> None:
        check_range("CollapseAlarm", "integer >= 1", patience=self.patience, window=self.window)
        self.reset()

    def reset(self) -> None:
        """Discards all recorded steps, before another run."""
        self._in_a_row: dict[str, int] = {}
        self._norms: deque[float] = deque(maxlen=self.window)
        self._rewards: deque[float] = deque(maxlen=self.window)
        self._best_reward = -math.inf

    @property
    def is_healthy(self) -> bool:
        """Whether the last step was within all limits."""
        return not self._in_a_row

    def observe(self, seen: StepHealth) -> list[str]:
        """Adds one step; returns a sentence for each limit violated for `patience` consecutive steps."""
        broken = self._broken(seen)
        self._in_a_row = {name: self._in_a_row.get(name, 0) + 1 for name in broken}
        if "grad_norm" not in broken and seen.grad_norm:
            self._norms.append(seen.grad_norm)
        return [words for name, words in broken.items() if self._in_a_row[name] >= self.patience]

    def reset_counts(self) -> None:
        """Resets counts of consecutive violations and recent rewards after an alarm; keeps median and best reward."""
        self._in_a_row = {}
        self._rewards.clear()

    def _broken(self, seen: StepHealth) -> dict[str, str]:
        broken = {}
        if _below(seen.ess_ratio, self.min_ess_ratio):
            broken["ess_ratio"] = (
                f"the effective sample size was {seen.ess_ratio:.3g} of the completions "
                f"(limit {self.min_ess_ratio:g}): a few of them dominate the gradient"
            )
        if _above(seen.kl, self.max_kl):
            broken["kl"] = f"the KL to the sampling policy was {seen.kl:.3g} per token (limit {self.max_kl:g})"
        if _above(seen.cosine, self.max_cosine):
            broken["cosine"] = (
                f"consecutive gradients had a cosine of {seen.cosine:.3g} (limit {self.max_cosine:g}): "
                "the run drifts in one direction"
            )
        if _below(seen.entropy, self.min_entropy):
            broken["entropy"] = f"the entropy was {seen.entropy:.3g} per token (limit {self.min_entropy:g})"
        return broken | self._broken_norm(seen.grad_norm) | self._broken_reward(seen.reward)

    def _broken_norm(self, norm: float | None) -> dict[str, str]:
        if norm is None or self.max_grad_norm_factor is None:
            return {}
        if not math.isfinite(norm):
            return {"grad_norm": "the gradient contained NaN or infinity"}
        if len(self._norms) < self.window:
            return {}
        median = statistics.median(self._norms)
        if norm <= self.max_grad_norm_factor * median:
            return {}
        return {
            "grad_norm": f"the gradient norm was {norm:.3g}, {norm / median:.0f} times its median {median:.3g} "
            f"(limit {self.max_grad_norm_factor:g} times)"
        }

    def _broken_reward(self, reward: float | None) -> dict[str, str]:
        if reward is None or self.max_reward_drop is None:
            return {}
        self._rewards.append(reward)
        if len(self._rewards) < self.window:
            return {}
        mean = statistics.fmean(self._rewards)
        self._best_reward = max(self._best_reward, mean)
        if self._best_reward - mean <= self.max_reward_drop:
            return {}
        return {
            "reward": f"the mean reward of {self.window} steps fell to {mean:.3g} from {self._best_reward:.3g} "
            f"(limit {self.max_reward_drop:g})"
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "in_a_row": dict(self._in_a_row),
            "norms": list(self._norms),
            "rewards": list(self._rewards),
            "best_reward": self._best_reward,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._in_a_row = dict(state_dict["in_a_row"])
        self._norms = deque(state_dict["norms"], maxlen=self.window)
        self._rewards = deque(state_dict["rewards"], maxlen=self.window)
        self._best_reward = state_dict["best_reward"]


class CollapseTrend:
    """Detects an ongoing collapse: a tiny effective sample size while the reward falls.

    Requires both: long completions have a small effective sample size in healthy runs, too, and rewards may fall for
    other reasons. Reports the collapse until the reward has recovered.

    Args:
        min_ess_ratio: lower limit of the median effective sample size, as a share of the completions.
        reward_drop: required fall of the mean reward of `window` steps, as a share of the best such mean.
        window: number of steps of the median and the mean.
    """

    def __init__(self, min_ess_ratio: float = 0.05, reward_drop: float = 0.1, window: int = 10) -> None:
        self.min_ess_ratio = min_ess_ratio
        self.reward_drop = reward_drop
        self._ess: deque[float] = deque(maxlen=window)
        self._rewards: deque[float] = deque(maxlen=window)
        self._best = -math.inf
        self._lowest_ess = math.inf  # since the ongoing collapse began; infinite without one

    def observe(self, ess_ratio: float, reward: float) -> str | None:
        """Adds one step; returns a sentence about the ongoing collapse, or None."""
        self._ess.append(ess_ratio)
        self._rewards.append(reward)
        if len(self._ess) < (self._ess.maxlen or 0):
            return None
        mean = statistics.fmean(self._rewards)
        ess = statistics.median(self._ess)
        self._best = max(self._best, mean)
        if self._best - mean <= self.reward_drop * abs(self._best):
            self._lowest_ess = math.inf
            return None
        if ess < self.min_ess_ratio:
            self._lowest_ess = min(self._lowest_ess, ess)
        if self._lowest_ess == math.inf:
            return None
        return (
            f"the effective sample size fell to {self._lowest_ess:.2g} of the completions (limit "
            f"{self.min_ess_ratio:g}), and the mean reward of {len(self._rewards)} steps to {mean:.3g} from "
            f"{self._best:.3g}"
        )


class GainWatch:
    """Share of its gain that training has lost again; half of it is the collapse that `CollapseForecast` predicts.

    Compares the mean reward of `WINDOW` steps with its best value, as a share of the gain over its first value. Below a
    gain of `MIN_GAIN` it compares with the first value, as a share of that.

    The best of many noisy means is a lucky one: 32 completions of a language model lose half of a small gain by chance.
    A collapse is therefore also a loss of more than `NUM_ERRORS` standard errors. Half of the mean squared difference
    of consecutive steps estimates a step's variance, almost without that of a slow trend (von Neumann, 1941,
    doi:10.1214/aoms/1177731677).

    Attributes:
        is_collapse: whether the last `WINDOW` steps are one.
    """

    WINDOW = 10
    MIN_GAIN = 0.1
    COLLAPSE = 0.5
    NUM_ERRORS = 4.0

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Discards all recorded steps, before another run."""
        self._rewards: deque[float] = deque(maxlen=self.WINDOW)
        self._first: float | None = None
        self._best = -math.inf
        self._sum_of_squares = 0.0  # of the differences of consecutive steps
        self._num_differences = 0
        self.is_collapse = False

    def forget_steps(self) -> None:
        """Discards the last steps, after a rollback; keeps first and best mean and the variance."""
        self._rewards.clear()
        self.is_collapse = False

    def observe(self, reward: float) -> float:
        """Adds a step's mean reward; returns the lost share of the gain, 0 before `WINDOW` steps."""
        if self._rewards:
            self._sum_of_squares += (reward - self._rewards[-1]) ** 2
            self._num_differences += 1
        self._rewards.append(reward)
        if len(self._rewards) < self.WINDOW:
            return 0.0
        mean = statistics.fmean(self._rewards)
        if self._first is None:
            self._first = mean
        self._best = max(self._best, mean)
        gain = self._best - self._first
        loss = (self._best if gain >= self.MIN_GAIN else self._first) - mean
        whole = gain if gain >= self.MIN_GAIN else abs(self._first)
        share = loss / whole if whole else 0.0
        self.is_collapse = share > self.COLLAPSE and loss > self.NUM_ERRORS * self._standard_error()
        return share

    def _standard_error(self) -> float:
        """Of the difference of two means of `WINDOW` steps, by chance alone."""
        variance = self._sum_of_squares / (2 * self._num_differences)
        return math.sqrt(2 * variance / self.WINDOW)

    def state_dict(self) -> dict[str, Any]:
        return {
            "rewards": list(self._rewards),
            "first": self._first,
            "best": self._best,
            "sum_of_squares": self._sum_of_squares,
            "num_differences": self._num_differences,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._rewards = deque(state_dict["rewards"], maxlen=self.WINDOW)
        self._first = state_dict["first"]
        self._best = state_dict["best"]
        # a checkpoint of an earlier commit knows no noise: it is learned from the steps that follow
        self._sum_of_squares = state_dict.get("sum_of_squares", 0.0)
        self._num_differences = state_dict.get("num_differences", 0)
        self.is_collapse = False


class CollapseForecast:
    """Log-odds that the mean reward collapses within the next 20 steps, from two signals of each step.

        e <- average of the effective sample size, as a share of the step's completions
        g <- average of the gradient norm, over the median of the first `START_STEPS` norms, at most two of them 0
        log-odds = a log10(e) + b log10(g) + c

    The averages are exponential with a half-life of `HALF_LIFE` steps. `GainWatch` defines a collapse.
    `python -m benchmarks.staleness.predictor` fits the constants, and tests them on other tasks, losses and sizes
    (docs/measurements/collapse_forecast.json).

    Attributes:
        LIMIT: log-odds that 2.5 % of the healthy runs of the fit ever exceed.
        signals: log10(e) and log10(g) of the last step.
    """

    HALF_LIFE = 5.0
    START_STEPS = 5
    MIN_STEPS = 10
    WEIGHTS = (-5.77, 2.52)
    CONSTANT = -5.78
    LIMIT = -1.57

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Discards all recorded steps, before another run."""
        self._num_steps = 0
        self._first_norms: list[float] = []
        self._weight = 0.0  # of all steps in the two averages
        self._ess = 0.0
        self._norm = 0.0
        self.signals = (0.0, 0.0)

    def forget_steps(self) -> None:
        """Discards the averages, after a rollback; the first norms stay."""
        self._num_steps = 0
        self._weight = 0.0
        self._ess = 0.0
        self._norm = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether enough steps were measured."""
        return self._num_steps >= self.MIN_STEPS and self._first_norm > 0

    @property
    def _first_norm(self) -> float:
        """Median of the first norms; 0 without any."""
        return statistics.median(self._first_norms) if self._first_norms else 0.0

    def observe(self, seen: StepHealth) -> float | None:
        """Adds a step; returns the log-odds, None unless `is_ready`. Unmeasured steps change nothing."""
        if seen.ess_ratio is None or seen.grad_norm is None or not math.isfinite(seen.ess_ratio + seen.grad_norm):
            return None
        if len(self._first_norms) == self.START_STEPS and not self._first_norm:
            # most were of steps without a gradient (equal rewards in every group), beside which any norm is huge
            self._first_norms.remove(0.0)
        if len(self._first_norms) < self.START_STEPS:
            self._first_norms.append(seen.grad_norm)
        keep = 0.5 ** (1 / self.HALF_LIFE)
        self._weight = keep * self._weight + 1
        self._ess = keep * self._ess + seen.ess_ratio
        self._norm = keep * self._norm + seen.grad_norm
        self._num_steps += 1
        if not self.is_ready:
            return None
        first = max(self._first_norm, 1e-6)
        self.signals = (
            math.log10(max(self._ess / self._weight, 1e-4)),
            math.log10(max(self._norm / self._weight, 1e-6) / first),
        )
        return self.WEIGHTS[0] * self.signals[0] + self.WEIGHTS[1] * self.signals[1] + self.CONSTANT

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_steps": self._num_steps,
            "first_norms": list(self._first_norms),
            "weight": self._weight,
            "ess": self._ess,
            "norm": self._norm,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._num_steps = state_dict["num_steps"]
        self._first_norms = list(state_dict["first_norms"])
        self._weight = state_dict["weight"]
        self._ess = state_dict["ess"]
        self._norm = state_dict["norm"]


def _below(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and not value >= limit


def _above(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and not value <= limit


# -- Protocols of data modules whose staleness bound can change, that know rewards early, or can discard rollouts ------


@runtime_checkable
class BoundedData(Protocol):
    """Data module with a bound on staleness, in versions; `RolloutDataModule` implements it.

    It starts at its configured bound, also after a resume, so a callback that changes the bound has to checkpoint the
    change and apply it again.
    """

    @property
    def max_staleness(self) -> int:
        """Staleness bound of rollouts admitted from now on, in versions."""

    def set_max_staleness(self, max_staleness: int) -> None:
        """Changes the bound; called on all ranks. Before training: with the present or the resumed bound."""


@runtime_checkable
class RewardingData(Protocol):
    """Data module that knows rewards before they are trained on; `RolloutDataModule` implements it."""

    def watch_rewards(self) -> None:
        """Called on all ranks before training starts, by whoever calls `take_rewards`."""

    def take_rewards(self) -> list[float]:
        """Mean rewards of versions whose rollouts are all scored, in order, each once. A collective."""


@runtime_checkable
class DiscardingData(Protocol):
    """Data module that can discard what some versions have sampled; `RolloutDataModule` implements it."""

    def discard_after(self, version: int) -> None:
        """Discards what later versions have sampled; called on all ranks."""


def bounded_data(trainer: AnyTrainer, owner: str) -> BoundedData:
    """Returns the trainer's data module, for the callback `owner`.

    Raises:
        ValueError: the data module has no staleness bound to change.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(data, BoundedData):
        raise ValueError(
            f"{owner} needs a data module with `max_staleness` and `set_max_staleness(int)`, got {type(data).__name__}"
        )
    return data


def configured_bound(data: BoundedData) -> int:
    """Bound that a data module was given: its `configured_bound`, or else the present one."""
    return int(getattr(data, "configured_bound", data.max_staleness))


# -- Actions of `CollapseAlarm`: warn, stop, or lower the staleness bound. Rollbacks are in `rollback` ----------------


class AlarmAction(ABC):
    """Action taken after the step that raised an alarm; called on all ranks."""

    def begin(self, trainer: AnyTrainer) -> None:  # noqa: B027
        """Called when training starts: resets the state of an earlier run, and checks the trainer."""

    def healthy(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:  # noqa: B027
        """Called before an update if all signals are within their limits: the weights are good."""

    def unhealthy(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:  # noqa: B027
        """Called before an update if a signal violates its limit, or in the cooldown after an alarm."""

    def saved(self) -> None:  # noqa: B027
        """Called when a checkpoint is saved, with `state_dict`."""

    @abstractmethod
    def act(self, trainer: AnyTrainer, pl_module: AnyModule) -> str:
        """Takes the action; returns a sentence for the report."""

    def state_dict(self) -> dict[str, Any]:
        """State for the checkpoint: plain values, the same on all ranks."""
        return {}

    def resume(self, trainer: AnyTrainer, state_dict: dict[str, Any]) -> None:  # noqa: B027
        """Restores the state of a resumed run, after `begin`."""


class Warn(AlarmAction):
    """Reports the alarm only."""

    def act(self, trainer: AnyTrainer, pl_module: AnyModule) -> str:
        return "Training continues unchanged."


class Stop(AlarmAction):
    """Stops training after this step (`trainer.should_stop`)."""

    def act(self, trainer: AnyTrainer, pl_module: AnyModule) -> str:
        trainer.should_stop = True
        return "Training stops."


class LowerStaleness(AlarmAction):
    """Lowers the data module's `max_staleness`.

    Args:
        by: versions per alarm.
        minimum: lowest bound.

    Raises:
        ValueError: a setting is out of range; at the start of training, the data module has no bound or cannot change
            it.
    """

    def __init__(self, by: int = 1, minimum: int = 0) -> None:
        check_range("LowerStaleness", "integer >= 1", by=by)
        check_range("LowerStaleness", "integer >= 0", minimum=minimum)
        self.by = by
        self.minimum = minimum
        self._bound: int | None = None

    def begin(self, trainer: AnyTrainer) -> None:
        """Checks that the data module has a bound that can be changed."""
        data = bounded_data(trainer, "LowerStaleness")
        data.set_max_staleness(data.max_staleness)  # raises now, at the start, if the bound cannot be changed
        self._bound = None

    def act(self, trainer: AnyTrainer, pl_module: AnyModule) -> str:
        data = bounded_data(trainer, "LowerStaleness")
        before = data.max_staleness
        after = max(self.minimum, data.max_staleness - self.by)
        if after >= before:
            return f"max_staleness stays at {before}, its minimum."
        data.set_max_staleness(after)
        self._bound = after
        return f"max_staleness was lowered from {before} to {after}."

    def state_dict(self) -> dict[str, Any]:
        return {"bound": self._bound}

    def resume(self, trainer: AnyTrainer, state_dict: dict[str, Any]) -> None:
        """Lowers the bound again, because the data module starts at its configured bound."""
        self._bound = state_dict["bound"]
        data = bounded_data(trainer, "LowerStaleness")
        if self._bound is not None and self._bound < data.max_staleness:
            data.set_max_staleness(self._bound)
