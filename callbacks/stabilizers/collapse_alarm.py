"""Notices a collapse early, says in words what happens, and acts."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lit_async_rl.errors import SetupError
from lit_async_rl.stabilizers.alarm_actions import AlarmAction, Warn
from lit_async_rl.stabilizers.collapse import CollapseWatch, StepHealth
from lit_async_rl.stabilizers.gradients import GradSpace, GradSpaces
from lit_async_rl.stabilizers.signals import Extract, SignalCollector
from lit_async_rl.stabilizers.step_lr import check_choice, chosen_index, raw_optimizer, unscale_gradients
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class CollapseAlarm(pl.Callback):
    """Watches effective sample size, KL, gradient norm, cosine, entropy and reward; acts when a limit stays broken.

    Put it first in the list of callbacks: it should see the gradient before others change it, and a rollback must come
    before `WeightSync` publishes. All limits are ours (see `CollapseWatch`); None watches nothing, and with all of them
    None nothing is ever done. What is measured over all ranks is the same on every rank, and so is the decision.

    Logs what it watches as `collapse/{ess_ratio,kl,grad_norm,cosine,entropy,reward}`, and `collapse/num_alarms`.

    Attributes:
        reports: the alarms so far, in words.

    Args:
        action: `Warn()` (also None), `LowerStaleness()`, `RollBack()`, `RollBackToCheckpoint()` or `Stop()`.
        min_ess_ratio: smallest effective sample size, as a share of the step's completions.
        max_kl: largest mean KL(mu || pi) per token (k3).
        max_grad_norm_factor: largest gradient norm, in medians of the last `window` healthy steps.
        max_cosine: largest cosine of consecutive gradients; keeps a copy of the last gradient.
        min_entropy: smallest mean entropy per token.
        max_reward_drop: largest fall of the mean reward of `window` steps below its best so far, in rewards.
        patience: steps in a row that must break a limit.
        window: steps that medians and means are taken over.
        cooldown_steps: steps after an alarm in which there is no other one.
        optimizer: whose gradient, by position or by the name of the submodule it trains; None where there is only one.
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
        if cooldown_steps < 0:
            raise ValueError(f"CollapseAlarm: cooldown_steps must be >= 0, got {cooldown_steps}")
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
        self.optimizer = optimizer
        self.reports: list[str] = []
        self._signals = SignalCollector(extract)
        self._spaces = GradSpaces()
        self._previous: tuple[GradSpace, list[Tensor | None]] | None = None
        self._quiet_steps = 0
        self._alarm: list[str] = []
        self._stepped = False
        self._resumed: dict[str, Any] | None = None

    def setup(self, trainer: AnyTrainer, pl_module: AnyModule, stage: str) -> None:
        """Finds the signals."""
        if stage == "fit":
            self._signals.attach(pl_module)

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Checks the choice of optimizer."""
        check_choice(trainer, pl_module, self.optimizer, "CollapseAlarm")
        if self.optimizer is None and len(trainer.optimizers) > 1:
            raise ValueError("CollapseAlarm: several optimizers, choose one: optimizer=<position or submodule name>")
        self._previous, self._spaces = None, GradSpaces()

    def on_before_backward(self, trainer: AnyTrainer, pl_module: AnyModule, loss: Tensor) -> None:
        """Collects, once for each micro-batch."""
        self._signals.collect(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: AnyTrainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        """Measures and judges."""
        if chosen_index(trainer, pl_module, optimizer, self.optimizer) is None:
            return
        unscale_gradients(trainer, optimizer)
        signals = self._signals.reduce(optimizer.param_groups[0]["params"][0].device)
        norm, cosine = self._gradient(trainer, raw_optimizer(optimizer))
        seen = StepHealth(
            ess_ratio=signals.ess_ratio,
            kl=signals.kl,
            grad_norm=norm,
            cosine=cosine,
            entropy=signals.entropy,
            reward=signals.reward,
        )
        broken = self.watch.observe(seen)
        self._alarm = broken if self._quiet_steps == 0 else []
        if self.watch.is_healthy and self._quiet_steps == 0:
            self.action.healthy(trainer, pl_module)
        self._quiet_steps = max(0, self._quiet_steps - 1)
        self._stepped = True
        values = {name: value for name, value in vars(seen).items() if value is not None and math.isfinite(value)}
        for name, value in (values | {"num_alarms": float(len(self.reports))}).items():
            pl_module.log(f"collapse/{name}", value)

    def on_train_batch_end(
        self, trainer: AnyTrainer, pl_module: AnyModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Acts, once the step is over."""
        if not self._stepped:
            return
        self._stepped = False
        if self._resumed is not None:
            self.action.resume(trainer, self._resumed)
            self._resumed = None
        if self._alarm:
            report = f"CollapseAlarm at step {trainer.global_step}: {'; '.join(self._alarm)}. "
            report += self.action.act(trainer, pl_module)
            self.reports.append(report)
            rank_zero_warn(report)
            self.watch.forgive()
            self._quiet_steps = self.cooldown_steps
            self._previous = None

    def teardown(self, trainer: AnyTrainer, pl_module: AnyModule, stage: str) -> None:
        """Leaves the module as it was."""
        self._signals.detach()

    def on_exception(self, trainer: AnyTrainer, pl_module: AnyModule, exception: BaseException) -> None:
        """Leaves the module as it was."""
        self._signals.detach()

    def _gradient(self, trainer: AnyTrainer, optimizer: Optimizer) -> tuple[float | None, float | None]:
        """Norm, and cosine with the last gradient, as far as they are watched; None if there is no gradient."""
        if self.watch.max_grad_norm_factor is None and self.watch.max_cosine is None:
            return None, None
        if trainer.strategy.model is None:
            raise SetupError("the Trainer has no model yet")
        space = self._spaces.of(trainer.strategy.model, optimizer)
        gradients = space.gradients()
        if self.watch.max_cosine is None:
            return space.norms(gradients)[0].item() or None, None
        known = self._previous is not None and self._previous[0] is space
        previous = self._previous[1] if known and self._previous else [None] * len(gradients)
        gg, gp, pp = space.dots((gradients, gradients), (gradients, previous), (previous, previous))[:, 0].tolist()
        if not 0 < gg < math.inf:
            return gg**0.5 or None, None
        self._previous = (space, [None if g is None else g.clone() for g in gradients])
        return gg**0.5, max(-1.0, min(1.0, gp / gg**0.5 / pp**0.5)) if pp > 0 else None

    @property
    def state_key(self) -> str:
        """Keeps the checkpointed state of several of them apart."""
        return self._generate_state_key(optimizer=self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Counts and history."""
        return {
            "watch": self.watch.state_dict(),
            "action": self.action.state_dict(),
            "quiet_steps": self._quiet_steps,
            "reports": list(self.reports),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores them."""
        self.watch.load_state_dict(state_dict["watch"])
        self._quiet_steps = state_dict["quiet_steps"]
        self.reports = list(state_dict["reports"])
        self._resumed = state_dict["action"]
