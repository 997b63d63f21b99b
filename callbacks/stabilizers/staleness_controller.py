"""Control of correction, learning rate and staleness bound by the forecast of a collapse."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lit_async_rl.corrections import Correction, SequenceTruncatedIS
from lit_async_rl.stabilizers.collapse import (
    CollapseForecast,
    GainWatch,
    RewardingData,
    StepHealth,
    bounded_data,
    configured_bound,
)
from lit_async_rl.stabilizers.gradients import GradSpaces
from lit_async_rl.stabilizers.rollback import RollBack
from lit_async_rl.stabilizers.signals import Extract, SignalCallback, StepSignals
from lit_async_rl.stabilizers.step_lr import (
    OneStepLearningRate,
    chosen_optimizers,
    is_left_out,
    raw_optimizer,
    unscale_gradients,
)
from lit_async_rl.training.objective import Objective
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class StalenessController(SignalCallback):
    """Corrects for stale data when a collapse is forecast, then lowers rate and bound; rolls back if too late.

        log-odds of `CollapseForecast` > `limit`                    one rung down, at most every `cooldown_steps`
        below `limit - margin` for `calm_steps` steps in a row      one rung up
        half of the gained reward is lost, and not by chance        the healthy weights again, and two rungs down

    `GainWatch` defines this loss of reward. The first rung gives a loss function without ratios the importance weights
    of `correction`, for the rest of the run: weights near 1 cost nothing. The next `max_halvings` rungs halve the
    learning rate, further ones the data module's `max_staleness`, down to `min_staleness`. It never climbs again to a
    rung on which reward was lost. Not from a paper; the bias of a stale gradient is of order lag times rate
    (arXiv:2607.01083), which the last two kinds of rung halve.

    Rewards count when they arrive, version by version; with other data modules than `RolloutDataModule`, when they are
    trained on. A rollback also discards samples of later versions, see `RollBack`.

    Put it before callbacks that change the gradient and before `WeightSync`. Its factor multiplies that of
    `ESSLearningRate`.

    Logs `controller/log_odds`, `controller/corrected`, `controller/lr_scale`, `controller/bound`,
    `controller/num_changes`, `controller/num_rollbacks`.

    Example:
        ```python
        import lit_async_rl as rl

        controller = rl.StalenessController(max_halvings=2, min_staleness=None)  # leaves the bound alone
        ```

    Attributes:
        rung: 0 is the configured run.
        reports: what it did so far.

    Args:
        limit: log-odds of a collapse within 20 steps above which it acts; None is that of `CollapseForecast`.
        margin: log-odds below the limit at which a step is calm.
        correction: first rung of a `PolicyModule` whose loss has neither ratios nor a correction; None is none.
        max_halvings: of the learning rate.
        min_staleness: lowest bound; None leaves the bound alone, which `FixedLag` needs.
        cooldown_steps: between two rungs down; after a new bound, also until the data of the old one are trained on.
        calm_steps: in a row, before a rung up.
        max_rollbacks: to a copy of weights and moments in CPU memory, before training stops; 0 makes no copy.
        copy_every_n_steps: healthy steps between two copies.
        optimizer: optimizer of the policy, by position or submodule name; None if there is only one.
        extract: adapter for modules that set no signals, see `lit_async_rl.stabilizers.signals`.

    Raises:
        ValueError: a setting is out of range; when training starts, the data module has no bound or cannot change it.
    """

    def __init__(
        self,
        limit: float | None = None,
        margin: float = 1.0,
        correction: Correction | None = SequenceTruncatedIS(),  # noqa: B008  frozen
        max_halvings: int = 5,
        min_staleness: int | None = 1,
        cooldown_steps: int = 10,
        calm_steps: int = 20,
        max_rollbacks: int = 5,
        copy_every_n_steps: int = 20,
        optimizer: int | str | None = None,
        extract: Extract | None = None,
    ) -> None:
        super().__init__(optimizer, extract)
        owner = "StalenessController"
        check_range(owner, ">= 0", margin=margin)
        check_range(owner, "integer >= 0", max_halvings=max_halvings, max_rollbacks=max_rollbacks)
        check_range(owner, "integer >= 0", min_staleness=min_staleness)
        check_range(owner, "integer >= 1", cooldown_steps=cooldown_steps, calm_steps=calm_steps)
        check_range(owner, "integer >= 1", copy_every_n_steps=copy_every_n_steps)
        check_range(owner, "finite", limit=limit)
        self.limit = CollapseForecast.LIMIT if limit is None else limit
        self.margin = margin
        self.correction = correction
        self.max_halvings = max_halvings
        self.min_staleness = min_staleness
        self.cooldown_steps = cooldown_steps
        self.calm_steps = calm_steps
        self.rollback = RollBack(copy_every_n_steps, max_rollbacks) if max_rollbacks else None
        self.forecast = CollapseForecast()
        self.gain = GainWatch()
        self._module: AnyModule | None = None  # in training, if its loss can be corrected
        self._objectives: tuple[Objective, ...] = ()  # of that module, as configured and corrected
        self._configured_bound: int | None = None
        self._arrivals: RewardingData | None = None
        self._log_odds: float | None = None
        self._rate: OneStepLearningRate | None = None
        self._spaces = GradSpaces()
        self.reset()

    @property
    def without_signals(self) -> str:
        return "changes nothing"

    @property
    def lr_scale(self) -> float:
        """Factor of the learning rate on the present rung."""
        return 0.5 ** min(max(0, self.rung - self._num_corrections), self.max_halvings)

    # -- Lightning ----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        self.forecast.reset()
        self.gain.reset()
        self.rung = 0
        self.reports: list[str] = []
        self._first_rung = 0  # up to which it may climb: the one below that on which the reward was lost
        self._num_corrections = 0  # rungs that correct
        self._num_calm = 0
        self._cooldown_left = 0
        self._num_discarded = 0  # steps of data that discarded policies have sampled, where they cannot be discarded
        self._lost = 0.0
        self._has_collapsed = False
        self._resumed_rollback: dict[str, Any] | None = None

    def on_fit_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Restores correction and bound of a resumed run before anything is sampled."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        self._arrivals = data if isinstance(data, RewardingData) else None
        if self._arrivals is not None:
            self._arrivals.watch_rewards()
        self._begin_correction(pl_module)
        if self.rollback is not None:
            self.rollback.begin(trainer)
            if self._resumed_rollback is not None:
                self.rollback.resume(trainer, self._resumed_rollback)
                self._resumed_rollback = None
        if self.min_staleness is not None:
            data = bounded_data(trainer, "StalenessController")
            self._configured_bound = configured_bound(data)
        self.rung = min(self.rung, self._deepest)  # the checkpoint may be of a longer ladder
        if (bound := self._bound()) is not None:
            # raises now, at the start, if the bound cannot be changed; another callback may have restored a lower one
            data.set_max_staleness(min(bound, data.max_staleness))

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._spaces = GradSpaces()
        for optimizer in chosen_optimizers(trainer, pl_module, self.optimizer):
            self._rate = OneStepLearningRate(raw_optimizer(optimizer))

    def on_signals_complete(self, trainer: AnyTrainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        """Forecasts, scales the learning rate of the step, and logs."""
        unscale_gradients(trainer, optimizer)
        signals = self.reduce_signals(optimizer)
        raw = raw_optimizer(optimizer)
        norm = None if is_left_out(trainer, raw) else self._norm(trainer.strategy.model or pl_module, raw)
        self._log_odds = self._observe(signals, norm)
        if self.rollback is not None and self._is_worth_a_copy():
            self.rollback.healthy(trainer, pl_module)
        if self._rate is not None:
            self._rate.scale(self.lr_scale)
        if self._log_odds is not None:
            pl_module.log("controller/log_odds", self._log_odds)
        if self._num_corrections:
            pl_module.log("controller/corrected", float(self.rung > 0))
        pl_module.log("controller/lr_scale", self.lr_scale)
        if (bound := self._bound()) is not None:
            pl_module.log("controller/bound", float(bound))
        pl_module.log("controller/num_changes", float(len(self.reports)))
        if self.rollback is not None:
            pl_module.log("controller/num_rollbacks", float(self.rollback.num_rollbacks))

    def on_step_complete(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Changes correction, rate, bound or weights."""
        if self._has_collapsed and self.rollback is not None:
            self._report(trainer, f"half of the gained reward was lost. {self.rollback.act(trainer, pl_module)}")
            self._first_rung = self.rung + 1
            self._move(trainer, 2, "and so that it is not lost again")
            if self._arrivals is None:
                # what is on its way was sampled by policies that are gone: nothing is concluded from its rewards
                self._num_discarded = _steps_of_bound(trainer)
            self.gain.forget_steps()
            self.forecast.forget_steps()
            self._lost = 0.0
            self._has_collapsed = False
        elif self._cooldown_left > 0:
            self._cooldown_left -= 1
        elif self._log_odds is not None and self._log_odds > self.limit:
            share = 1 / (1 + math.exp(-self._log_odds))
            self._move(trainer, 1, f"a collapse within 20 steps has a probability of {share:.0%}")
        elif self._num_calm >= self.calm_steps and self.rung > max(self._first_rung, self._num_corrections):
            self._move(trainer, -1, f"the last {self._num_calm} steps were calm")

    def close(self) -> None:
        """Restores module and optimizer."""
        super().close()
        if self._rate is not None:
            self._rate.close()
            self._rate = None
        if self._module is not None:
            self._module.objective = self._objectives[0]
            self._module = None

    # -- One step -----------------------------------------------------------------------------------------------------

    def _observe(self, signals: StepSignals, grad_norm: float | None) -> float | None:
        seen = StepHealth(ess_ratio=signals.ess_ratio, grad_norm=grad_norm)
        log_odds = self.forecast.observe(seen)
        rewards = [] if signals.reward is None else [signals.reward]
        if self._arrivals is not None:
            rewards = self._arrivals.take_rewards()
        if self._num_discarded > 0:
            self._num_discarded -= 1
            rewards = []
        for reward in rewards:
            self._lost = self.gain.observe(reward)
            self._has_collapsed |= self.gain.is_collapse
        is_calm = log_odds is not None and log_odds < self.limit - self.margin
        self._num_calm = self._num_calm + 1 if is_calm else 0
        return log_odds

    def _is_worth_a_copy(self) -> bool:
        """Whether to keep the weights: the first ones, and those of calm steps that have lost little.

        After a loss of the reward none are the first ones, though the forecast begins anew.

        Signals lag behind the weights by the age of the data: below the limit, weights may already be on their way to a
        collapse.
        """
        is_first = self._first_rung == 0 and self._log_odds is None and not self.forecast.is_ready
        return is_first or (self._num_calm > 0 and self._lost < GainWatch.COLLAPSE / 2)

    def _norm(self, root: nn.Module, optimizer: Optimizer) -> float:
        space = self._spaces.of(root, optimizer)
        return space.norm(space.gradients())

    def _bound(self) -> int | None:
        """Staleness bound of the present rung; None where it is left alone."""
        if self._configured_bound is None or self.min_staleness is None:
            return None
        halved = self._configured_bound >> max(0, self.rung - self._num_corrections - self.max_halvings)
        return max(halved, min(self.min_staleness, self._configured_bound))

    @property
    def _deepest(self) -> int:
        """The last rung that changes something."""
        halvings = 0  # of the bound
        if self._configured_bound is not None and self.min_staleness is not None:
            while self._configured_bound >> halvings > self.min_staleness:
                halvings += 1
        return self._num_corrections + self.max_halvings + halvings

    def _begin_correction(self, pl_module: AnyModule) -> None:
        """Prepares the rung that corrects, if the module's loss can be corrected; a resumed run may be on it."""
        objective = getattr(pl_module, "objective", None)
        before = self._num_corrections
        self._num_corrections = 0
        if self.correction is not None and isinstance(objective, Objective):
            corrected = objective.corrected(self.correction)
            if corrected is not None:
                self._module = pl_module
                self._objectives = (objective, corrected)
                self._num_corrections = 1
        if self.rung > 0:  # the checkpoint may be of another setting
            shift = self._num_corrections - before
            self.rung += shift
            if shift and self._first_rung > 0:
                self._first_rung = max(1, self._first_rung + shift)  # never again the configured run, which lost reward
                self.rung = max(self.rung, self._first_rung)
            self._correct()

    def _correct(self) -> None:
        if self._module is not None and self.rung > 0:
            self._module.objective = self._objectives[1]

    def _move(self, trainer: AnyTrainer, rungs: int, why: str) -> None:
        """Moves by so many rungs, as far as there are any, and reports what changed."""
        present = self.rung
        scale = self.lr_scale
        bound = self._bound()
        self.rung = min(max(0, present + rungs), self._deepest)
        self._num_calm = 0
        self._cooldown_left = self.cooldown_steps
        changes = []
        if present == 0 and self._num_corrections:
            self._correct()
            changes.append(f"the loss is corrected by {self.correction}")
        if scale != self.lr_scale:
            changes.append(f"the learning rate is multiplied by {self.lr_scale:g}")
        new = self._bound()
        if new is not None and new != bound:
            waits = _steps_of_bound(trainer)
            bounded_data(trainer, "StalenessController").set_max_staleness(new)
            self._cooldown_left += max(waits, _steps_of_bound(trainer))
            changes.append(f"max_staleness is {new} now, and was {bound}")
        if not changes:  # there is no lower rung
            return
        self._report(trainer, f"{why}: {' and '.join(changes)}")

    def _report(self, trainer: AnyTrainer, words: str) -> None:
        self.reports.append(f"StalenessController at step {trainer.global_step}: {words}")
        rank_zero_warn(self.reports[-1])

    # -- Checkpoints --------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: AnyTrainer, pl_module: AnyModule, checkpoint: dict[str, Any]) -> None:
        if self.rollback is not None:
            self.rollback.saved()

    def state_dict(self) -> dict[str, Any]:
        return {
            "forecast": self.forecast.state_dict(),
            "gain": self.gain.state_dict(),
            "rung": self.rung,
            "num_corrections": self._num_corrections,
            "has_collapsed": self._has_collapsed,
            "first_rung": self._first_rung,
            "num_calm": self._num_calm,
            "cooldown_left": self._cooldown_left,
            "num_discarded": self._num_discarded,
            "reports": list(self.reports),
            "rollback": None if self.rollback is None else self.rollback.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores rung and signals; `on_fit_start` sets correction and bound."""
        self.forecast.load_state_dict(state_dict["forecast"])
        self.gain.load_state_dict(state_dict["gain"])
        self.rung = state_dict["rung"]
        self._num_corrections = state_dict.get("num_corrections", 0)  # checkpoints of earlier commits know no such rung
        self._has_collapsed = state_dict.get("has_collapsed", False)
        # checkpoints of earlier commits call it otherwise
        self._first_rung = state_dict["first_rung" if "first_rung" in state_dict else "highest_rung"]
        self._num_calm = state_dict["num_calm"]
        self._cooldown_left = state_dict["cooldown_left"]
        self._num_discarded = state_dict["num_discarded"]
        self.reports = list(state_dict["reports"])
        self._resumed_rollback = state_dict["rollback"]


def _steps_of_bound(trainer: AnyTrainer) -> int:
    """Steps until all data on their way have been trained on; 0 without a known bound."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    bound = getattr(data, "max_staleness", None)
    return 0 if bound is None else (bound + 1) * getattr(data, "weight_sync_steps", 1)
