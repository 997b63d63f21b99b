"""Small steps while the data says little: the learning rate follows the effective sample size."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lit_async_rl.stabilizers.signals import Extract, SignalCollector, StepSignals
from lit_async_rl.stabilizers.step_lr import OneStepLearningRate, check_choice, chosen_index, raw_optimizer
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class ESSLearningRate(pl.Callback):
    """Scales the learning rate of each step by its effective sample size (VCPO, arXiv:2602.17616).

        w_i = prod_t pi(y_it) / mu(y_it)          raw weight of whole completion i, never truncated
        rho = (sum w)^2 / (B sum w^2)             over the B completions of the step, on all ranks
        lr <- lr * min(1, rho / base_ess_ratio) ** power          for this step only

    `power=0.5` is the paper's rule for AdamW, `power=1` its rule for SGD, `power=0` changes nothing. From the paper:
    formula, both rules, the limit of 1, raw weights, no smoothing. Ours: log space (the published code overflows), one
    sum over all ranks (in the published code ranks without records scale to zero), the floor, the measured base.
    Decoupled weight decay is multiplied by the learning rate and so shrinks with it.

    The scheduler never sees the changed rate. NaN log-ratios count as weight 0 (and so lower rho). A step without
    any signal keeps its learning rate. Both are warned of once and logged.

    Logs `ess/ratio` (rho), `ess/lr_scale`, `ess/num_samples`, `ess/num_broken`.

    Example: `Trainer(callbacks=[ESSLearningRate(base_ess_ratio=0.55)])` for a module that sets `stabilizer_signals`
    (see `lit_async_rl.stabilizers.signals`). In a loop of your own: `add(signals)` for each micro-batch, then
    `apply(optimizer)` before `optimizer.step()`.

    Args:
        power: 0.5 is the square-root rule, 1 the linear one.
        base_ess_ratio: rho of on-policy data, which keeps the full learning rate.
        measure_steps: take the mean rho of this many first steps (which keep the full learning rate) instead of
            `base_ess_ratio`; staleness should be low in them.
        floor: smallest factor.
        optimizer: which one, by position or by the name of the submodule it trains; None where there is only one.
        extract: adapter for modules that set no signals.

    Raises:
        ValueError: a setting is out of range, or there are several optimizers and none was chosen.
    """

    def __init__(
        self,
        power: float = 0.5,
        base_ess_ratio: float = 1.0,
        measure_steps: int = 0,
        floor: float = 0.0,
        optimizer: int | str | None = None,
        extract: Extract | None = None,
    ) -> None:
        if power < 0:
            raise ValueError(f"ESSLearningRate: power must be >= 0, got {power}")
        if not 0 < base_ess_ratio <= 1:
            raise ValueError(f"ESSLearningRate: base_ess_ratio must be in (0, 1], got {base_ess_ratio}")
        if measure_steps < 0:
            raise ValueError(f"ESSLearningRate: measure_steps must be >= 0, got {measure_steps}")
        if not 0 <= floor <= 1:
            raise ValueError(f"ESSLearningRate: floor must be in [0, 1], got {floor}")
        self.power, self.base_ess_ratio, self.measure_steps, self.floor = power, base_ess_ratio, measure_steps, floor
        self.optimizer = optimizer
        self._signals = SignalCollector(extract)
        self._rates: dict[int, OneStepLearningRate] = {}
        self._measured = [0, 0.0]  # steps, sum of their rho
        self._warned = False

    def lr_scale(self, ess_ratio: float) -> float:
        """min(1, rho / base) ** power, not below the floor."""
        steps, total = self._measured
        base = total / steps if self.measure_steps else self.base_ess_ratio
        return max(self.floor, min(1.0, ess_ratio / base) ** self.power)

    def add(self, signals: Any) -> None:
        """One micro-batch's signals; for loops without a trainer."""
        self._signals.add(signals)

    def apply(self, optimizer: Optimizer) -> dict[str, float]:
        """Sets the learning rate for the optimizer's next (or running) step; returns what it saw and did."""
        optimizer = raw_optimizer(optimizer)
        signals = self._signals.reduce(optimizer.param_groups[0]["params"][0].device)
        scale = self._scale(signals)
        self._rate_of(optimizer).scale(scale)
        seen = {"ess/ratio": signals.ess_ratio} if signals.ess_ratio is not None else {}
        return seen | {
            "ess/lr_scale": scale,
            "ess/num_samples": float(signals.num_samples),
            "ess/num_broken": float(signals.num_broken),
        }

    def _scale(self, signals: StepSignals) -> float:
        if (signals.ess_ratio is None or signals.num_broken) and not self._warned:
            self._warned = True
            rank_zero_warn(
                "ESSLearningRate: a step without log_ratio signals (or with all of them masked) keeps its learning rate"
                if signals.ess_ratio is None
                else f"ESSLearningRate: {signals.num_broken} of {signals.num_samples} log-weights are NaN or infinite; "
                "NaN counts as weight 0"
            )
        if signals.ess_ratio is None:
            return 1.0
        if self._measured[0] < self.measure_steps:
            self._measured = [self._measured[0] + 1, self._measured[1] + signals.ess_ratio]
            return 1.0
        return self.lr_scale(signals.ess_ratio)

    def _rate_of(self, optimizer: Optimizer) -> OneStepLearningRate:
        if id(optimizer) not in self._rates:
            self._rates[id(optimizer)] = OneStepLearningRate(optimizer)
        return self._rates[id(optimizer)]

    # -- Lightning ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: AnyTrainer, pl_module: AnyModule, stage: str) -> None:
        """Finds the signals."""
        if stage == "fit":
            self._signals.attach(pl_module)

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Puts its hooks on the optimizers."""
        check_choice(trainer, pl_module, self.optimizer, "ESSLearningRate")
        if self.optimizer is None and len(trainer.optimizers) > 1:
            raise ValueError("ESSLearningRate: several optimizers, choose one: optimizer=<position or submodule name>")
        for optimizer in trainer.optimizers:
            if chosen_index(trainer, pl_module, optimizer, self.optimizer) is not None:
                self._rate_of(raw_optimizer(optimizer))

    def on_before_backward(self, trainer: AnyTrainer, pl_module: AnyModule, loss: torch.Tensor) -> None:
        """Collects, once for each micro-batch."""
        self._signals.collect(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: AnyTrainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        """Acts."""
        if chosen_index(trainer, pl_module, optimizer, self.optimizer) is None:
            self._signals.pass_over()
            return
        for name, value in self.apply(optimizer).items():
            pl_module.log(name, value)

    def teardown(self, trainer: AnyTrainer, pl_module: AnyModule, stage: str) -> None:
        """Leaves module and optimizers as they were."""
        self._close()

    def on_exception(self, trainer: AnyTrainer, pl_module: AnyModule, exception: BaseException) -> None:
        """Leaves module and optimizers as they were."""
        self._close()

    def _close(self) -> None:
        self._signals.detach()
        for rate in self._rates.values():
            rate.close()
        self._rates = {}

    @property
    def state_key(self) -> str:
        """Keeps the checkpointed state of several of them apart."""
        return self._generate_state_key(optimizer=self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The measured base."""
        return {"measured": list(self._measured)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores it."""
        self._measured = list(state_dict["measured"])
