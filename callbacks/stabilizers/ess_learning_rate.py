"""Scales the learning rate by the effective sample size."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lit_async_rl.stabilizers.signals import Extract, SignalCallback, StepSignals
from lit_async_rl.stabilizers.step_lr import OneStepLearningRate, chosen_optimizers, raw_optimizer
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class ESSLearningRate(SignalCallback):
    """Scales the learning rate of each step by its effective sample size (VCPO, arXiv:2602.17616).

        w_i = prod_t pi(y_it) / mu(y_it)          raw weight of whole completion i, never truncated
        rho = (sum w)^2 / (B sum w^2)             over the B completions of the step, on all ranks
        lr <- lr * min(1, rho / base_ess_ratio) ** power          for this step only

    `power=0.5` is the paper's rule for AdamW, `power=1` its rule for SGD, `power=0` changes nothing. From the paper:
    formula, both rules, the limit of 1, raw weights, no smoothing. Ours: log space (the published code overflows), one
    sum over all ranks (there, ranks without records scale to zero), the floor, the measured base. Decoupled weight
    decay is scaled with the learning rate.

    The scheduler never sees the changed rate. NaN log-ratios count as weight 0, which lowers rho; a step without
    signals keeps its learning rate. There is one warning of each.

    Logs `ess/ratio` (rho), `ess/lr_scale`, `ess/num_samples`, `ess/num_broken`.

    The module sets `stabilizer_signals` (see `lit_async_rl.stabilizers.signals`). In a custom loop: `add(signals)` for
    each micro-batch, then `apply(optimizer)` before `optimizer.step()`.

    Example:
        ```python
        import lightning.pytorch as pl

        import lit_async_rl as rl

        trainer = pl.Trainer(callbacks=[rl.ESSLearningRate(power=0.5)], accelerator="cpu", logger=False)
        ```

    Args:
        power: exponent; 0.5 for AdamW, 1 for SGD.
        base_ess_ratio: rho of on-policy data; at and above it the learning rate is unchanged.
        measure_steps: use the mean rho of this many first steps instead of `base_ess_ratio`. They keep their learning
            rate, and should be nearly on-policy.
        floor: smallest factor of the learning rate.
        optimizer: optimizer to scale, by position or submodule name; None if there is only one.
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
        super().__init__(optimizer, extract)
        check_range("ESSLearningRate", "integer >= 0", measure_steps=measure_steps)
        check_range("ESSLearningRate", ">= 0", power=power)
        check_range("ESSLearningRate", "in (0, 1]", base_ess_ratio=base_ess_ratio)
        check_range("ESSLearningRate", "in [0, 1]", floor=floor)
        self.power = power
        self.base_ess_ratio = base_ess_ratio
        self.measure_steps = measure_steps
        self.floor = floor
        self._rates: dict[int, OneStepLearningRate] = {}
        self._measured = [0, 0.0]  # steps, sum of their rho
        self._warned = False

    def lr_scale(self, ess_ratio: float) -> float:
        """Factor of the learning rate: min(1, rho / base) ** power, at least `floor`."""
        steps, total = self._measured
        base = total / steps if self.measure_steps else self.base_ess_ratio
        return max(self.floor, min(1.0, ess_ratio / base) ** self.power)

    def add(self, signals: Any) -> None:
        """Adds the signals of one micro-batch, without a trainer."""
        self._signals.add(signals)

    def apply(self, optimizer: Optimizer) -> dict[str, float]:
        """Scales the learning rate of the next (or running) step; returns the metrics."""
        optimizer = raw_optimizer(optimizer)
        signals = self.reduce_signals(optimizer)
        scale = self._scale(signals)
        self._rate_of(optimizer).scale(scale)
        seen = {"ess/ratio": signals.ess_ratio} if signals.ess_ratio is not None else {}
        return seen | {
            "ess/lr_scale": scale,
            "ess/num_samples": float(signals.num_samples),
            "ess/num_broken": float(signals.num_broken),
        }

    def _scale(self, signals: StepSignals) -> float:
        if signals.num_broken and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"ESSLearningRate: {signals.num_broken} of {signals.num_samples} completions have an importance weight "
                "whose logarithm is NaN or infinite. If the logarithm is NaN or -inf, the weight counts as 0; if it "
                "is +inf, the weight counts as larger than every finite one"
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

    @property
    def without_signals(self) -> str:
        return "keeps its learning rate"

    # -- Lightning ----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        self._measured = [0, 0.0]

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        super().on_train_start(trainer, pl_module)
        for optimizer in chosen_optimizers(trainer, pl_module, self.optimizer):
            self._rate_of(raw_optimizer(optimizer))

    def on_signals_complete(self, trainer: AnyTrainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        """Scales the learning rate of the step, and logs."""
        for name, value in self.apply(optimizer).items():
            pl_module.log(name, value)

    def close(self) -> None:
        """Restores module and optimizers."""
        super().close()
        for rate in self._rates.values():
            rate.close()
        self._rates = {}

    def state_dict(self) -> dict[str, Any]:
        return {"measured": list(self._measured)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._measured = list(state_dict["measured"])
