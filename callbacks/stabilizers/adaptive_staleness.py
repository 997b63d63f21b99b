"""As stale as the data can bear: a closed loop from effective sample size (or KL) to the staleness bound."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

from lit_async_rl.errors import InvariantError
from lit_async_rl.stabilizers.signals import Extract, SignalCollector, StepSignals
from lit_async_rl.stabilizers.staleness_bound import bounded_data
from lit_async_rl.stabilizers.step_lr import check_choice, chosen_index
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class AdaptiveStaleness(pl.Callback):
    """Raises and lowers the data module's `max_staleness`, between `min_staleness` and the configured bound.

        x <- smoothing * x + (1 - smoothing) * ESS ratio of the step
        x < target - band   lower the bound: halve it
        x > target + band   raise it by one

    Halving and adding one (as TCP does) reacts to trouble at once and probes with care. Data sampled under the old
    bound keeps arriving for a while, so after a change the loop waits until all of it has been trained on: as many
    optimizer steps as the larger of both bounds, and one. Ours; no paper does this.

    With `max_kl` set the loop follows the mean KL(mu || pi) per token (k3) instead: above `max_kl` lowers, below half
    of it raises.

    Logs `staleness/bound`, `staleness/smoothed_ess_ratio` (or `_kl`).

    Args:
        target_ess_ratio: of whole completions, see `StepSignals`; 0 never lowers the bound.
        band: half-width of the range around the target in which nothing changes.
        max_kl: follow the KL instead of the effective sample size.
        min_staleness: lowest bound; the configured `max_staleness` is the highest.
        smoothing: share of the old average.
        optimizer: whose steps count, by position or by the name of the submodule it trains; None where there is one.
        extract: adapter for modules that set no signals, see `lit_async_rl.stabilizers.signals`.

    Raises:
        ValueError: a setting is out of range, or the data module has no bound or cannot change it.
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
        for name, value in dict(target_ess_ratio=target_ess_ratio, band=band, smoothing=smoothing).items():
            if not 0 <= value <= 1:
                raise ValueError(f"AdaptiveStaleness: {name} must be in [0, 1], got {value}")
        if max_kl is not None and max_kl <= 0:
            raise ValueError(f"AdaptiveStaleness: max_kl must be positive, got {max_kl}")
        if min_staleness < 0:
            raise ValueError(f"AdaptiveStaleness: min_staleness must be >= 0, got {min_staleness}")
        self.target_ess_ratio, self.band, self.max_kl = target_ess_ratio, band, max_kl
        self.min_staleness, self.smoothing = min_staleness, smoothing
        self.optimizer = optimizer
        self._signals = SignalCollector(extract)
        self._smoothed: float | None = None
        self._bound: int | None = None
        self._resumed_bound: int | None = None
        self._highest = 0
        self._wait = 0
        self._pending: StepSignals | None = None

    def next_bound(self, bound: int, highest: int) -> int:
        """What the smoothed signal calls for."""
        if self._smoothed is None:
            raise InvariantError("the bound was to change before anything was measured")
        if self.max_kl is not None:
            lower, higher = self._smoothed > self.max_kl, self._smoothed < self.max_kl / 2
        else:
            lower = self._smoothed < self.target_ess_ratio - self.band
            higher = self._smoothed > self.target_ess_ratio + self.band
        wanted = bound // 2 if lower else bound + 1 if higher else bound
        return min(highest, max(min(self.min_staleness, highest), wanted))

    # -- Lightning ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: AnyTrainer, pl_module: AnyModule, stage: str) -> None:
        """Finds the signals."""
        if stage == "fit":
            self._signals.attach(pl_module)

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Takes the configured bound as the highest."""
        check_choice(trainer, pl_module, self.optimizer, "AdaptiveStaleness")
        if self.optimizer is None and len(trainer.optimizers) > 1:
            raise ValueError("AdaptiveStaleness: several optimizers, choose one: optimizer=<position or name>")
        data = bounded_data(trainer, "AdaptiveStaleness")
        self._highest = data.max_staleness
        data.set_max_staleness(self._highest)  # one that cannot change its bound says so now, not after hours

    def on_before_backward(self, trainer: AnyTrainer, pl_module: AnyModule, loss: Tensor) -> None:
        """Collects, once for each micro-batch."""
        self._signals.collect(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: AnyTrainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        """Measures."""
        if chosen_index(trainer, pl_module, optimizer, self.optimizer) is not None:
            self._pending = self._signals.reduce(optimizer.param_groups[0]["params"][0].device)

    def on_train_batch_end(
        self, trainer: AnyTrainer, pl_module: AnyModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Acts, once the step is over and the data module is at rest."""
        if self._pending is None:
            return
        signals, self._pending = self._pending, None
        data = bounded_data(trainer, "AdaptiveStaleness")
        if self._resumed_bound is not None:  # not earlier: the producer must be running
            data.set_max_staleness(min(self._resumed_bound, self._highest))
            self._resumed_bound = None
        before = data.max_staleness
        self._bound = self._react(signals, before)
        if self._bound != before:
            self._wait = max(before, self._bound) + 1
            data.set_max_staleness(self._bound)
        pl_module.log("staleness/bound", float(self._bound))
        if self._smoothed is not None:
            pl_module.log(f"staleness/smoothed_{'ess_ratio' if self.max_kl is None else 'kl'}", self._smoothed)

    def _react(self, signals: StepSignals, bound: int) -> int:
        value = signals.ess_ratio if self.max_kl is None else signals.kl
        if value is None:
            return bound
        old = value if self._smoothed is None else self._smoothed
        self._smoothed = self.smoothing * old + (1 - self.smoothing) * value
        if self._wait > 0:
            self._wait -= 1
            return bound
        return self.next_bound(bound, self._highest)

    def teardown(self, trainer: AnyTrainer, pl_module: AnyModule, stage: str) -> None:
        """Leaves the module as it was."""
        self._signals.detach()

    def on_exception(self, trainer: AnyTrainer, pl_module: AnyModule, exception: BaseException) -> None:
        """Leaves the module as it was."""
        self._signals.detach()

    @property
    def state_key(self) -> str:
        """Keeps the checkpointed state of several of them apart."""
        return self._generate_state_key(optimizer=self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The bound and the state of the loop."""
        return {"smoothed": self._smoothed, "bound": self._bound, "wait": self._wait}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores them; the bound is set after the first step."""
        self._smoothed, self._wait = state_dict["smoothed"], state_dict["wait"]
        self._bound = self._resumed_bound = state_dict["bound"]
