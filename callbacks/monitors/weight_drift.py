"""How far the weights move while data wait, and how far they may: the theory of stale data, measured."""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_async_rl.stabilizers.gradients import GradSpace, GradSpaces, Pieces
from lit_async_rl.stabilizers.signals import Extract, SignalCallback
from lit_async_rl.stabilizers.step_lr import raw_optimizer
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

SEED = 0  # fixed, so that all ranks look at the same entries of what each of them has
KEEP = 0.9  # of a step's weight in the estimate of the radius, at the next one
MIN_GROWTH = 0.5  # of a distance with the lag, as its power: a random walk
MAX_GROWTH = 1.0  # a straight line


class WeightDriftMonitor(SignalCallback):
    """Logs how far the weights have moved since the data were sampled, and the distance that halves their worth.

    With a learning rate eta, an update of norm G per unit of it, data S versions old and T steps of training, the bias
    of a stale gradient is of order S eta G, which must stay below the radius of what a batch tolerates, and the policy
    has moved by at most T eta G (arXiv:2607.01083). Here the four are measured:

        drift/step      |theta_t - theta_t-1|                    eta G, for any optimizer
        drift/stale     |theta_t - theta_t-S|, S the mean age    at most S eta G; less if steps turn
        drift/path      sum of `drift/step`                      T eta G
        drift/total     |theta_t - theta_0|                      where that has led to
        drift/radius    d at which exp(-a d^2) is 1/2            R: half of the effective sample size is left
        drift/half_lag  S at which `drift/stale` would be R      the lag that the present rate allows

    The effective sample size falls as exp(-a d^2) if log-ratios are normal with a deviation that grows with the
    distance d; a is fitted to -log of the measured one, by least squares over about ten steps. The distance grows with
    a power of the lag, between 1/2 (a random walk) and 1 (a straight line), as from `drift/step` to `drift/stale`. The
    form of the fit, the power and one half are our choices; theory has orders of magnitude only. The distance at which
    a policy is lost cannot be measured before it is, so `drift/total` has no counterpart.

    Distances are of the trained parameters, over all shards, estimated from a random sample of entries (exact up to
    `num_entries`; else with a relative error of about 1 / sqrt(`num_entries`) for updates of even size). A resumed run
    begins anew.

    Example:
        ```python
        import lit_async_rl as rl

        rl.fit(
            "lit_async_rl/assets/small_sort_policy",
            rl.SortDigits(6),
            rl.exact_match,
            max_steps=3,
            callbacks=[rl.WeightDriftMonitor()],
            accelerator="cpu",
        )
        ```

    Args:
        num_entries: of the weights on each rank, to look at.
        max_lag: versions to remember; older data are not measured. Each takes 4 `num_entries` bytes.
        optimizer: optimizer whose parameters to measure, by position or submodule name; None if there is only one.
        extract: adapter for modules that set no signals, see `lit_async_rl.stabilizers.signals`.

    Raises:
        ValueError: a setting is out of range, or there are several optimizers and none was chosen.
    """

    def __init__(
        self,
        num_entries: int = 16_384,
        max_lag: int = 64,
        optimizer: int | str | None = None,
        extract: Extract | None = None,
    ) -> None:
        super().__init__(optimizer, extract)
        check_range("WeightDriftMonitor", "integer >= 1", num_entries=num_entries, max_lag=max_lag)
        self.num_entries = num_entries
        self.max_lag = max_lag
        self.reset()

    @property
    def without_signals(self) -> str:
        return "does not know the age of the data"

    def reset(self) -> None:
        self.radius: float | None = None
        self._spaces = GradSpaces()
        self._sampled_of: GradSpace | None = None
        self._are_trained: list[bool] = []
        self._places: list[Tensor] = []  # of the entries, in this rank's piece of each parameter
        self._factors: list[float] = []
        self._first: Pieces = []
        self._last: Pieces = []
        # of each, newest last: number of steps before it, and its weights
        self._versions: OrderedDict[int, tuple[int, Pieces]] = OrderedDict()
        self._path = 0.0
        self._sums = [0.0, 0.0]  # of d^2 (-log e) and of d^4
        self._num_steps = 0

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.reset()  # strategies have sharded the parameters since `__init__`

    @torch.no_grad()
    def on_signals_complete(self, trainer: AnyTrainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        """Measures before the step: the weights are those that the gradient is of."""
        signals = self.reduce_signals(optimizer)
        space = self._spaces.of(trainer.strategy.model or pl_module, raw_optimizer(optimizer))
        now = self._sample(space)
        version = getattr(pl_module, "version", None)
        if not isinstance(version, int):  # of a module that counts none: each step is one
            version = self._num_steps
        # those that sampled: with `weight_sync_steps` a version trains several steps, which the engine does not see
        self._versions.setdefault(version, (self._num_steps, now))
        while len(self._versions) > self.max_lag + 1:
            self._versions.popitem(last=False)
        age = 0 if signals.staleness is None else round(signals.staleness)
        sampled_at, before = self._versions.get(version - age, (self._num_steps, None))
        num_steps_old = self._num_steps - sampled_at
        self._num_steps += 1
        pairs = [difference(now, then) for then in (self._last, self._first, before or now)]
        # in float64: the sample is small, and `drift/path` adds the rounding of all steps
        squares = space.dots(*((pair, pair) for pair in pairs), dtype=torch.float64)
        step, total, stale = squares.sqrt().tolist()
        self._last = now
        if not math.isfinite(total):
            return  # the weights are lost, which others say
        self._path += step
        if self._num_steps > 1:
            pl_module.log("drift/step", step)
            pl_module.log("drift/path", self._path)
            pl_module.log("drift/total", total)
        if before is None or signals.staleness is None:
            return
        pl_module.log("drift/stale", stale)
        if signals.ess_ratio is not None and stale > 0:
            self._fit(stale, signals.ess_ratio)
        if self.radius is not None:
            pl_module.log("drift/radius", self.radius)
            if stale > 0:
                lag = half_lag(num_steps_old, step=step, stale=stale, radius=self.radius)
                pl_module.log("drift/half_lag", lag / self._steps_per_version())

    def _steps_per_version(self) -> float:
        """Of the versions remembered; 1 while there is only one."""
        oldest = next(iter(self._versions))
        newest = next(reversed(self._versions))
        num_steps = self._versions[newest][0] - self._versions[oldest][0]
        return num_steps / (newest - oldest) if newest > oldest else 1.0

    def _sample(self, space: GradSpace) -> Pieces:
        """Entries of the weights, scaled so that their squares sum to those of all; in float32."""
        weights = space.weights()
        are_trained = [param.requires_grad for param in space.params]
        if self._sampled_of is not space or self._are_trained != are_trained:
            self._sampled_of = space
            self._are_trained = are_trained
            self._choose(weights, are_trained)
            self._versions.clear()
            self._first = []
            self._last = []
        chosen = [
            weight.reshape(-1)[places].float() * factor
            for weight, places, factor in zip(weights, self._places, self._factors, strict=True)
        ]
        found = space.joined(chosen)  # few long pieces: a step of a small model has no time for many short ones
        self._first = self._first or found
        self._last = self._last or found
        return found

    def _choose(self, weights: list[Tensor], are_trained: list[bool]) -> None:
        """Frozen weights, such as those under adapters, do not move: no entry is spent on them."""
        sizes = [weight.numel() if is_trained else 0 for weight, is_trained in zip(weights, are_trained, strict=True)]
        share = self.num_entries / max(1, sum(sizes))
        generator = torch.Generator().manual_seed(SEED)
        self._places = []
        self._factors = []
        for weight, size in zip(weights, sizes, strict=True):
            number = size if share >= 1 else math.ceil(share * size)
            if number == size:
                places = torch.arange(number)
            else:
                places = torch.randint(size, (number,), generator=generator)
            self._places.append(places.to(weight.device))
            self._factors.append(math.sqrt(size / number) if number else 0.0)

    def _fit(self, distance: float, ess_ratio: float) -> None:
        worth = -math.log(min(1.0, ess_ratio))
        self._sums = [KEEP * self._sums[0] + distance**2 * worth, KEEP * self._sums[1] + distance**4]
        slope = self._sums[0] / self._sums[1] if self._sums[1] > 0 else 0.0
        self.radius = math.sqrt(math.log(2) / slope) if slope > 0 else None


def difference(now: Pieces, then: Pieces) -> Pieces:
    """Of each piece."""
    return [None if a is None or b is None else a - b for a, b in zip(now, then, strict=True)]


def half_lag(lag: int, *, step: float, stale: float, radius: float) -> float:
    """Lag at which the distance would be `radius`, if it is `step` at a lag of 1 and `stale` at `lag`, in steps."""
    growth = MAX_GROWTH
    if lag > 1 and step > 0:
        growth = min(MAX_GROWTH, max(MIN_GROWTH, math.log(stale / step) / math.log(lag)))
    return float(lag * (radius / stale) ** (1 / growth))
