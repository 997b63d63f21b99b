"""Closed-loop control of the staleness bound."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from lit_async_rl.errors import InvariantError
from lit_async_rl.stabilizers.collapse import bounded_data, configured_bound
from lit_async_rl.stabilizers.signals import Extract, SignalCallback
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class AdaptiveStaleness(SignalCallback):
    """Raises and lowers the data module's `max_staleness`, between `min_staleness` and the configured bound.

        x <- smoothing * x + (1 - smoothing) * ESS ratio of the step
        x < target - band   lower the bound: halve it
        x > target + band   raise it by one

    Additive increase and multiplicative decrease, as in TCP congestion control. After a change it waits for max(old,
    new) + 1 publications, until all data sampled under the old bound are trained on. Not from a paper.

    With `max_kl` it follows the mean KL(mu || pi) per token (k3) instead: lowers the bound above `max_kl`, and raises
    it below half of that.

    Logs `staleness/bound`, `staleness/smoothed_ess_ratio` (or `_kl`).

    Args:
        target_ess_ratio: target effective sample size over completions (see `StepSignals`); 0 never lowers the bound.
        band: half-width of the range around the target where the bound stays.
        max_kl: KL threshold in nats per token, in place of the effective sample size.
        min_staleness: lowest bound; the configured `max_staleness` is the highest.
        smoothing: weight of the old value in the moving average.
        optimizer: optimizer of the measured steps, by position or submodule name; None if there is only one.
        extract: adapter for modules that set no signals, see `lit_async_rl.stabilizers.signals`.

    Raises:
        ValueError: a setting is out of range, or the data module has no bound that it can change.
    """

    def __init__(
        self,
        target_ess_ratio: float = 0.5,
        band: float = 0.1,
        max_kl: float | None = None,
        min_staleness: int = 0,
        smoothing: float = 0.8,
        optimizer: int | str | None = None,
        extract: Extract | None = None,
    ) -> None:
        super().__init__(optimizer, extract)
        owner = "AdaptiveStaleness"
        check_range(owner, "in [0, 1]", target_ess_ratio=target_ess_ratio, band=band, smoothing=smoothing)
        check_range(owner, "> 0", max_kl=max_kl)
        check_range(owner, "integer >= 0", min_staleness=min_staleness)
        self.target_ess_ratio = target_ess_ratio
        self.band = band
        self.max_kl = max_kl
        self.min_staleness = min_staleness
        self.smoothing = smoothing
        self._max_bound = 0
        self.reset()

    def next_bound(self, bound: int, highest: int) -> int:
        """Next bound by the smoothed signal, within `min_staleness` and `highest`.

        Raises:
            InvariantError: no signal was measured yet.
        """
        if self._smoothed is None:
            raise InvariantError("AdaptiveStaleness.next_bound was called before a step's ESS or KL was measured")
        if self.max_kl is not None:
            lower = self._smoothed > self.max_kl
            higher = self._smoothed < self.max_kl / 2
        else:
            lower = self._smoothed < self.target_ess_ratio - self.band
            higher = self._smoothed > self.target_ess_ratio + self.band
        wanted = bound // 2 if lower else bound + 1 if higher else bound
        return min(highest, max(min(self.min_staleness, highest), wanted))

    @property
    def without_signals(self) -> str:
        return "keeps its staleness bound"

    # -- Lightning ----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        self._smoothed: float | None = None
        self._value: float | None = None  # of the last step
        self._num_waiting_steps = 0
        self._bound: int | None = None
        self._resumed_bound: int | None = None

    def on_fit_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Restores the bound of a resumed run before anything is sampled."""
        data = bounded_data(trainer, "AdaptiveStaleness")
        self._max_bound = configured_bound(data)
        present = data.max_staleness  # another callback may have restored a lower one
        resumed = self._resumed_bound
        self._resumed_bound = None
        # also without a resumed bound, because data that cannot change it raises here, before anything is sampled
        data.set_max_staleness(present if resumed is None else min(resumed, present))

    def on_signals_complete(self, trainer: AnyTrainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        """Measures the step."""
        signals = self.reduce_signals(optimizer)
        self._value = signals.ess_ratio if self.max_kl is None else signals.kl

    def on_step_complete(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Updates the bound."""
        data = bounded_data(trainer, "AdaptiveStaleness")
        before = data.max_staleness
        self._bound = self._updated_bound(self._value, before)
        if self._bound != before:
            self._num_waiting_steps = (max(before, self._bound) + 1) * getattr(data, "weight_sync_steps", 1)
            data.set_max_staleness(self._bound)
        pl_module.log("staleness/bound", float(self._bound))
        if self._smoothed is not None:
            pl_module.log(f"staleness/smoothed_{'ess_ratio' if self.max_kl is None else 'kl'}", self._smoothed)

    def _updated_bound(self, value: float | None, bound: int) -> int:
        if value is None:
            return bound
        old = value if self._smoothed is None else self._smoothed
        self._smoothed = self.smoothing * old + (1 - self.smoothing) * value
        if self._num_waiting_steps > 0:
            self._num_waiting_steps -= 1
            return bound
        return self.next_bound(bound, self._max_bound)

    def state_dict(self) -> dict[str, Any]:
        return {"smoothed": self._smoothed, "bound": self._bound, "wait": self._num_waiting_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the smoothed signal; `on_fit_start` sets the bound."""
        self._smoothed = state_dict["smoothed"]
        self._num_waiting_steps = state_dict["wait"]
        self._bound = self._resumed_bound = state_dict["bound"]
