"""Detection of a collapse of training."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lit_async_rl.stabilizers.alignment import ReferenceGradients, cosine
from lit_async_rl.stabilizers.collapse import AlarmAction, CollapseWatch, StepHealth, Warn
from lit_async_rl.stabilizers.gradients import GradSpaces
from lit_async_rl.stabilizers.signals import Extract, SignalCallback
from lit_async_rl.stabilizers.step_lr import finds_scale, is_left_out, raw_optimizer, unscale_gradients
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class CollapseAlarm(SignalCallback):
    """Monitors effective sample size, KL, gradient norm, cosine, entropy and reward; acts on persistent violations.

    Put it first in the list of callbacks: it must read the gradient before others change it, and roll back before
    `WeightSync` publishes. The limits are not from a paper (see `CollapseWatch`); None disables one, and without limits
    the callback changes nothing. Signals are reduced over ranks, so that all decide alike.

    Logs `collapse/{ess_ratio,kl,grad_norm,cosine,entropy,reward}`, and `collapse/num_alarms`.

    Attributes:
        reports: messages of the alarms so far.

    Args:
        action: `Warn()` (also None), `LowerStaleness()`, `RollBack()`, `RollBackToCheckpoint()` or `Stop()`.
        min_ess_ratio: smallest effective sample size, as a share of the step's completions.
        max_kl: largest mean KL(mu || pi) per token (k3).
        max_grad_norm_factor: largest gradient norm, as a multiple of the median over the last `window` healthy steps.
        max_cosine: largest cosine of consecutive gradients; keeps a copy of the last one.
        min_entropy: smallest mean entropy per token.
        max_reward_drop: largest fall of the mean reward of `window` steps below its best so far, in rewards.
        patience: consecutive steps that must violate a limit.
        window: steps of the median and the mean.
        cooldown_steps: steps after an alarm without another one.
        optimizer: optimizer of the monitored gradient, by position or submodule name; None if there is only one.
        extract: adapter for modules that set no signals, see `lit_async_rl.stabilizers.signals`.

    Raises:
        ValueError: a setting is out of range, or there are several optimizers and none was chosen.
    """

    def __init__(
        self,
        action: AlarmAction | None = None,
        min_ess_ratio: float | None = 0.02,
        max_kl: float | None = 1.0,
        max_grad_norm_factor: float | None = 20.0,
        max_cosine: float | None = None,
        min_entropy: float | None = None,
        max_reward_drop: float | None = None,
        patience: int = 3,
        window: int = 20,
        cooldown_steps: int = 20,
        optimizer: int | str | None = None,
        extract: Extract | None = None,
    ) -> None:
        super().__init__(optimizer, extract)
        check_range("CollapseAlarm", "integer >= 0", cooldown_steps=cooldown_steps)
        self.watch = CollapseWatch(
            min_ess_ratio=min_ess_ratio,
            max_kl=max_kl,
            max_grad_norm_factor=max_grad_norm_factor,
            max_cosine=max_cosine,
            min_entropy=min_entropy,
            max_reward_drop=max_reward_drop,
            patience=patience,
            window=window,
        )
        self.action = action or Warn()
        self.cooldown_steps = cooldown_steps
        self._spaces = GradSpaces()
        self._previous = ReferenceGradients()
        self._alarm: list[str] = []
        self.reset()

    @property
    def without_signals(self) -> str:
        limits = ("min_ess_ratio", "max_kl", "min_entropy", "max_reward_drop")
        unwatched = [name for name in limits if getattr(self.watch, name) is not None]
        return f"cannot watch {', '.join(unwatched)}" if unwatched else ""

    def reset(self) -> None:
        self.watch.reset()
        self._cooldown_left = 0
        self.reports: list[str] = []
        self._resumed: dict[str, Any] | None = None

    def on_fit_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Restores the action of a resumed run before anything is sampled."""
        self.action.begin(trainer)
        if self._resumed is not None:
            self.action.resume(trainer, self._resumed)
            self._resumed = None

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._spaces = GradSpaces()
        self._previous = ReferenceGradients()
        self._alarm = []

    def on_signals_complete(self, trainer: AnyTrainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        """Compares the step with the limits, and logs."""
        unscale_gradients(trainer, optimizer)
        signals = self.reduce_signals(optimizer)
        raw = raw_optimizer(optimizer)
        norm, c = self._gradient(trainer.strategy.model or pl_module, raw)
        if finds_scale(trainer, raw) or is_left_out(trainer, raw):
            norm = None  # of a step that is skipped
        seen = StepHealth(
            ess_ratio=signals.ess_ratio,
            kl=signals.kl,
            grad_norm=norm,
            cosine=c,
            entropy=signals.entropy,
            reward=signals.reward,
        )
        broken = self.watch.observe(seen)
        self._alarm = broken if self._cooldown_left == 0 else []
        if self.watch.is_healthy and self._cooldown_left == 0:
            self.action.healthy(trainer, pl_module)
        else:
            self.action.unhealthy(trainer, pl_module)
        self._cooldown_left = max(0, self._cooldown_left - 1)
        values = {name: value for name, value in vars(seen).items() if value is not None and math.isfinite(value)}
        for name, value in (values | {"num_alarms": float(len(self.reports))}).items():
            pl_module.log(f"collapse/{name}", value)

    def on_step_complete(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Raises the alarm."""
        if self._alarm:
            report = f"CollapseAlarm at step {trainer.global_step}: {'; '.join(self._alarm)}. "
            report += self.action.act(trainer, pl_module)
            self.reports.append(report)
            rank_zero_warn(report)
            self.watch.reset_counts()
            self._cooldown_left = self.cooldown_steps
            self._previous = ReferenceGradients()

    def _gradient(self, root: nn.Module, optimizer: Optimizer) -> tuple[float | None, float | None]:
        """Norm, and cosine with the previous gradient; None if no limit needs them, or there is none."""
        if self.watch.max_grad_norm_factor is None and self.watch.max_cosine is None:
            return None, None
        space = self._spaces.of(root, optimizer)
        gradients = space.gradients()
        gg, gp, pp = self._previous.products(space, gradients).tolist()
        if self.watch.max_cosine is not None and 0 < gg < math.inf:
            self._previous.keep(space, gradients)
        return math.sqrt(gg) or None, cosine(gg, gp, pp)

    def on_save_checkpoint(self, trainer: AnyTrainer, pl_module: AnyModule, checkpoint: dict[str, Any]) -> None:
        self.action.saved()

    def state_dict(self) -> dict[str, Any]:
        return {
            "watch": self.watch.state_dict(),
            "action": self.action.state_dict() if self._resumed is None else self._resumed,
            "quiet_steps": self._cooldown_left,
            "reports": list(self.reports),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.watch.load_state_dict(state_dict["watch"])
        self._cooldown_left = state_dict["quiet_steps"]
        self.reports = list(state_dict["reports"])
        self._resumed = state_dict["action"]
