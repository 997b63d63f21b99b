"""Blends two estimators of the policy gradient by the effective number of samples."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from torch.optim import Optimizer

from lit_async_rl.corrections import BlendedIS
from lit_async_rl.stabilizers.signals import Extract, SignalCallback
from lit_async_rl.training.objective import Objective
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class EstimatorBlend(SignalCallback):
    """Sets the share of sequence weights in `model.correction: BlendedIS` by the effective number of samples.

        w_i = prod_t pi(y_it) / mu(y_it)          raw weight of whole completion i, never truncated
        N = (sum w)^2 / sum w^2                   over the step's completions, on all ranks
        share = clip((N~ / min_samples - 1) / 0.5, 0, 1)

    N~ is the geometric mean of N over the `num_steps` steps before: the weights of the batch itself would bias the
    estimate. With few effective samples, token weights replace sequence weights, whose variance is then too large. In
    the first step the share is 0. Not from a paper; the author of VCPO reports that sequence weights need a large
    batch. Without `BlendedIS` it only measures.

    Logs `blend/num_samples` (N) and `blend/share` of the step.

    Example:
        ```python
        import lit_async_rl as rl

        module = rl.PolicyModule(
            rl.asset("sort_policy"),
            loss=rl.Reinforce(),
            proximal=rl.CurrentProximal(),
            correction=rl.BlendedIS(),
            baseline=rl.OptimalBaseline(),
        )
        callbacks = [rl.EstimatorBlend()]
        ```

    Args:
        min_samples: effective samples below which only token weights are used, and only sequence weights from 1.5 times
            as many on. None is a quarter of the step's completions.
        num_steps: steps of the geometric mean.
        optimizer: optimizer of the policy, by position or submodule name; None if there is only one.
        extract: adapter for modules that set no signals, see `lit_async_rl.stabilizers.signals`.

    Raises:
        ValueError: a setting is out of range.
    """

    WIDTH = 0.5  # of the range of N~ / min_samples in which both estimators are used

    def __init__(
        self,
        min_samples: float | None = None,
        num_steps: int = 8,
        optimizer: int | str | None = None,
        extract: Extract | None = None,
    ) -> None:
        super().__init__(optimizer, extract)
        check_range("EstimatorBlend", "positive", min_samples=min_samples)
        check_range("EstimatorBlend", "integer >= 1", num_steps=num_steps)
        self.min_samples = min_samples
        self.num_steps = num_steps
        self._logs: deque[float] = deque(maxlen=num_steps)
        self._least = math.inf  # `min_samples`, or what it is by the last step

    @property
    def without_signals(self) -> str:
        return "keeps the share of the estimators"

    @property
    def share(self) -> float:
        """Share of sequence weights in the next step."""
        if not self._logs:
            return 0.0
        mean = math.exp(math.fsum(self._logs) / len(self._logs))
        return min(1.0, max(0.0, (mean / self._least - 1) / self.WIDTH))

    def reset(self) -> None:
        self._logs.clear()

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._set(pl_module)

    def on_signals_complete(self, trainer: AnyTrainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        """Measures the step, whose micro-batches are done, and sets the share of the next one."""
        signals = self.reduce_signals(optimizer)
        pl_module.log("blend/share", self.share)
        if signals.ess_ratio is None:
            return
        num_samples = signals.ess_ratio * signals.num_samples
        pl_module.log("blend/num_samples", num_samples)
        self._logs.append(math.log(num_samples))
        self._least = signals.num_samples / 4 if self.min_samples is None else self.min_samples
        self._set(pl_module)

    def _set(self, pl_module: AnyModule) -> None:
        objective = getattr(pl_module, "objective", None)
        if isinstance(objective, Objective) and isinstance(objective.correction, BlendedIS):
            objective.correction.share = self.share

    def state_dict(self) -> dict[str, Any]:
        return {"logs": list(self._logs), "least": self._least}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the last steps; `on_train_start` sets the share."""
        self._logs = deque(state_dict["logs"], maxlen=self.num_steps)
        self._least = state_dict.get("least", 32.0) if self.min_samples is None else self.min_samples
